"""Times a block of a hybrid model, forward and backward: patched, and transformers with FLA, with Liger, and in torch.

    PYTHONPATH=.:peers python benchmarks/block.py --shape moe --tokens 16384 --profile --save block.json

The block is the text model of transformers with `--layers` decoder layers, one of Gated DeltaNet by default, and every
fourth one of attention; it is given embeddings and an upstream gradient. FLA and Liger run where they are installed;
FLA's causal convolution takes the place of transformers' own, and what really ran is printed. All have the same
parameters. The output and the gradients of a contestant are compared with those of the patched block before a time is
taken, and then the two run in turns. One that fails, or that is not here, has a row that says so.
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from contest import Report, compiled_in_parallel, free
from fla_functions import fla_functions
from torch import Tensor

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

NAMES = ("patched", "FLA", "FLA and Liger", "torch")


@dataclass
class Contestant:
    """A model, the functions that its module of transformers calls meanwhile, and what was measured."""

    name: str
    model: Any
    functions: dict[str, Callable[..., Any]]
    ran: set[str] = field(default_factory=set)
    milliseconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass
class Results:
    """What a step gives: the output, the gradient of the input, and those of the parameters."""

    output: Tensor
    gradient: Tensor
    parameters: dict[str, Tensor]

    def distances_from(self, other: "Results") -> dict[str, float]:
        """By the norm of the difference: of the output, of the input's gradient, of all parameters' gradients
        together, and of the parameter's that is farthest."""
        each = {name: distance(mine, other.parameters[name]) for name, mine in self.parameters.items()}
        squares = {name: float(other.parameters[name].double().square().sum()) for name in each}
        together = sum(each[name] ** 2 * squares[name] for name in each) / sum(squares.values())
        farthest = max(each, key=lambda name: each[name])
        return {
            "output": distance(self.output, other.output), "input's gradient": distance(self.gradient, other.gradient),
            "parameters' gradients": together**0.5, f"farthest of them, {farthest}": each[farthest],
        }  # fmt: skip


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


def functions_of(name: str, shape: str, device: str) -> dict[str, Callable[..., Any]]:
    """FLA's functions, or transformers' own in torch beneath what it has chosen, which may be FLA's.

    Raises:
        ImportError: FLA is not installed, or there is no GPU for it.
    """
    if name in ("FLA", "FLA and Liger"):
        if device != "cuda":
            raise ImportError("FLA needs a GPU")
        return fla_functions()
    modeling = modeling_of(shape)
    names = ("torch_chunk_gated_delta_rule", "causal_conv1d_fn")
    return {function: inspect.unwrap(getattr(modeling, function)) for function in names}


def contestant(name: str, shape: str, layers: int, device: str, dtype: torch.dtype) -> Contestant:
    functions = functions_of(name, shape, device)
    model = text_model(shape, layers, device, dtype)
    if name == "patched":
        patch(model)
    if name == "FLA and Liger":
        apply_liger(shape, model)
    return Contestant(name, model, functions)


def apply_liger(shape: str, model: Any) -> None:
    """Liger's norms and feed-forward layers in one model."""
    modeling = modeling_of(shape)
    before = dict(vars(modeling))
    try:
        liger = import_module("liger_kernel.transformers")
        name = "apply_liger_kernel_to_qwen3_5" if shape == "dense" else "apply_liger_kernel_to_qwen3_5_moe"
        getattr(liger, name)(model=model, fused_linear_cross_entropy=False)
    finally:
        vars(modeling).update(before)  # it replaces classes for the whole process as well


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


def step(contestant: Contestant, x: Tensor, upstream: Tensor, shape: str) -> Results:
    """A forward and a backward."""
    x = x.detach().requires_grad_()
    contestant.model.zero_grad()
    with running(contestant, shape):
        y = contestant.model(inputs_embeds=x, use_cache=False).last_hidden_state
        y.backward(upstream)
    assert x.grad is not None
    named = contestant.model.named_parameters()
    return Results(y.detach(), x.grad, {name: p.grad for name, p in named if p.grad is not None})


def distance(result: Tensor, other: Tensor) -> float:
    return float((result.double() - other.double()).norm() / other.double().norm())


def measure(contestant: Contestant, x: Tensor, upstream: Tensor, shape: str) -> float:
    """Milliseconds of one step; the most memory beyond the parameters, their gradients among it, is kept."""
    if not x.is_cuda:
        start = time.perf_counter()
        step(contestant, x, upstream, shape)
        return 1e3 * (time.perf_counter() - start)
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
    contestant.model.zero_grad()
    return float(begin.elapsed_time(end))


