"""Times a block of a hybrid model, forward and backward: patched, and transformers with FLA, with Liger, and in torch.

    PYTHONPATH=.:peers python benchmarks/block.py --shape moe --tokens 16384 --profile

The block is the text model of transformers with `--layers` decoder layers, one of Gated DeltaNet by default, and every
fourth one of attention; it is given embeddings and an upstream gradient. FLA and Liger run where they are installed;
FLA's causal convolution takes the place of transformers' own, and what really ran is printed. All have the same
parameters; outputs and gradients are compared before a time is taken. Runs take turns.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from fla_functions import fla_functions
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from adjoint.integrations.transformers import patch

HEADS: dict[str, Any] = {
    "num_attention_heads": 16, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "vocab_size": 64,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "moe": HEADS | {
        "hidden_size": 2048, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "dense": HEADS | {"hidden_size": 4096, "num_key_value_heads": 4, "intermediate_size": 12288},
    "tiny": {
        "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "num_experts": 4,
        "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "vocab_size": 64,
    },
}  # fmt: skip

FARTHEST = {torch.bfloat16: 0.05, torch.float32: 1e-4}
"""How far outputs and gradients of two implementations may be from each other, by their norms: two roundings' worth."""


@dataclass
class Contestant:
    """A model, the functions that its module of transformers calls meanwhile, and what was measured."""

    name: str
    model: Any
    functions: dict[str, Callable[..., Any]]
    ran: set[str] = field(default_factory=set)
    milliseconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def modeling_of(shape: str) -> Any:
    family = "qwen3_5" if shape == "dense" else "qwen3_5_moe"
    return import_module(f"transformers.models.{family}.modeling_{family}")


def text_model(shape: str, layers: int, device: str, dtype: torch.dtype) -> Any:
    modeling = modeling_of(shape)
    kind = modeling.Qwen3_5TextModel if shape == "dense" else modeling.Qwen3_5MoeTextModel
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(kind.config_class(**SHAPES[shape], num_hidden_layers=layers)).to(dtype)
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):  # decays of a trained model: states that remember
                torch.nn.init.uniform_(parameter, -4, 0)
    return model.train()


def original(function: Any) -> Any:
    """Transformers' own torch function beneath what it has chosen, which may be FLA's."""
    return getattr(function, "__wrapped__", function)


def contestants(shape: str, layers: int, device: str, dtype: torch.dtype, names: list[str]) -> list[Contestant]:
    modeling = modeling_of(shape)
    torch_functions = {
        name: original(getattr(modeling, name)) for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    }
    functions_of = {"patched": torch_functions, "torch": torch_functions}
    if device == "cuda":
        with suppress(ImportError):
            functions_of |= dict.fromkeys(("FLA", "FLA and Liger"), fla_functions())
    entries = []
    for name in names:
        if name not in functions_of:
            print(f"{name}: not here")
            continue
        model = text_model(shape, layers, device, dtype)
        if name == "patched":
            patch(model)
        if name == "FLA and Liger" and not apply_liger(shape, model):
            continue
        entries.append(Contestant(name, model, functions_of[name]))
    return entries


def apply_liger(shape: str, model: Any) -> bool:
    """Liger's norms and feed-forward layers in one model; says whether that worked."""
    modeling = modeling_of(shape)
    before = dict(vars(modeling))
    try:
        liger = import_module("liger_kernel.transformers")
        name = "apply_liger_kernel_to_qwen3_5" if shape == "dense" else "apply_liger_kernel_to_qwen3_5_moe"
        getattr(liger, name)(model=model, fused_linear_cross_entropy=False)
    except Exception as error:
        print(f"Liger does not reach this model: {error!r}")
        return False
    finally:
        vars(modeling).update(before)  # it replaces classes for the whole process as well
    return True


