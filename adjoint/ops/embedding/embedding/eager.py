"""`embedding` in plain PyTorch, on any device, with the bits of the kernels.

A sum over a group of tokens runs in the same order as there: tiles of `TILE` tokens one after the other,
tiles of tiles likewise. All tiles are summed at once, a token of each at a time.
"""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_segments
from adjoint.ops.embedding.eager import group


def gradient_rows(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients in the type sums run in."""
    columns = gradient.shape[-1]
    flat = gradient.reshape(ids.numel(), columns)
    positions, starts, present = group(ids, rows, padding)
    sums = sum_segments(lambda places: _widened(flat, positions[places]), starts, tile)
    return present, sums.view(len(present), columns)


def _widened(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index).to(wide_dtype(rows.dtype))


def gather(ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = weight[ids], and 0 where an id is out of range."""
    valid = (ids >= 0) & (ids < weight.shape[0])
    flat = out.view(ids.numel(), weight.shape[1])
    if weight.numel() == 0:
        flat.zero_()
        return
    torch.index_select(weight, 0, torch.where(valid, ids, 0).reshape(-1), out=flat)
    flat.masked_fill_(~valid.reshape(-1, 1), 0)


def sparse(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients."""
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return present, sums.to(gradient.dtype)


def dense(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int, out: Tensor) -> None:
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    out.zero_().index_copy_(0, present, sums.to(out.dtype))


def into(gradient: Tensor, ids: Tensor, buffer: Tensor, padding: int, *, tile: int) -> None:
    present, sums = gradient_rows(gradient, ids, buffer.shape[0], padding, tile)
    both = torch.promote_types(sums.dtype, buffer.dtype)
    old = buffer.index_select(0, present).to(both)
    buffer.index_copy_(0, present, old.add_(sums).to(buffer.dtype))
