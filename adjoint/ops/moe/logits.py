"""Which logits the router and its losses take, and how kernels read them.

Kernels read rows of adjacent elements, along at most two axes. The last axis is never strided in a kernel: Triton lays
a row out over threads by what it knows about strides, and sums in an order that follows from the layout. With a stride
it does not know, version 3.6 spreads a row over several warps, reads slowly, and adds in another order than for the
same row of adjacent elements. What lies in any other way is copied first.
"""

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import Problem

MAX_EXPERTS = 1024
"""The most experts that one warp sorts."""


def refuse_float64(problem: Problem) -> str:
    """Why kernels of the router cannot serve a problem's dtype."""
    return "float64 is for plain PyTorch: the kernels compute in float32" if problem.dtypes[0] == torch.float64 else ""


def check_logits(op: str, logits: Tensor) -> None:
    """Requires a floating tensor [..., experts] with a number of experts that kernels can handle."""
    require_floating(op, "logits", logits)
    if logits.dim() == 0:
        raise ArgumentError(f"{op}: logits must have an axis of experts, the last, got a tensor without axes")
    if not 1 <= logits.shape[-1] <= MAX_EXPERTS:
        raise ArgumentError(
            f"{op}: logits must have 1 to {MAX_EXPERTS} experts along the last axis, got shape {tuple(logits.shape)}"
        )