@contextmanager
def running(contestant: Contestant, shape: str) -> Iterator[None]:
    """Inside, transformers calls the contestant's functions, which note that they ran."""
    modeling = modeling_of(shape)
    before = {name: getattr(modeling, name) for name in contestant.functions}

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            contestant.ran.add(function.__qualname__)
            return function(*arguments, **options)

        return call

    for name, function in contestant.functions.items():
        setattr(modeling, name, noted(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(modeling, name, function)


def step(contestant: Contestant, x: Tensor, upstream: Tensor, shape: str) -> tuple[Tensor, Tensor]:
    """A forward and a backward: the output, and the gradient of the input."""
    x = x.detach().requires_grad_()
    contestant.model.zero_grad()
    with running(contestant, shape):
        y = contestant.model(inputs_embeds=x, use_cache=False).last_hidden_state
        y.backward(upstream)
    assert x.grad is not None
    return y.detach(), x.grad


def distance(result: Tensor, other: Tensor) -> float:
    return float((result.double() - other.double()).norm() / other.double().norm())


def measure(contestant: Contestant, x: Tensor, upstream: Tensor, shape: str) -> float:
    """Milliseconds of one step; the most memory beyond the parameters and their gradients is kept."""
    if not x.is_cuda:
        import time

        begin = time.perf_counter()
        step(contestant, x, upstream, shape)
        return 1e3 * (time.perf_counter() - begin)
    contestant.model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step(contestant, x, upstream, shape)
    end.record()
    end.synchronize()
    contestant.peak_bytes = torch.cuda.max_memory_allocated() - before
    return float(begin.elapsed_time(end))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="moe")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", default=["patched", "FLA", "FLA and Liger", "torch"])
    parser.add_argument("--profile", action="store_true", help="the kernels of the patched block")
    parser.add_argument("--save", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    shape, device = arguments.shape, arguments.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    entries = contestants(shape, arguments.layers, device, dtype, arguments.only)
    hidden = SHAPES[shape]["hidden_size"]
    generator = torch.Generator(device).manual_seed(1)
    x, upstream = (
        torch.randn(1, arguments.tokens, hidden, device=device, dtype=dtype, generator=generator) for _ in range(2)
    )
    print(f"{shape}: {arguments.layers} layers, {arguments.tokens} tokens, {dtype}, torch {torch.__version__}")
    results = {entry.name: step(entry, x, upstream, shape) for entry in entries}
    wrong = []
    for name, result in results.items():
        far = [distance(mine, other) for mine, other in zip(result, results[entries[0].name], strict=True)]
        print(f"  {name:14s} from {entries[0].name}: output {far[0]:.1e}, input's gradient {far[1]:.1e}")
        if not max(far) <= FARTHEST[dtype]:
            wrong.append(name)
    del results
    for _ in range(arguments.rounds):
        for entry in entries:
            entry.milliseconds.append(measure(entry, x, upstream, shape))
    rows = []
    for entry in entries:
        middle = statistics.median(entry.milliseconds)
        experts = getattr(entry.model.config, "_experts_implementation", None)
        rows.append({"name": entry.name, "milliseconds": middle, "tokens_per_second": arguments.tokens / middle * 1e3})
        rows[-1] |= {"peak_bytes": entry.peak_bytes, "ran": sorted(entry.ran), "experts": experts}
        print(
            f"  {entry.name:14s} {middle:8.2f} ms  {rows[-1]['tokens_per_second']:10.0f} tokens/s  "
            f"{entry.peak_bytes / 2**30:6.2f} GiB   {', '.join(sorted(entry.ran)) or 'adjoint'}"
            + (f"; experts {experts}" if experts and entry.name != "patched" else "")
        )
    if arguments.save:
        facts = {"shape": shape, "sizes": SHAPES[shape], "layers": arguments.layers, "tokens": arguments.tokens}
        arguments.save.write_text(json.dumps(facts | {"torch": torch.__version__, "rows": rows}, indent=2) + "\n")
    if arguments.profile:
        activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as record:
            step(entries[0], x, upstream, shape)
            if device == "cuda":
                torch.cuda.synchronize()
        order = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        print(record.key_averages().table(sort_by=order, row_limit=24, max_name_column_width=64))
    if wrong:
        raise SystemExit(f"{', '.join(wrong)} and {entries[0].name} do not compute the same: their times mean nothing")


if __name__ == "__main__":
    main()
