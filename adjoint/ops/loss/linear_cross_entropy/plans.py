"""Which plans serve `linear_cross_entropy`, and what they guarantee.

On a GPU there are two. `triton.vendor` takes the vendor's matrix products, of which nobody promises a row's bits beside
other rows, and rounds a block's logits to the type of hidden; `triton.tiles` takes products of our own, whose order the
sizes alone fix, and keeps logits in float32.
"""

from collections.abc import Callable

import torch

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import AtOnce, Candidate, Compute, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.ops.loss.linear_cross_entropy import eager
from adjoint.ops.loss.linear_cross_entropy.bounds import Linear, Rounding, linear_bound
from adjoint.ops.loss.plans import (
    OUT_OF_RANGE,
    SCHEDULES,
    SPECIAL_VALUES,
    TOKENS_IN_ORDER,
    arithmetic,
    options_of,
    refuse_sizes,
)

BLOCK_BYTES = 5 * 2**28
"""Of a block's logits, at most; half of it in a backward, where the gradients are in memory too."""

ROW_STEP = 128
"""The rows of a block are a multiple of this."""

MAX_COLUMNS = 2**15
"""Of hidden, for our own products, which are compiled for their number."""

SEGMENT = 2048
"""Classes whose exponentials one program of our own products adds."""


