"""Times steps of `adjoint train` at the 1b preset, and the same model in transformers with FLA and Liger, in one loop.

    PYTHONPATH=.:peers python benchmarks/train_1b.py --models ours theirs --profile

Rows are of random tokens, one sequence each. Both models have the same configuration, begin with the same weights, take
the same steps (loss, clipping, AdamW, float32 weights beside bfloat16 ones), and their first losses are compared. With
`--bits` two short runs of a shallower model, and one that is resumed, are compared bit for bit.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from fla_functions import fla_functions
from rich.console import Console
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from adjoint.models import HybridLM
from adjoint.train import machine
from adjoint.train.options import Options
from adjoint.train.presets import PRESETS, Preset
from adjoint.train.report.flops import flops_of_token, peak_of
from adjoint.train.run import read_options, train
from adjoint.train.step.loop import Trainer
from adjoint.train.step.objective import Objective, Sums
from adjoint.train.step.optimizer import Optimizers
from adjoint.train.step.ranks import Ranks
from adjoint.train.step.weights import Weights
from adjoint.train.text.stream import Batch, Stream

APART = 0.02
"""How far the first losses of two models may be from each other in bfloat16, relatively."""


class TheirObjective(nn.Module):
    """Transformers' model with FLA's rule and convolution, and Liger's norms, feed-forward layers and loss."""

    sparse_layers = 0

    def __init__(self, model: Any, length: int) -> None:
        super().__init__()
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        self.model, self._length = model, length
        self._loss = LigerFusedLinearCrossEntropyLoss(reduction="sum", ignore_index=-100)

    def forward(self, batch: Batch, choices: Tensor | None = None, *, with_balance: bool = True) -> Sums:
        hidden = self.model.model(batch.tokens.view(-1, self._length), use_cache=False).last_hidden_state
        nats = self._loss(self.model.lm_head.weight, hidden.flatten(0, 1), batch.labels.flatten())
        return Sums(nats, nats.new_zeros(()))


def their_model(ours: HybridLM) -> Any:
    """The same weights in transformers, with the peers' functions in the places of its own."""
    modeling = import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    model = modeling.Qwen3_5ForCausalLM(modeling.Qwen3_5ForCausalLM.config_class(**ours.config.to_dict()))
    model.load_state_dict(ours.state_dict(), strict=False)
    model.tie_weights()
    liger = import_module("liger_kernel.transformers")
    try:
        liger.apply_liger_kernel_to_qwen3_5(model=model, fused_linear_cross_entropy=False)
    except (AttributeError, TypeError) as error:
        print(f"theirs: Liger's norms and feed-forward layers do not reach this model: {error!r}; its loss does")

    functions = fla_functions()
    functions["chunk_gated_delta_rule"] = functions["torch_chunk_gated_delta_rule"]  # as other versions name it
    used = [name for name in functions if hasattr(modeling, name)]
    for name in used:
        setattr(modeling, name, functions[name])
    print(f"theirs: FLA's functions stand for {', '.join(used)}")
    return model


def trainer(objective: Any, options: Options, stream: Stream, ranks: Ranks) -> Trainer:
    objective.model.to(ranks.device).train()
    weights = Weights(objective, torch.bfloat16 if ranks.device.type == "cuda" else torch.float32, ranks)
    return Trainer(options, objective, weights, Optimizers(weights.named, options), stream, ranks, Path("."))


def time_steps(name: str, run: Trainer, steps: int, flops: float | None, peak: float | None) -> dict[str, Any]:
    device, length = run.ranks.device, run.options.batch_rows * run.options.sequence_length
    losses, seconds = [], []
    begin = time.perf_counter()
    first = run.step(0).loss
    print(f"{name}: the first step took {time.perf_counter() - begin:.1f} s, its loss is {first:.4f}", flush=True)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        losses.append(run.step(step).loss)  # reads the loss: the device has done all but the optimizer's work
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    result: dict[str, Any] = {"model": name, "first_loss": first, "ms": [round(1e3 * x, 2) for x in seconds]}
    result |= {"tokens_per_second": round(length / median), "tokens": length}
    if flops and peak:
        result["tf_per_s"] = round(flops * length / median / 1e12, 1)
        result["share_of_matrix_ceiling"] = round(flops * length / median / 1e12 / peak, 3)
    if device.type == "cuda":
        result["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 1)
    print(json.dumps(result), flush=True)
    return result


def show_profile(run: Trainer) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        run.step(20)
        if run.ranks.device.type == "cuda":
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if run.ranks.device.type == "cuda" else "self_cpu_time_total"
    print(trace.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=70), flush=True)


