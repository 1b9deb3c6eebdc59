"""What the losses' kernels and plans share, and which of them serve `cross_entropy`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.kernels import why_not_triton
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, Plan, Run, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import IN_RANGE
from adjoint.ops.loss import eager
from adjoint.ops.loss.arguments import LABEL_OUT_OF_RANGE, MAX_CLASSES, Loss
from adjoint.ops.loss.bounds import Arithmetic, cross_entropy_bound

DTYPES = {short(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
"""The dtypes of logits by name, as a schema takes them, and back."""

SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

UNROLL = 4
"""Columns of a lane whose exponentials are added at once."""

SUM_LEVELS = 10
"""2^SUM_LEVELS lanes add the losses of all tokens."""

MAX_TOKENS = 2**24
"""Rows that the kernels' integers count."""


def lane_levels(classes: int) -> int:
    """2^lane_levels lanes have the columns of a row."""
    return min(11, max(5, (-(-classes // UNROLL) - 1).bit_length()))


def arithmetic(element: torch.dtype, tokens: int, classes: int, on_kernels: bool) -> Arithmetic:
    """How a plan adds; torch's own sums may have any order."""
    if not on_kernels:
        return Arithmetic(element, classes, tokens)
    levels = lane_levels(classes)
    return Arithmetic(
        element, UNROLL * -(-classes // (UNROLL << levels)) + levels, -(-tokens >> SUM_LEVELS) + SUM_LEVELS
    )


SPECIAL_VALUES = (
    "a token that does not count has the loss 0 and no gradient, whatever its logits; NaN, +∞ or a row of −∞ among the "
    "others gives what IEEE arithmetic makes of it; without any label the loss is 0"
)
OUT_OF_RANGE = (
    "a label out of range counts as ignore_index does, and is reported by position and value: at once on the CPU, on a "
    "GPU through adjoint.check()"
)
TOKENS_IN_ORDER = "; tokens are added in an order that their number alone fixes: others in the batch change the bits"
FORMULAS = {
    "loss": "ΔL + u·(3|z_y| + 3|L| + …) a token, reduced",
    "log_probabilities": "ΔL + u·(3|z_y| + 3|L|)",
    "dlogits": "½ ulp + |g|·p·(ΔL + u·(3|z − L| + 20))",
}


def options_of(problem: Problem) -> Loss:
    return Loss(*problem.options[: len(Loss._fields)])


def outputs_of(problem: Problem) -> tuple[str, ...]:
    """The public outputs of a forward."""
    return ("loss", "log_probabilities") if options_of(problem).log_probabilities else ("loss",)


def _guarantee(problem: Problem, on_kernels: bool) -> dict[str, Guarantee]:
    loss, (tokens, classes) = options_of(problem), problem.sizes
    computed = arithmetic(problem.dtypes[0], tokens, classes, on_kernels)
    is_backward = "backward" in problem.op
    dtype = problem.dtypes[0]

    def promise(name: str) -> Guarantee:
        of_all_tokens = name == "loss" and loss.reduction != "none"
        of_mean = name == "dlogits" and loss.reduction == "mean"
        return Guarantee(
            repeatable=True,
            batch_invariant="token" if on_kernels and not of_all_tokens and not of_mean else "",
            device_invariant=False,
            accumulator=short(wide_dtype(dtype)),
            roundings=1 if dtype.itemsize == 2 and is_backward else 0,
            error=Derived(f"{FORMULAS[name]}: docs/loss.md", cross_entropy_bound(loss, computed, name)),
            domain=("every input" if is_backward else IN_RANGE)
            + (TOKENS_IN_ORDER if on_kernels and of_all_tokens else ""),
            special_values=SPECIAL_VALUES,
            out_of_range="" if is_backward else OUT_OF_RANGE,
        )

    return {name: promise(name) for name in (("dlogits",) if is_backward else outputs_of(problem))}


def refuse_sizes(problem: Problem, tokens: int, classes: int) -> str:
    """Why the kernels cannot serve a problem."""
    if problem.dtypes[0] == torch.float64:
        return "float64 is for plain PyTorch: the kernels compute in float32"
    if tokens > MAX_TOKENS or classes > MAX_CLASSES:
        return f"numbers up to {MAX_TOKENS} tokens of {MAX_CLASSES} classes, these are {tokens} of {classes}"
    return ""


def _run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    logits, labels, *options, _with_slopes, _keep = arguments
    eager.forward(logits, labels, Loss(*options), LABEL_OUT_OF_RANGE["cross_entropy"], outputs)


def _run_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """Of both forms: one has dlogits to write, and the other writes over the logits."""
    dloss, dlog_probabilities, logits, targets, sizes, count, *options, _with_slopes = arguments
    eager.backward(
        dloss, dlog_probabilities, logits, targets, sizes, count, Loss(*options), outputs[0] if outputs else logits
    )


def _run_kept(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dloss, _dlog_probabilities, slopes, *_options = arguments
    eager.times_upstream(slopes, dloss, outputs[0])


def _refuse(problem: Problem) -> str:
    with_slopes = problem.options[len(Loss._fields)]
    if with_slopes and not why_not_triton(problem.device):
        return "keeps nothing of the size of the logits"
    return refuse_sizes(problem, *problem.sizes)


def _in_pytorch(run: Run) -> Candidate:
    return in_pytorch("eager", lambda problem: _guarantee(problem, False), run, revision=5)


def _candidates(kernel: str, launch: str, run: Run) -> tuple[Candidate, ...]:
    on_kernels = Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=_refuse,
        guarantee=lambda problem: _guarantee(problem, True),
        setup=imported(f"adjoint.ops.loss.cross_entropy.launches:{launch}"),
        schedules=SCHEDULES,
    )
    return on_kernels, _in_pytorch(run)


CROSS_ENTROPY = _candidates("cross_entropy", "forward", allocating_outputs(_run, eager.forward_plain, many_calls=True))
CROSS_ENTROPY_BACKWARD = _candidates(
    "cross_entropy_backward", "backward", allocating_outputs(_run_backward, many_calls=True)
)
CROSS_ENTROPY_BACKWARD_KEPT = (_in_pytorch(allocating_outputs(_run_kept)),)
