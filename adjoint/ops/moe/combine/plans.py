"""Which kernels serve which combine, and what they guarantee."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import register_fault, report
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.combine import eager
from adjoint.ops.moe.dispatch.eager import scatter, sum_rows
from adjoint.ops.moe.dispatch.plans import (
    ORDER,
    SUM_ERROR,
    accumulator,
    bound_of_sums,
    on_tokens,
    promise,
    sum_bound,
    terms_of,
    valid_rows,
)

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

ROW_OUT_OF_RANGE = register_fault(
    "moe.combine: layout.inverse must name rows, each at least 0 and less than the number of rows, "
    "got {value} at position {position} (token·k + slot); give the layout that moe.dispatch returned"
)

DOT_WIDTH = 256
"""Columns the gradient of the weights takes at once: part of its bits."""

NEED_ROWS, NEED_WEIGHTS = 1, 2
"""Bits of the gradients a backward computes."""


# ------------------------------------------------------------------------------------------- guarantee


def combine_guarantee(problem: Problem) -> dict[str, Guarantee]:
    def bound(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        return bound_of_sums(rows, weights, inverse, offsets, problem.dtypes[0])

    return {
        "y": promise(
            "token",
            Derived(SUM_ERROR, bound),
            accumulator(problem),
            1,
            domain=f"every input; {ORDER}",
            special_values="as IEEE sums that begin with +0",
            out_of_range="an entry whose row is past the last offset counts for nothing; "
            "a row that is none of rows too, reported with its position",
        )
    }


def combine_backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    element, weight = problem.dtypes[0], problem.dtypes[-1]

    def rows_bound(dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        row, counts = valid_rows(inverse, offsets)
        if weights is None:
            return torch.zeros_like(rows)
        product = (dy[..., None, :] * weights[..., None]).reshape(-1, rows.shape[1])
        bound = torch.zeros_like(rows)
        each = sum_bound(product, product.abs(), 1, 1, element, element)
        bound[row[counts].long()] = each[counts.reshape(-1)]
        return bound

    def weights_bound(dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        products = terms_of(rows, None, inverse, offsets) * dy[..., None, :]
        columns = rows.shape[1]
        steps = -(-columns // DOT_WIDTH) + DOT_WIDTH.bit_length()  # a product, the blocks, the levels
        return sum_bound(products.sum(-1), products.abs().sum(-1), columns, steps, element, weight)

    words: dict[str, Any] = {"out_of_range": "no gradient"}
    return {
        "drows": promise(
            "token", Derived("½ ulp + u·|exact|", rows_bound), accumulator(problem), 1,
            special_values="as an IEEE product; a row past the last offset is +0", **words,
        ),
        "dweights": promise(
            "token", Derived(SUM_ERROR, weights_bound), accumulator(problem), 1,
            domain=f"every input; columns {DOT_WIDTH} apart are added in their order, then neighbours",
            special_values="as IEEE sums that begin with +0", **words,
        ),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ candidates


def _combine(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    rows, weights, inverse, offsets = arguments
    report(ROW_OUT_OF_RANGE, inverse, (inverse < 0) | (inverse >= inverse.numel()))
    sum_rows(rows, weights, inverse, offsets, outputs[0])


def _combine_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dy, rows, weights, inverse, offsets, need = arguments
    if need & NEED_ROWS:
        scatter(dy, weights, inverse, offsets, outputs[0])
    if need & NEED_WEIGHTS:
        eager.dots(dy, rows, inverse, offsets, DOT_WIDTH, outputs[1])


def _kernels() -> Any:
    """The module that imports Triton, on first use."""
    from adjoint.ops.moe.combine import kernels

    return kernels


COMBINE = on_tokens("moe_combine", combine_guarantee, _kernels, _SCHEDULES, _combine)
COMBINE_BACKWARD = on_tokens(
    "moe_combine_backward", combine_backward_guarantee, _kernels, _SCHEDULES, _combine_backward, dot_width=DOT_WIDTH
)