def compare_bits(device: str) -> bool:
    """Two runs of eight steps, and one of four that is resumed: equal losses and weights."""
    deep = PRESETS["1b"]
    model = {**deep.model, "num_hidden_layers": 4}
    if device == "cpu":
        model |= {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
        model |= {"head_dim": 32, "linear_num_key_heads": 1, "linear_num_value_heads": 2}
        model |= {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
    PRESETS["1b"] = Preset(model, deep.training)
    options = Options(
        preset="1b", steps=8, batch_rows=4, sequence_length=1024 if device == "cuda" else 64, checkpoint_every=4,
        device=device, sample_tokens=0, heldout_bytes=4000, tensorboard="off", learning_rate=1e-3,
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as name:
            quiet = Console(quiet=True)
            folders = [Path(name) / text for text in ("one", "two")]
            for folder in folders:
                train(options, folder, console=quiet)
            results = [_bits(folder) for folder in folders]
            import shutil

            shutil.rmtree(folders[1] / "checkpoints" / "step-00000008")
            train(read_options(folders[1], {}), folders[1], resume=True, console=quiet)
            results.append(_bits(folders[1]))
    finally:
        PRESETS["1b"] = deep
    equal = results[0] == results[1] == results[2]
    print(f"bits of two runs and of a resumed one: {'equal' if equal else 'DIFFERENT'}; losses {results[0][0]}")
    return equal


def _bits(folder: Path) -> tuple[list[str], bytes]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss_bits"] for row in rows if "loss" in row], (folder / "model" / "model.safetensors").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["ours"], choices=["ours", "theirs"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--preset", default="1b")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--no-deterministic", action="store_true")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--save", type=Path)
    chosen = parser.parse_args()
    device = torch.device(chosen.device)
    ranks = Ranks(0, 1, device)
    config = PRESETS[chosen.preset].config(chosen.vocabulary)
    config = config.replace(num_hidden_layers=chosen.layers, layer_types=config.layer_types[: chosen.layers])
    options = Options(
        preset=chosen.preset, steps=100, batch_rows=chosen.rows, sequence_length=chosen.length,
        optimizer=chosen.optimizer, packing=False, device=chosen.device,
    ).complete()  # fmt: skip
    tokens = torch.randint(0, chosen.vocabulary, (64 * chosen.rows * chosen.length,), dtype=torch.int32)
    stream = Stream([tokens], chosen.length, seed=0, packing=False)
    makers: dict[str, Callable[[HybridLM], Any]] = {
        "ours": Objective, "theirs": lambda model: TheirObjective(their_model(model), chosen.length),
    }  # fmt: skip
    results, passed = [], True
    with machine.set_up(not chosen.no_deterministic, 0):
        flops, peak = flops_of_token(config, chosen.length), peak_of(device)
        print(
            f"{torch.__version__}, {config.num_hidden_layers} layers, {flops} operations a token, {peak} TF/s",
            flush=True,
        )
        for name in chosen.models:
            torch.manual_seed(0)
            with torch.device(device):
                start = HybridLM(config)
            # The peers' kernels add with atomics in places: deterministic mode would refuse their torch parts.
            torch.use_deterministic_algorithms(name == "ours" and not chosen.no_deterministic)
            run = trainer(makers[name](start), options, stream, ranks)
            results.append(time_steps(name, run, chosen.steps, flops, peak))
            if chosen.profile:
                show_profile(run)
            del run, start
        if len(results) == 2:
            ratio = results[0]["tokens_per_second"] / results[1]["tokens_per_second"]
            apart = abs(results[0]["first_loss"] / results[1]["first_loss"] - 1)
            print(f"ours over theirs: {ratio:.2f} times the tokens/s; first losses {apart:.1e} apart")
            passed = apart < APART
    if chosen.save:
        chosen.save.write_text(json.dumps(results, indent=1))
    if chosen.bits:
        passed = compare_bits(chosen.device) and passed
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
