"""Taking along an axis in plain PyTorch, on any device, with the bits of the kernels.

The sum over the entries of an element runs in the same order as there; see `adjoint.device.sums`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_segments
from adjoint.ops.indexing.take_along_axis.layout import output_shape


def is_valid(indices: Tensor, length: int) -> Tensor:
    """Which indices are in range."""
    return (indices >= -length) & (indices < length)


def from_the_beginning(indices: Tensor, length: int) -> Tensor:
    """Indices below 0 counted from the end."""
    return torch.where(indices < 0, indices + length, indices)


def repeats(indices: Tensor, length: int, axis: int) -> Tensor:
    """Which indices are in range and stand in their line before."""
    valid = is_valid(indices, length)
    ordered, places = torch.where(valid, from_the_beginning(indices, length), -1).sort(dim=axis, stable=True)
    before, after = ordered.narrow(axis, 0, ordered.shape[axis] - 1), ordered.narrow(axis, 1, ordered.shape[axis] - 1)
    again = torch.zeros_like(valid)
    again.narrow(axis, 1, ordered.shape[axis] - 1).copy_((before == after) & (after >= 0))
    return torch.zeros_like(valid).scatter_(axis, places, again)


def take(x: Tensor, indices: Tensor, axis: int, out: Tensor) -> None:
    """out = the elements of x at the indices, and 0 where an index is out of range."""
    axis %= x.dim()
    length = x.shape[axis]
    if out.numel() == 0:
        return
    if length == 0:
        out.zero_()
        return
    valid = is_valid(indices, length)
    chosen = torch.where(valid, from_the_beginning(indices, length), 0).long().expand(out.shape)
    expanded = x.expand([length if d == axis else size for d, size in enumerate(out.shape)])
    torch.gather(expanded, axis, chosen, out=out)
    out.masked_fill_(~valid, 0)


def scatter(dout: Tensor, indices: Tensor, axis: int, dx: Tensor) -> None:
    """Every entry to its element, for indices that do not repeat; x was not broadcast."""
    length = dx.shape[axis]
    dx.zero_()
    if dout.numel() == 0 or length == 0:
        return
    valid = is_valid(indices, length)
    chosen = torch.where(valid, from_the_beginning(indices, length), length).long().expand(dout.shape)
    # One element more than there are, for what is out of range.
    room = dx.new_zeros([length + 1 if d == axis else size for d, size in enumerate(dx.shape)])
    room.scatter_(axis, chosen, dout + 0.0)  # a sum that begins with 0 is never −0
    dx.copy_(room.narrow(axis, 0, length))


def sum_entries(dout: Tensor, indices: Tensor, shape: Sequence[int], axis: int, tile: int, dx: Tensor) -> None:
    """Every element's entries, added in their order."""
    dx.zero_()
    if dout.numel() == 0 or dx.numel() == 0:
        return
    length = shape[axis]
    elements = torch.arange(dx.numel(), device=dx.device).view(tuple(shape))
    first = elements.narrow(axis, 0, 1)  # of each line
    step = elements.stride(axis)
    valid = is_valid(indices, length)
    chosen = from_the_beginning(indices.long(), length)
    keys = (
        torch.where(valid, first + chosen * step, dx.numel())
        .expand(output_shape(shape, indices.shape, axis))
        .reshape(-1)
    )
    keys, positions = keys.sort(stable=True)
    present, lengths = torch.unique_consecutive(keys, return_counts=True)
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    if int(present[-1]) == dx.numel():  # what is out of range comes last
        present, starts = present[:-1], starts[:-1]
    flat = dout.reshape(-1)
    sums = sum_segments(lambda places: flat[positions[places]].to(wide_dtype(flat.dtype)), starts, tile)
    dx.view(-1).index_copy_(0, present, sums.to(dx.dtype))