def block_rows(tokens: int, classes: int, itemsize: int, is_backward: bool) -> int:
    """Rows of a block: blocks of about equal size, none of which takes more than BLOCK_BYTES, or is short of a step."""
    most_bytes = BLOCK_BYTES // 2 if is_backward else BLOCK_BYTES
    most = max(1, most_bytes // (classes * itemsize) // ROW_STEP) * ROW_STEP
    blocks = -(-tokens // most)
    return max(1, -(-tokens // (max(1, blocks) * ROW_STEP))) * ROW_STEP


# ------------------------------------------------------------------------------------------- guarantee

_FORMULAS = {
    "loss": "ΔL + Δz_y + …, Δx = γ(D)·Σ|h·w| + the rounding of x",
    "log_probabilities": "ΔL + Δz_y + …, Δx = γ(D)·Σ|h·w| + the rounding of x",
    "dhidden": "½ ulp + Σ Δdx·|w| + γ(V)·Σ|dx·w|",
    "dweight": "½ ulp + Σ Δdx·|h| + γ(N)·Σ|dx·h|",
    "dbias": "½ ulp + Σ Δdx + γ(N)·Σ|dx|",
}
_PRODUCTS = "; dweight adds every token's slopes times its hidden, and 0·NaN is NaN there, if the token counts or not"
_VENDORS = "; equal bits for equal calls are the vendor library's affair, which promises them on no two streams at once"
_BY_THREADS = "; equal bits for equal numbers of threads"


_ROUNDINGS = {
    "vendor": {"loss": 2, "log_probabilities": 2, "dhidden": 4, "dweight": 3, "dbias": 3},
    "tiles": {"loss": 0, "log_probabilities": 0, "dhidden": 3, "dweight": 2, "dbias": 2},
    "eager": {"loss": 0, "log_probabilities": 0, "dhidden": 2, "dweight": 1, "dbias": 1},
}
"""Of 16-bit types: logits; dx; the result, and that of hidden once more where it is kept in bfloat16. The loss of a
rounded logit counts as rounded twice: it is not the loss, rounded once."""


def _linear_of(plan: str, dtype: torch.dtype, is_kept: bool) -> Callable[[int, int], Linear]:
    """How a plan computes a problem of so many tokens and classes."""

    def linear(tokens: int, classes: int) -> Linear:
        computed = arithmetic(dtype, tokens, classes, plan != "eager")
        if plan == "tiles":
            segments = -(-classes // SEGMENT)
            computed = computed._replace(classes=2 * segments + SEGMENT // 8 + 64)
        return Linear(computed, Rounding(plan == "vendor", plan != "eager"), is_kept)

    return linear


def _guarantee(problem: Problem, plan: str) -> dict[str, Guarantee]:
    """What each output promises, whether it is computed in the forward and scaled, or computed again."""
    dtype, is_backward, loss = problem.dtypes[0], "backward" in problem.op, options_of(problem)
    ours = plan == "tiles"
    repeats = ours or (plan == "eager" and problem.device.type == "cpu")
    linear = _linear_of(plan, dtype, loss.is_total)
    # dx is then stored on the scale of the largest upstream gradient, which may be another token's.
    is_scaled = dtype == torch.float16 and not loss.is_total

    def promise(name: str) -> Guarantee:
        per_token = name == "log_probabilities" or (name == "loss" and loss.reduction == "none")
        per_token |= name == "dhidden" and loss.reduction != "mean" and not is_scaled
        domain = "finite logits" + (" in the range of float16" if dtype == torch.float16 and plan == "vendor" else "")
        domain += ", else the bound of what they reach is infinite"
        domain += "; losses with a sum in the range of the accumulator" if name == "loss" else ""
        domain += TOKENS_IN_ORDER if ours and not per_token else _BY_THREADS if repeats and not ours else ""
        return Guarantee(
            repeatable=repeats,
            batch_invariant="token" if ours and per_token else "",
            device_invariant=False,
            accumulator=short(wide_dtype(dtype)),
            roundings=_ROUNDINGS[plan][name] if dtype.itemsize == 2 else 0,
            error=Derived(f"{_FORMULAS[name]}: docs/loss.md", linear_bound(loss, linear, name)),
            domain=domain + ("" if repeats else _VENDORS),
            special_values=SPECIAL_VALUES + (_PRODUCTS if name == "dweight" else ""),
            out_of_range="" if is_backward else OUT_OF_RANGE,
        )

    names = ("dhidden", "dweight", "dbias") if is_backward else ("loss", "log_probabilities")
    return {name: promise(name) for name in names if name != "log_probabilities" or loss.log_probabilities}


# ------------------------------------------------------------------------------------------ candidates


def _refuse(problem: Problem) -> str:
    if problem.op.endswith("_backward"):
        return refuse_sizes(problem, 0, 0)
    tokens, columns, classes = problem.sizes
    if columns == 0:
        return "multiplies rows of at least one column"
    return refuse_sizes(problem, tokens, classes)


def _refuse_vendor(problem: Problem) -> str:
    missing = "torch has no products of 16-bit matrices with float32 results" if not eager.HAS_WIDE_PRODUCTS else ""
    return _refuse(problem) or missing


def _refuse_tiles(problem: Problem) -> str:
    if not problem.op.endswith("_backward") and problem.sizes[1] > MAX_COLUMNS:
        return f"multiplies rows of up to {MAX_COLUMNS} columns, these have {problem.sizes[1]}"
    return _refuse(problem)


def _candidates(
    kernel: str,
    launch: str,
    compute: Compute,
    at_once: AtOnce | None = None,
    revision: int = 1,
    many_calls: bool = True,
) -> tuple[Candidate, ...]:
    def on_kernels(name: str, refuse: Callable[[Problem], str]) -> Candidate:
        return Candidate(
            name=f"triton.{name}",
            backend="triton",
            kernel=kernel,
            revision=revision,
            refuse=refuse,
            guarantee=lambda problem: _guarantee(problem, name),
            setup=imported("adjoint.ops.loss.linear_cross_entropy.blocks:" + launch, plan=name),
            schedules=SCHEDULES,
        )

    in_torch = in_pytorch(
        "eager",
        lambda problem: _guarantee(problem, "eager"),
        allocating_outputs(compute, at_once, many_calls),
        revision=5,
    )
    return on_kernels("vendor", _refuse_vendor), on_kernels("tiles", _refuse_tiles), in_torch


FORWARD = _candidates("linear_cross_entropy", "forward", eager.forward, eager.forward_plain)
SCALING = _candidates("linear_cross_entropy_scaling", "scaling", eager.scaling, many_calls=False)
AGAIN = _candidates("linear_cross_entropy_again", "again", eager.again, revision=2)