class Contest:
    """The patched block, and the others one after the other beside it."""

    def __init__(self, arguments: argparse.Namespace, report: Report) -> None:
        self._arguments, self._report = arguments, report
        self._shape, self._device = arguments.shape, arguments.device
        self._dtype = torch.bfloat16 if arguments.device == "cuda" else torch.float32
        generator = torch.Generator(self._device).manual_seed(1)
        size = (1, arguments.tokens, SHAPES[self._shape]["hidden_size"])
        self._x, self._upstream = (
            torch.randn(size, device=self._device, dtype=self._dtype, generator=generator) for _ in range(2)
        )
        self.wrong: list[str] = []

    def run(self) -> None:
        ours, self._expected = self._enter(NAMES[0])
        if self._arguments.profile:
            self._report.profile(lambda: step(ours, self._x, self._upstream, self._shape), self._device)
        self._race([ours])
        self._add(ours)
        for name in (name for name in NAMES[1:] if name in self._arguments.only):
            self._report.attempt(name, lambda name=name: self._compete(name, ours))
            free()

    def _enter(self, name: str) -> tuple[Contestant, Results]:
        """A contestant that has compiled what it needs, and what it computes."""
        arguments = self._arguments
        entry = contestant(name, self._shape, arguments.layers, self._device, self._dtype)
        begin = time.perf_counter()
        with compiled_in_parallel(arguments.threads):
            results = step(entry, self._x, self._upstream, self._shape)
            copy = Results(results.output, results.gradient, {n: g.clone() for n, g in results.parameters.items()})
            for _ in range(arguments.warmups):
                measure(entry, self._x, self._upstream, self._shape)
        self._report.say(f"{name}: ready after {time.perf_counter() - begin:.1f} s")
        return entry, copy

    def _compete(self, name: str, ours: Contestant) -> None:
        entry, results = self._enter(name)
        far = results.distances_from(self._expected)
        del results
        self._report.say(f"{name} from patched: " + ", ".join(f"{what} {value:.1e}" for what, value in far.items()))
        gated = list(far.values())[:3]
        if not max(gated) <= FARTHEST[self._dtype]:
            self.wrong.append(name)
        self._race([ours, entry])
        count = self._arguments.rounds
        ratio = statistics.median(entry.milliseconds) / statistics.median(ours.milliseconds[-count:])
        self._add(entry, distances=far, times_ours=ratio)

    def _race(self, entries: list[Contestant]) -> None:
        for _ in range(self._arguments.rounds):
            for entry in entries:
                entry.milliseconds.append(measure(entry, self._x, self._upstream, self._shape))

    def _add(self, entry: Contestant, **more: Any) -> None:
        middle, tokens = statistics.median(entry.milliseconds), self._arguments.tokens
        experts = getattr(entry.model.config, "_experts_implementation", None)
        row = {"name": entry.name, "milliseconds": middle, "tokens_per_second": tokens / middle * 1e3}
        row |= {"fastest": min(entry.milliseconds), "peak_bytes": entry.peak_bytes, "ran": sorted(entry.ran)}
        ran = ", ".join(sorted(entry.ran)) or "adjoint"
        if entry.name != NAMES[0]:
            row["experts"] = experts
            ran += f"; experts {experts}" if self._shape != "dense" else ""
        ratio = f"{more['times_ours']:5.2f}× as long as patched  " if "times_ours" in more else " " * 30
        self._report.add(
            f"  {entry.name:14s} {middle:8.2f} ms  {row['tokens_per_second']:10.0f} tokens/s  "
            f"{entry.peak_bytes / 2**30:6.2f} GiB  {ratio}{ran}",
            row | more,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(SHAPES), default="moe")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", nargs="*", choices=NAMES, default=list(NAMES), help="beside the patched block")
    parser.add_argument("--profile", action="store_true", help="the kernels of the patched block")
    parser.add_argument("--threads", type=int, default=8, help="that compile a peer's variants")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which it ends with what it has")
    parser.add_argument("--save", type=Path, help="a file for the figures, as JSON")
    arguments = parser.parse_args()
    facts = {"shape": arguments.shape, "sizes": SHAPES[arguments.shape], "layers": arguments.layers}
    facts |= {"tokens": arguments.tokens, "rounds": arguments.rounds}
    report = Report(facts, arguments.save, arguments.limit)
    report.say(f"{arguments.shape}: {arguments.layers} layers, {arguments.tokens} tokens, torch {torch.__version__}")
    contest = Contest(arguments, report)
    contest.run()
    wrong = ", ".join(contest.wrong)
    report.finish(f"{wrong} and patched do not compute the same: their times mean nothing" if wrong else "")


if __name__ == "__main__":
    main()
