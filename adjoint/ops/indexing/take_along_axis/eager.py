"""Taking along an axis in plain PyTorch, on any device, with the bits of the kernels: see `adjoint.device.sums`."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_groups
from adjoint.ops.indexing.take_along_axis.layout import output_shape


def is_valid(indices: Tensor, length: int) -> Tensor:
    """Which indices are in range."""
    return (indices >= -length) & (indices < length)


def from_the_beginning(indices: Tensor, length: int, other: int) -> Tensor:
    """Converts indices below 0, which count from the end, and replaces indices that are out of range by `other`."""
    counted = torch.where(indices < 0, indices + length, indices).long()
    return torch.where(is_valid(indices, length), counted, other)


def elements_of(indices: Tensor, shape: Sequence[int], axis: int) -> Tensor:
    """The number of the element of x that each element of the output takes; for an index out of range, x.numel()."""
    elements = torch.arange(prod(shape), device=indices.device).view(tuple(shape))
    chosen = from_the_beginning(indices, shape[axis], -1)
    keys = elements.narrow(axis, 0, 1) + chosen * elements.stride(axis)
    return torch.where(chosen < 0, elements.numel(), keys).expand(output_shape(shape, indices.shape, axis))


def repeats(indices: Tensor, length: int, axis: int) -> Tensor:
    """Which indices are in range and occur earlier in their line."""
    ordered, places = from_the_beginning(indices, length, -1).sort(dim=axis, stable=True)
    before, after = ordered.narrow(axis, 0, ordered.shape[axis] - 1), ordered.narrow(axis, 1, ordered.shape[axis] - 1)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again.narrow(axis, 1, ordered.shape[axis] - 1).copy_((before == after) & (after >= 0))
    return torch.zeros_like(again).scatter_(axis, places, again)


def take(x: Tensor, indices: Tensor, axis: int, out: Tensor) -> None:
    """Writes the elements of x at the indices to `out`, and 0 for indices out of range."""
    axis %= x.dim()
    length = x.shape[axis]
    if out.numel() == 0:
        return
    if length == 0:
        out.zero_()
        return
    chosen = from_the_beginning(indices, length, 0).expand(out.shape)
    expanded = x.expand([length if d == axis else size for d, size in enumerate(out.shape)])
    torch.gather(expanded, axis, chosen, out=out)
    out.masked_fill_(~is_valid(indices, length), 0)


def scatter(dout: Tensor, indices: Tensor, axis: int, dx: Tensor) -> None:
    """Writes every entry of dout to its element of dx. Indices must not repeat, and x must not be broadcast."""
    length = dx.shape[axis]
    dx.zero_()
    if dout.numel() and length:
        chosen = from_the_beginning(indices, length, length).expand(dout.shape)
        # One further element, for indices out of range.
        room = dx.new_zeros([length + 1 if d == axis else size for d, size in enumerate(dx.shape)])
        room.scatter_(axis, chosen, dout + 0.0)  # a sum that begins with 0 is never −0
        dx.copy_(room.narrow(axis, 0, length))


def sum_entries(dout: Tensor, indices: Tensor, shape: Sequence[int], axis: int, tile: int, dx: Tensor) -> None:
    """Adds the entries of every element in their order."""
    dx.zero_()
    if dout.numel() and dx.numel():
        flat, keys = dout.reshape(-1), elements_of(indices, shape, axis)
        present, sums = sum_groups(lambda places: flat[places].to(wide_dtype(flat.dtype)), keys, dx.numel(), tile)
        dx.view(-1).index_copy_(0, present, sums.to(dx.dtype))
