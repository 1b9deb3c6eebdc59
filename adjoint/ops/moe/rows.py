"""Which tensors the router's kernels walk as they are: rows of adjacent elements, along at most two axes.

The last axis is never strided in a kernel. Triton lays a row out over threads by what it knows about strides, and
sums in an order that follows from the layout: with a stride it does not know, version 3.6 spreads a row over several
warps, reads slowly, and adds in another order than for the same row of adjacent elements.
"""

from torch import Tensor

from adjoint.core.layout import leading_axes


def lies_as_rows(tensor: Tensor) -> bool:
    if tensor.numel() == 0:
        return True
    return (tensor.shape[-1] == 1 or tensor.stride(-1) == 1) and leading_axes(tensor) is not None


def copied(rows: dict[str, Tensor | None], whole: dict[str, Tensor | None]) -> str:
    """What is copied before it can be walked, in words: `rows` need to lie as rows, `whole` be contiguous."""
    names = [name for name, tensor in rows.items() if tensor is not None and not lies_as_rows(tensor)]
    names += [name for name, tensor in whole.items() if tensor is not None and not tensor.is_contiguous()]
    return f"{', '.join(names)} copied" if names else ""
