"""Which kernels serve which dispatch or combine, and what they guarantee."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import Compute, in_pytorch, writing
from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.kernels import why_not_triton
from adjoint.core.plan import Candidate, Plan
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.moe import dispatch_eager, layout_eager
from adjoint.ops.moe.dispatch_eager import wide
from adjoint.ops.moe.dispatch_faults import EXPERT_OUT_OF_RANGE, ROW_OUT_OF_RANGE
from adjoint.ops.moe.layout import MAX_ENTRIES, MAX_EXPERTS, Layout

SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

DOT_WIDTH = 256
"""Columns the gradient of the weights takes at once: part of its bits."""

NEED_ROWS, NEED_WEIGHTS = 1, 2
"""Bits of the gradients a combine's backward computes."""


def refuse(problem: Problem) -> str:
    """Why the kernels cannot serve a problem. Its sizes are tokens, slots, experts and columns."""
    tokens, slots, experts, _ = problem.sizes
    if max(tokens, tokens * slots) > MAX_ENTRIES:
        return f"numbers up to {MAX_ENTRIES} tokens and entries, these are {tokens} with {slots} slots each"
    if problem.op == "moe_dispatch" and experts > MAX_EXPERTS:
        return f"sorts by at most {MAX_EXPERTS} experts, these are {experts}"
    return why_not_triton(problem.device)


def sizes_of(problem: Problem) -> dict[str, tuple[torch.dtype, int]]:
    """The dtype and the number of elements of arguments that may have to be copied, by name."""
    tokens, slots, experts, columns = problem.sizes
    element, second = problem.dtypes[0], problem.dtypes[-1]
    return {
        "x": (element, tokens * columns),
        "dy": (element, tokens * columns),
        "indices": (second, tokens * slots),
        "weights": (second, tokens * slots),
        "inverse": (torch.int32, tokens * slots),
        "offsets": (torch.int32, experts + 1),
    }


# ------------------------------------------------------------------------------------------- guarantee


def sum_bound(exact: Tensor, magnitude: Tensor, terms: int, steps: int, dtype: torch.dtype, out: torch.dtype) -> Tensor:
    """The error of a sum of products of a dtype, of magnitude Σ|terms| and `steps` roundings, rounded to `out`.

    After n roundings in the wide type that is γ·Σ|terms|, γ = n·u / (1 − n·u); then half a unit in the last
    place of what is rounded. Products may underflow, by half the smallest number each. For float64 the exact
    sum is itself one in float64, of as many roundings as terms, and a product each.
    """
    info = torch.finfo(wide(dtype))
    if dtype == torch.float64:
        steps += terms + 1
    chain = steps * (info.eps / 2)
    before = chain / (1 - chain) * magnitude + (steps + terms) * info.smallest_normal * info.eps
    if out == wide(dtype):
        return before
    return before + spacing(exact.abs() + before, out) / 2


