"""Times a training step of a small hybrid model on the CPU: ours, a patched model of transformers, and one as it is.

    python benchmarks/training_step.py --threads 1 --tokens 512

All have the same parameters and the same batch; transformers runs its fallbacks in plain torch. Steps take turns, so
that whatever else the machine does falls on all alike. A table shows the median and the fastest step of each, by the
clock and in time of the processors, which other programs do not lengthen as much; with `--profile` the operators that
took longest follow.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from adjoint.integrations.transformers import patch
from adjoint.models import HybridConfig, HybridLM

SIZES: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 48, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": True,
}  # fmt: skip
DENSE = HybridConfig(model_type="qwen3_5_text", **SIZES)
SPARSE = HybridConfig(
    model_type="qwen3_5_moe_text", **SIZES, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64,
    shared_expert_intermediate_size=64,
)  # fmt: skip


def their_model(config: HybridConfig, ours: HybridLM) -> Any:
    """Transformers' model with the parameters of ours."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

    kind = Qwen3_5MoeForCausalLM if config.num_experts else Qwen3_5ForCausalLM
    model = kind(kind.config_class(**config.to_dict()))
    model.load_state_dict(ours.state_dict())
    return model


def contestants(config: HybridConfig) -> dict[str, Any]:
    ours = HybridLM(config)
    patched, whole, theirs = (their_model(config, ours) for _ in range(3))
    patch(patched, verbose=False)
    patch(whole, loss=True, verbose=False)
    return {"HybridLM": ours, "patched": patched, "patched, with the loss": whole, "transformers": theirs}


def step_of(model: Any, ids: Tensor) -> Callable[[], float]:
    """A step of training: forward, backward and the optimiser's update; it returns the loss."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        optimiser.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        return float(loss.detach())

    return step


def time_in_turns(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of each, by the clock and of the processors, round by round; the order changes with the round."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    names = list(steps)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            clock, work = time.perf_counter(), time.process_time()
            steps[name]()
            times[name].append((1e3 * (time.perf_counter() - clock), 1e3 * (time.process_time() - work)))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--sparse", action="store_true", help="a mixture of experts, not a dense model")
    parser.add_argument("--profile", action="store_true", help="the operators that take longest, of each")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    models = contestants(SPARSE if arguments.sparse else DENSE)
    ids = torch.randint(SIZES["vocab_size"], (arguments.batch, arguments.tokens))
    steps = {name: step_of(model, ids) for name, model in models.items()}
    losses = {name: (step(), step())[0] for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-4:
        raise SystemExit(f"the models do not compute the same loss: {losses}")
    count = sum(p.numel() for p in models["HybridLM"].parameters())
    print(f"{count / 1e6:.1f} M parameters, {arguments.batch} × {arguments.tokens} tokens, {arguments.threads} threads")
    for name, times in time_in_turns(steps, arguments.rounds).items():
        clock, work = zip(*times, strict=True)
        print(
            f"  {name:24s} median {statistics.median(clock):7.1f} ms, fastest {min(clock):7.1f}; "
            f"processors {statistics.median(work):7.1f} ms, least {min(work):7.1f}"
        )
    for name, step in steps.items() if arguments.profile else ():
        with profile(activities=[ProfilerActivity.CPU]) as record:
            step()
        print(f"\n{name}\n{record.key_averages().table(sort_by='self_cpu_time_total', row_limit=22)}")


if __name__ == "__main__":
    main()
