"""The embedding family in plain PyTorch, on any device, with the bits of the kernels.

A sum over a group of tokens runs in the same order as there: tiles of `TILE` tokens one after the other,
tiles of tiles likewise. All tiles are summed at once, a token of each at a time.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Terms = Callable[[Tensor], Tensor]
"""What the tokens at given places add, widened to the type sums run in, in memory of its own."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type sums of a dtype run in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sum_segments(terms: Terms, starts: Tensor, tile: int) -> Tensor:
    """The sum of each segment, from its start to the next one's; no segment is empty.

    Args:
        terms: gives the terms at places.
        starts: where each segment begins, and the end of the last.
        tile: the terms of a tile, and the tiles of one of the next level.
    """
    while True:
        lengths = starts.diff()
        tiles = (lengths + (tile - 1)).div(tile, rounding_mode="floor")
        bounds = torch.cat((tiles.new_zeros(1), tiles.cumsum(0)))
        number = int(bounds[-1])
        segment = torch.repeat_interleave(torch.arange(len(tiles), device=starts.device), tiles, output_size=number)
        begins = starts[segment] + (torch.arange(number, device=starts.device) - bounds[segment]) * tile
        sums = _sum_tiles(terms, begins, (starts[segment + 1] - begins).clamp_max(tile))
        if number == len(tiles):
            return sums
        starts, terms = bounds, _rows(sums)


def _rows(values: Tensor) -> Terms:
    return lambda places: values.index_select(0, places)


def _sum_tiles(terms: Terms, begins: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each tile, one term after the other."""
    longest = int(lengths.max()) if len(lengths) else 0
    if longest <= 1:
        return terms(begins).add_(0.0)  # a sum that begins with 0 is never −0
    lengths, order = lengths.sort(descending=True, stable=True)
    begins = begins[order]
    active = (len(lengths) - torch.bincount(lengths, minlength=longest + 1).cumsum(0)).tolist()
    sums = terms(begins).add_(0.0)
    for step in range(1, longest):
        number = active[step]
        sums[:number].add_(terms(begins[:number] + step))
    result = torch.empty_like(sums)
    return result.index_copy_(0, order, sums)


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