def _counted(inverse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The row of each entry, 0 for one that counts for nothing; and which count."""
    counts = (inverse >= 0) & (inverse < offsets[-1].clamp_max(inverse.numel()))
    return torch.where(counts, inverse, 0), counts


def _terms(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """What each entry adds to its token, [..., slots, columns]."""
    row, counts = _counted(inverse, offsets)
    if rows.shape[0] == 0:
        return rows.new_zeros(*inverse.shape, rows.shape[1])
    terms = rows[row.long()].masked_fill(~counts[..., None], 0)
    return terms if weights is None else terms * weights[..., None]


def _laid_out(indices: Tensor, experts: int) -> Layout:
    from adjoint.ops.moe.layout import allocate

    layout = allocate(indices, experts)
    layout_eager.write(indices, experts, layout, None)
    return layout


def _sum_bound(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    terms, slots = _terms(rows, weights, inverse, offsets), inverse.shape[-1]
    steps = slots + (weights is not None)
    return sum_bound(terms.sum(-2), terms.abs().sum(-2), slots, steps, dtype, dtype)


def _promise(item: str, error: Derived, accumulator: str, roundings: int, **words: Any) -> Guarantee:
    return Guarantee(
        repeatable=True,
        batch_invariant=item,
        device_invariant=True,
        accumulator=accumulator,
        roundings=roundings,
        error=error,
        **words,
    )


_SUM = "½ ulp + γ·Σ|terms|, γ = n·u / (1 − n·u), n the roundings a term goes through"
_ORDER = "a token's rows are added in the order of its slots"
_SKIPPED = "an entry whose row is past the last offset counts for nothing"


def _wide_name(problem: Problem) -> str:
    return str(wide(problem.dtypes[0])).removeprefix("torch.")


def dispatch_guarantee(problem: Problem) -> dict[str, Guarantee]:
    wrong = "reported with position and value: at once on the CPU, by adjoint.check() on a GPU"
    numbers = Derived("0: whole numbers", lambda x, indices: torch.zeros((), device=indices.device))
    layout = _promise(
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
        "rows": _promise(
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
        layout = _laid_out(indices, problem.sizes[2])
        return _sum_bound(drows, None, layout.inverse, layout.offsets, problem.dtypes[0])

    return {
        "dx": _promise(
            "token",
            Derived(_SUM, bound),
            _wide_name(problem),
            1,
            domain=f"every input; {_ORDER}",
            special_values="as IEEE sums that begin with +0",
            out_of_range="no gradient",
        )
    }


def combine_guarantee(problem: Problem) -> dict[str, Guarantee]:
    def bound(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        return _sum_bound(rows, weights, inverse, offsets, problem.dtypes[0])

    return {
        "y": _promise(
            "token",
            Derived(_SUM, bound),
            _wide_name(problem),
            1,
            domain=f"every input; {_ORDER}",
            special_values="as IEEE sums that begin with +0",
            out_of_range=f"{_SKIPPED}; a row that is none of rows too, reported with its position",
        )
    }


def combine_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    element, weight = problem.dtypes[0], problem.dtypes[-1]

    def rows_bound(dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        row, counts = _counted(inverse, offsets)
        if weights is None:
            return torch.zeros_like(rows)
        product = (dy[..., None, :] * weights[..., None]).reshape(-1, rows.shape[1])
        bound = torch.zeros_like(rows)
        each = sum_bound(product, product.abs(), 1, 1, element, element)
        bound[row[counts].long()] = each[counts.reshape(-1)]
        return bound

    def weights_bound(dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        products = _terms(rows, None, inverse, offsets) * dy[..., None, :]
        columns = rows.shape[1]
        steps = -(-columns // DOT_WIDTH) + DOT_WIDTH.bit_length()  # a product, the blocks, the levels
        return sum_bound(products.sum(-1), products.abs().sum(-1), columns, steps, element, weight)

    words: dict[str, Any] = {"out_of_range": "no gradient"}
    return {
        "drows": _promise(
            "token", Derived("½ ulp + u·|exact|", rows_bound), _wide_name(problem), 1,
            special_values="as an IEEE product; a row past the last offset is +0", **words,
        ),
        "dweights": _promise(
            "token", Derived(_SUM, weights_bound), _wide_name(problem), 1,
            domain=f"every input; columns {DOT_WIDTH} apart are added in their order, then neighbours",
            special_values="as IEEE sums that begin with +0", **words,
        ),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ candidates


def _launch() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.moe.dispatch_launch")


def _dispatch(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    x, indices, num_experts = arguments
    layout = Layout(*outputs[1:])
    layout_eager.write(indices, num_experts, layout, EXPERT_OUT_OF_RANGE)
    dispatch_eager.scatter(x, None, layout.inverse, layout.offsets, outputs[0])


def _dispatch_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    drows, inverse, offsets = arguments
    dispatch_eager.sum_rows(drows, None, inverse, offsets, outputs[0])


def _combine(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    from adjoint.core.errors import report

    rows, weights, inverse, offsets = arguments
    report(ROW_OUT_OF_RANGE, inverse, (inverse < 0) | (inverse >= inverse.numel()))
    dispatch_eager.sum_rows(rows, weights, inverse, offsets, outputs[0])


def _combine_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dy, rows, weights, inverse, offsets, need = arguments
    if need & NEED_ROWS:
        dispatch_eager.scatter(dy, weights, inverse, offsets, outputs[0])
    if need & NEED_WEIGHTS:
        dispatch_eager.dots(dy, rows, inverse, offsets, DOT_WIDTH, outputs[1])


def _candidates(
    op: str, guarantee: Callable[[Problem], dict[str, Guarantee]], eagerly: Compute, numeric: dict[str, Any]
) -> tuple[Candidate, ...]:
    name = op.removeprefix("moe_")
    return (
        Candidate(
            name="triton.tokens",
            backend="triton",
            kernel=op,
            revision=1,
            refuse=refuse,
            guarantee=guarantee,
            run=writing(lambda plan, a, out, w: getattr(_launch(), name)(plan, a, out, w)),
            prepare=lambda plan: _launch().prepare(plan),
            numeric=lambda problem: numeric,
            schedules=SCHEDULES,
            workspace_bytes=lambda problem: int(_launch().regions(problem).bytes),
        ),
        in_pytorch("eager.tokens", guarantee, writing(eagerly), lambda problem: numeric),
    )


DISPATCH = _candidates("moe_dispatch", dispatch_guarantee, _dispatch, {})
DISPATCH_BACKWARD = _candidates("moe_dispatch_backward", dispatch_backward_guarantee, _dispatch_backward, {})
COMBINE = _candidates("moe_combine", combine_guarantee, _combine, {})
COMBINE_BACKWARD = _candidates(
    "moe_combine_backward", combine_backward_guarantee, _combine_backward, {"dot_width": DOT_WIDTH}
)
