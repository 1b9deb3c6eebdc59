"""The embedding family in plain PyTorch, on any device, with the bits of the kernels.

A sum over a group of tokens runs in the same order as there: tiles of `TILE` tokens one after the other,
tiles of tiles likewise. All tiles are summed at once, a token of each at a time.
"""

import torch
from torch import Tensor

from adjoint.device.sums import sum_segments, wide


def group(ids: Tensor, rows: int, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Positions in order of their ids, where each id that occurs begins (and where the last ends), and the ids."""
    flat = ids.reshape(-1)
    counts = (flat >= 0) & (flat < rows) & (flat != padding)
    keys, positions = torch.where(counts, flat, rows).sort(stable=True)
    found, lengths = torch.unique_consecutive(keys, return_counts=True)
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    if len(found) and int(found[-1]) == rows:  # what is in no group comes last
        found, starts = found[:-1], starts[:-1]
    return positions, starts, found.long()


def gradient_rows(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients in the type sums run in."""
    columns = gradient.shape[-1]
    flat = gradient.reshape(ids.numel(), columns)
    positions, starts, found = group(ids, rows, padding)
    sums = sum_segments(lambda places: _widened(flat, positions[places]), starts, tile)
    return found, sums.view(len(found), columns)


def _widened(rows: Tensor, index: Tensor) -> Tensor:
    return rows.index_select(0, index).to(wide(rows.dtype))


def gather(ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = weight[ids], and 0 where an id is out of range."""
    valid = (ids >= 0) & (ids < weight.shape[0])
    flat = out.view(ids.numel(), weight.shape[1])
    if weight.numel() == 0:
        flat.zero_()
        return
    torch.index_select(weight, 0, torch.where(valid, ids, 0).reshape(-1), out=flat)
    flat.masked_fill_(~valid.reshape(-1, 1), 0)


def dense(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int, out: Tensor) -> None:
    found, sums = gradient_rows(gradient, ids, rows, padding, tile)
    out.zero_().index_copy_(0, found, sums.to(out.dtype))


def into(gradient: Tensor, ids: Tensor, buffer: Tensor, padding: int, tile: int) -> None:
    found, sums = gradient_rows(gradient, ids, buffer.shape[0], padding, tile)
    both = torch.promote_types(sums.dtype, buffer.dtype)
    old = buffer.index_select(0, found).to(both)
    buffer.index_copy_(0, found, old.add_(sums).to(buffer.dtype))
