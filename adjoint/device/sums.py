"""Sums of groups of terms in one stated order, in plain PyTorch on any device, and the error such sums may have.

The terms of a group are added one after the other in tiles of `tile` terms, beginning with 0; tiles of tiles
likewise. So a group's bits depend on its own terms and their order alone, a group of one tile is the obvious
loop, and a long group still has many tiles that can be summed at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.core.problem import wide_dtype

Terms = Callable[[Tensor], Tensor]
"""What the terms at some places are, widened to the type sums run in, in memory of its own."""


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


# ---------------------------------------------------------------------------------------------- error


def additions(count: Tensor, tile: int) -> Tensor:
    """The longest chain of additions a term of a sum of `count` terms goes through."""
    steps = torch.zeros_like(count)
    for _ in range(7):
        steps += count.clamp_max(tile)
        count = torch.where(count > tile, (count + tile - 1).div(tile, rounding_mode="floor"), 0)
    return steps


def sum_bound(
    exact: Tensor,
    magnitude: Tensor,
    count: Tensor,
    steps: Tensor,
    dtype: torch.dtype,
    out: torch.dtype | None = None,
) -> Tensor:
    """The error of a sum of `count` terms of a dtype and a magnitude Σ|terms|, rounded to `out`, or that dtype.

    After n roundings in the wide type that is γ·Σ|terms|, γ = n·u / (1 − n·u); then half a unit in the
    last place of what is rounded. Additions do not underflow; products may, by half the smallest number
    each. For float64 the exact sum is itself one in float64, of as many roundings as terms.
    """
    info = torch.finfo(wide_dtype(dtype))
    if dtype == torch.float64:
        steps = steps + count
    chain = steps * (info.eps / 2)
    before = chain / (1 - chain) * magnitude + steps * info.smallest_normal * info.eps
    if (out or dtype) == wide_dtype(dtype):
        return before
    return before + spacing(exact.abs() + before, out or dtype) / 2
