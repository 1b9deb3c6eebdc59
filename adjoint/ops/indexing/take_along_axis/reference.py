"""Taking along an axis as defined: short, in the dtype of its inputs, never optimised."""

import torch
from torch import Tensor


def _aligned(x: Tensor, indices: Tensor, axis: int) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcasts x and indices against each other, except along the axis; and says which indices are in range.

    An index below 0 counts from the end. An index out of range becomes 0.
    """
    length, number = x.shape[axis], indices.shape[axis]
    others = torch.broadcast_shapes(
        *(tuple(size for d, size in enumerate(t.shape) if d != axis % x.dim()) for t in (x, indices))
    )
    shape = list(others)
    shape.insert(axis % x.dim(), 1)

    def with_axis(size: int) -> list[int]:
        return [size if d == axis % x.dim() else n for d, n in enumerate(shape)]

    indices = indices.long().expand(with_axis(number))
    valid = (indices >= -length) & (indices < length)
    indices = torch.where(indices < 0, indices + length, indices)
    return x.expand(with_axis(length)), torch.where(valid, indices, 0), valid


def take_along_axis(x: Tensor, indices: Tensor, axis: int = -1) -> Tensor:
    """out[…, j, …] = x[…, indices[…, j, …], …], and 0 where an index is out of range."""
    x, indices, valid = _aligned(x, indices, axis)
    if x.shape[axis] == 0:
        return x.new_zeros(indices.shape)
    return torch.where(valid, x.gather(axis, indices), 0)


def take_along_axis_backward(dout: Tensor, x: Tensor, indices: Tensor, axis: int = -1) -> Tensor:
    """dx = the sum of dout over the places that took each element; indices out of range add nothing."""
    expanded, indices, valid = _aligned(x, indices, axis)
    dx = torch.zeros(expanded.shape, dtype=dout.dtype, device=dout.device)
    if dx.numel():
        dx = dx.scatter_add(axis, indices, torch.where(valid, dout, 0))
    return dx.sum_to_size(x.shape)
