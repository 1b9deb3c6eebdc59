"""The expert layer on torch's grouped product: one launch for all experts, in bfloat16, without a promise about bits.

Torch's product leaves the rows past the last offset uninitialised. These are the rows of entries whose expert is out of
range, and they are set to 0 here before anything reads them. The gradient of the hidden values is rounded to bfloat16,
because the product returns it so.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.problem import Problem, short
from adjoint.ops.moe.experts.eager import Products

MULTIPLE = 8
"""The number of elements in a row of each matrix must be a multiple of this, which is 16 bytes."""

_grouped_mm: Any = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


def refuse(problem: Problem) -> str:
    """Why torch's grouped product cannot serve a problem."""
    _, hidden, _, inner, _ = problem.sizes
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped product"
    if problem.dtypes[0] != torch.bfloat16:
        return f"torch's grouped product takes bfloat16, this layer is {short(problem.dtypes[0])}"
    if hidden % MULTIPLE or inner % MULTIPLE:
        return f"D and I must be multiples of {MULTIPLE} for torch's grouped product, they are {hidden} and {inner}"
    nvidia, _, capability = problem.architecture.partition("sm_")
    if capability and not nvidia and int(capability) < 90:
        return "torch's grouped product needs sm_90 or newer"
    return ""


def _as_read(tensor: Tensor) -> Tensor:
    """The tensor, or a copy, with adjacent elements along one of its last two axes and 16-byte boundaries."""
    lies_well = tensor.is_contiguous() or tensor.transpose(-1, -2).is_contiguous()
    return tensor if lies_well and tensor.data_ptr() % 16 == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _product(rows: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """rows[r] @ matrices[expert of r]; rows of no expert are zero."""
    if rows.numel() == 0 or matrices.numel() == 0:
        return matrices.new_zeros(rows.shape[0], matrices.shape[2])
    out = _grouped_mm(_as_read(rows.to(matrices.dtype)), _as_read(matrices), offs=offsets[1:])
    valid = torch.arange(len(out), device=out.device) < offsets[-1]
    return torch.where(valid[:, None], out, 0)


def _outer(left: Tensor, right: Tensor, offsets: Tensor, out: Tensor) -> None:
    """out[e] = Σ left[r]ᵀ · right[r] over the rows of expert e; zeros where it has none."""
    if left.numel() == 0 or right.numel() == 0:
        out.zero_()
        return
    sums = _grouped_mm(_as_read(left).T, _as_read(right), offs=offsets[1:])
    out.copy_(torch.where((offsets.diff() > 0)[:, None, None], sums, 0))


GROUPED_MM = Products(_product, _outer)
