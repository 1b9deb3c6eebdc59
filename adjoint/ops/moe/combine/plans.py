"""Which kernels serve which combine, and what they guarantee."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import register_fault, report
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.device.sums import IN_RANGE
from adjoint.ops.moe.combine import eager
from adjoint.ops.moe.token_rows.eager import entries_of, scatter, sum_rows
from adjoint.ops.moe.token_rows.plans import (
    IEEE_SUMS,
    SLOT_ORDER,
    SUM_ERROR,
    bound_of_products,
    bound_of_sums,
    candidates,
    promise,
    terms_of,
)  # fmt: skip

ROW_OUT_OF_RANGE = register_fault(
    "moe.combine: layout.inverse must name rows, each at least 0 and less than the number of rows, "
    "got {value} at position {position} (token·k + slot); give the layout that moe.dispatch returned"
)

DOT_WIDTH = 256
"""The columns that the gradient of the weights takes at once. They are part of its bits."""

NEED_ROWS, NEED_WEIGHTS = 1, 2
"""The bits of the gradients in the mask of a backward."""

# ------------------------------------------------------------------------------------------- guarantee


def guarantee(problem: Problem) -> dict[str, Guarantee]:
    error = Derived(SUM_ERROR, partial(bound_of_sums, problem.dtypes[0]))
    out_of_range = (
        "an entry whose row is past the last offset counts for nothing; "
        "a row that is none of rows too, reported with its position"
    )
    return {"y": promise(error, problem, domain=SLOT_ORDER, special_values=IEEE_SUMS, out_of_range=out_of_range)}


def backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    element, weight = problem.dtypes[0], problem.dtypes[-1]

    def rows_bound(dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        bound = torch.zeros_like(rows)
        if weights is not None:
            row, _, counts = entries_of(inverse, offsets)
            product = (dy[..., None, :] * weights[..., None]).reshape(-1, rows.shape[1])
            each = bound_of_products(product, product.abs(), 1, 1, element, element)
            bound[row[counts].long()] = each[counts]
        return bound

    def weights_bound(dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
        products = terms_of(rows, None, inverse, offsets) * dy[..., None, :]
        columns = rows.shape[1]
        steps = -(-columns // DOT_WIDTH) + DOT_WIDTH.bit_length()  # one for a product, then the blocks and the levels
        return bound_of_products(products.sum(-1), products.abs().sum(-1), columns, steps, element, weight)

    return {
        "drows": promise(
            Derived("½ ulp + u·|exact|", rows_bound),
            problem,
            special_values="as an IEEE product; a row past the last offset is +0",
            out_of_range="no gradient",
        ),
        "dweights": promise(
            Derived(SUM_ERROR, weights_bound),
            problem,
            domain=f"{IN_RANGE}; columns {DOT_WIDTH} apart are added in their order, then neighbours",
            special_values=IEEE_SUMS,
            out_of_range="no gradient",
        ),
    }


# ------------------------------------------------------------------------------------------ candidates


def _combine(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    inverse = arguments[2]
    report(ROW_OUT_OF_RANGE, inverse, (inverse < 0) | (inverse >= inverse.numel()))
    sum_rows(*arguments, *outputs)


def _combine_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dy, rows, weights, inverse, offsets, need = arguments
    if need & NEED_ROWS:
        scatter(dy, weights, inverse, offsets, outputs[0])
    if need & NEED_WEIGHTS:
        eager.dots(dy, rows, inverse, offsets, DOT_WIDTH, outputs[1])


COMBINE = candidates("moe_combine", guarantee, _combine)
COMBINE_BACKWARD = candidates("moe_combine_backward", backward_guarantee, _combine_backward, dot_width=DOT_WIDTH)
