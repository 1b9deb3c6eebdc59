"""Which kernels serve which dispatch, and what they guarantee."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import register_fault
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.plan import Plan
from adjoint.core.problem import Problem
from adjoint.ops.moe.layout import REPORTED, Layout, allocate
from adjoint.ops.moe.layout.eager import write as write_layout
from adjoint.ops.moe.token_rows import eager
from adjoint.ops.moe.token_rows.plans import IEEE_SUMS, SLOT_ORDER, SUM_ERROR, bound_of_sums, candidates, promise

EXPERT_OUT_OF_RANGE = register_fault(
    "moe.dispatch: indices must be at least 0 and less than num_experts, "
    "got {value} at position {position} (token·k + slot)"
)

# ------------------------------------------------------------------------------------------- guarantee


def guarantee(problem: Problem) -> dict[str, Guarantee]:
    rows = promise(
        Derived("0: bytes are copied", lambda x, indices: x.new_zeros(indices.numel(), x.shape[-1])),
        special_values="copied, payloads of NaN included",
        out_of_range=f"a zero row past the last offset; {REPORTED}",
    )
    layout = promise(
        Derived("0: whole numbers", lambda x, indices: torch.zeros((), device=indices.device)),
        item="all of indices",
        domain="every input; a pure function of indices",
        out_of_range=f"an entry of no expert, in order after all others; {REPORTED}",
        ties="entries of one expert in order of token, then slot",
    )
    return {"rows": rows, **dict.fromkeys(Layout._fields, layout)}


def backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    def bound(drows: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        layout = allocate(indices, problem.sizes[2])
        write_layout(indices, problem.sizes[2], layout, None)
        return bound_of_sums(problem.dtypes[0], drows, None, layout.inverse, layout.offsets)

    error = Derived(SUM_ERROR, bound)
    return {"dx": promise(error, problem, domain=SLOT_ORDER, special_values=IEEE_SUMS, out_of_range="no gradient")}


# ------------------------------------------------------------------------------------------ candidates


def _dispatch(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    x, indices, num_experts = arguments
    layout = Layout(*outputs[1:])
    write_layout(indices, num_experts, layout, EXPERT_OUT_OF_RANGE)
    eager.scatter(x, None, layout.inverse, layout.offsets, outputs[0])


def _dispatch_backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    drows, inverse, offsets = arguments
    eager.sum_rows(drows, None, inverse, offsets, outputs[0])


DISPATCH = candidates("moe_dispatch", guarantee, _dispatch)
DISPATCH_BACKWARD = candidates("moe_dispatch_backward", backward_guarantee, _dispatch_backward)
