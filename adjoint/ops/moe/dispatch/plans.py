"""Which kernels serve which dispatch, and what they guarantee; and what dispatch and combine guarantee alike."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import register_fault
from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.plan import Candidate, Compute, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.dispatch import eager
from adjoint.ops.moe.layout import MAX_ENTRIES, MAX_EXPERTS, Layout, allocate
from adjoint.ops.moe.layout.eager import write as write_layout

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

EXPERT_OUT_OF_RANGE = register_fault(
    "moe.dispatch: indices must be at least 0 and less than num_experts, "
    "got {value} at position {position} (token·k + slot)"
)


def refuse(problem: Problem) -> str:
    """Why the kernels cannot serve a problem. Its sizes are tokens, slots, experts and columns."""
    tokens, slots, experts, _ = problem.sizes
    if max(tokens, tokens * slots) > MAX_ENTRIES:
        return f"numbers up to {MAX_ENTRIES} tokens and entries, these are {tokens} with {slots} slots each"
    if problem.op == "moe_dispatch" and experts > MAX_EXPERTS:
        return f"sorts by at most {MAX_EXPERTS} experts, these are {experts}"
    return ""


# ------------------------------------------------------------------------------------------- guarantee


def sum_bound(exact: Tensor, magnitude: Tensor, terms: int, steps: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The error of a sum of products of a dtype, of magnitude Σ|terms| and `steps` roundings, rounded to `out`.

    After n roundings in the wide type that is γ·Σ|terms|, γ = n·u / (1 − n·u); then half a unit in the last
    place of what is rounded. Products may underflow, by half the smallest number each. For float64 the exact
    sum is itself one in float64, of as many roundings as terms, and a product each.
    """
    info = torch.finfo(wide_dtype(dtype))
    if dtype == torch.float64:
        steps += terms + 1
    chain = steps * (info.eps / 2)
    before = chain / (1 - chain) * magnitude + (steps + terms) * info.smallest_normal * info.eps
    if out == wide_dtype(dtype):
        return before
    return before + spacing(exact.abs() + before, out) / 2


def valid_rows(inverse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each entry, 0 for one that counts for nothing; and which count."""
    counts = (inverse >= 0) & (inverse < offsets[-1].clamp_max(inverse.numel()))
    return torch.where(counts, inverse, 0), counts


def terms_of(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """What each entry adds to its token, [..., slots, columns]."""
    row, counts = valid_rows(inverse, offsets)
    if rows.shape[0] == 0:
        return rows.new_zeros(*inverse.shape, rows.shape[1])
    terms = rows[row.long()].masked_fill(~counts[..., None], 0)
    return terms if weights is None else terms * weights[..., None]


def _layout_of(indices: Tensor, experts: int) -> Layout:
    layout = allocate(indices, experts)
    write_layout(indices, experts, layout, None)
    return layout


def bound_of_sums(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    terms, slots = terms_of(rows, weights, inverse, offsets), inverse.shape[-1]
    steps = slots + (weights is not None)
    return sum_bound(terms.sum(-2), terms.abs().sum(-2), slots, steps, dtype, dtype)


def promise(item: str, error: Derived, wide_type: str, roundings: int, **words: Any) -> Guarantee:
    return Guarantee(
        repeatable=True,
        batch_invariant=item,
        device_invariant=True,
        accumulator=wide_type,
        roundings=roundings,
        error=error,
        **words,
    )


SUM_ERROR = "½ ulp + γ·Σ|terms|, γ = n·u / (1 − n·u), n the roundings a term goes through"
ORDER = "a token's rows are added in the order of its slots"


def accumulator(problem: Problem) -> str:
    return str(wide_dtype(problem.dtypes[0])).removeprefix("torch.")


def dispatch_guarantee(problem: Problem) -> dict[str, Guarantee]:
    wrong = "reported with position and value: at once on the CPU, by adjoint.check() on a GPU"
    numbers = Derived("0: whole numbers", lambda x, indices: torch.zeros((), device=indices.device))
    layout = promise(
        "all of indices",
        numbers,
        "none",
        0,
        domain="every input; a pure function of indices",
        out_of_range=f"an entry of no expert, in order after all others; {wrong}",
        ties="entries of one expert in order of token, then slot",
    )

    def nothing(x: Tensor, indices: Tensor) -> Tensor:
        return x.new_zeros(indices.numel(), x.shape[-1])

    return {
        "rows": promise(
            "token",
            Derived("0: bytes are copied", nothing),
            "none",
            0,
            special_values="copied, payloads of NaN included",
            out_of_range=f"a zero row past the last offset; {wrong}",
        ),
        **dict.fromkeys(("offsets", "permutation", "inverse"), layout),
    }


def dispatch_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    def bound(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        layout = _layout_of(indices, problem.sizes[2])
        return bound_of_sums(drows, None, layout.inverse, layout.offsets, problem.dtypes[0])

    return {
        "dx": promise(
            "token",
            Derived(SUM_ERROR, bound),
            accumulator(problem),
            1,
            domain=f"every input; {ORDER}",
            special_values="as IEEE sums that begin with +0",
            out_of_range="no gradient",
        )
    }


# ------------------------------------------------------------------------------------------ candidates


def _dispatch(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    x, indices, num_experts = arguments
    layout = Layout(*outputs[1:])
    write_layout(indices, num_experts, layout, EXPERT_OUT_OF_RANGE)
    eager.scatter(x, None, layout.inverse, layout.offsets, outputs[0])


def _dispatch_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    drows, inverse, offsets = arguments
    eager.sum_rows(drows, None, inverse, offsets, outputs[0])


def on_tokens(
    op: str,
    guarantee: Callable[[Problem], dict[str, Guarantee]],
    kernels: Callable[[], Any],
    schedules: Schedules,
    in_torch: Compute,
    **numeric: Any,
) -> tuple[Candidate, ...]:
    """The candidates of an operator: that of a module with kernels, and the same in PyTorch with numeric parameters."""
    name = op.removeprefix("moe_")
    return (
        Candidate(
            name="triton.tokens",
            backend="triton",
            kernel=op,
            revision=1,
            refuse=refuse,
            guarantee=guarantee,
            setup=lambda setup: getattr(kernels(), name)(setup),
            schedules=schedules,
        ),
        in_pytorch("eager.tokens", guarantee, allocating_outputs(in_torch), lambda problem: numeric),
    )


def _kernels() -> Any:
    """The module that imports Triton, on first use."""
    from adjoint.ops.moe.dispatch import kernels

    return kernels


DISPATCH = on_tokens("moe_dispatch", dispatch_guarantee, _kernels, _SCHEDULES, _dispatch)
DISPATCH_BACKWARD = on_tokens(
    "moe_dispatch_backward", dispatch_backward_guarantee, _kernels, _SCHEDULES, _dispatch_backward
)
