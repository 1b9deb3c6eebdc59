"""Sums of groups of terms in one stated order, in plain PyTorch on any device, and what such sums promise.

The terms of a group are added one after the other in tiles of `tile` terms, beginning with 0. The sums of tiles are
added in tiles in the same way. So a group's bits depend on its own terms and their order alone. A group of one tile has
the bits of the obvious loop, and the tiles of a long group can be summed at once.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.problem import short, wide_dtype

Terms = Callable[[Tensor], Tensor]
"""What the terms at some places are, widened to the type sums run in, in memory of its own."""


def sum_groups(terms: Terms, keys: Tensor, groups: int, tile: int) -> tuple[Tensor, Tensor]:
    """The keys that occur, ascending, and the sum of the terms of each; those with the key `groups` are in none."""
    keys, positions = keys.reshape(-1).sort(stable=True)
    present, lengths = torch.unique_consecutive(keys, return_counts=True)
    starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0)))
    if len(present) and int(present[-1]) == groups:
        present, starts = present[:-1], starts[:-1]
    return present.long(), sum_segments(lambda places: terms(positions[places]), starts, tile)


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
        starts, terms = bounds, partial(sums.index_select, 0)


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


# ------------------------------------------------------------------------------------------- promises

IN_RANGE = "every input of which no sum of some terms overflows the accumulator"
"""The domain of sums."""


def additions(count: Tensor, tile: int) -> Tensor:
    """The longest chain of additions a term of a sum of `count` terms goes through."""
    steps = torch.zeros_like(count)
    for _ in range(7):
        steps += count.clamp_max(tile)
        count = torch.where(count > tile, (count + tile - 1).div(tile, rounding_mode="floor"), 0)
    return steps


def sum_bound(
    exact: Tensor, magnitude: Tensor, count: Tensor, steps: Tensor, dtype: torch.dtype, out: torch.dtype | None = None
) -> Tensor:
    """The error of a sum of `count` terms of a dtype and a magnitude Σ|terms|, rounded to `out`, or that dtype.

    After n roundings in the wide type that is γ·Σ|terms|, γ = n·u / (1 − n·u); then half a unit in the
    last place of what is rounded. Additions do not underflow; products may, by half the smallest number
    each. For float64 the exact sum is itself one in float64, of as many roundings as terms. Where a sum of
    some terms may overflow, whatever that of all is, the bound is infinite.
    """
    info = torch.finfo(wide_dtype(dtype))
    steps = steps.double()  # of integers and numbers torch would make float32, which has not the smallest of float64
    if dtype == torch.float64:
        steps = steps + count
    chain = steps * (info.eps / 2)
    before = chain / (1 - chain) * magnitude + steps * info.smallest_normal * info.eps
    before = before.masked_fill(magnitude + before > info.max, torch.inf)
    if (out or dtype) == wide_dtype(dtype):
        return before
    return before + spacing(exact.abs() + before, out or dtype) / 2


def group_sums_bound(
    terms: Tensor, keys: Tensor, groups: int, tile: int, dtype: torch.dtype, *, roundings: int = 0,
    count: Tensor | None = None, former: Tensor | None = None, out: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """The error of the sum of each group of terms along the first axis; 0 for a group of none.

    Args:
        keys: the group of each term; there are so many `groups`.
        dtype: of the terms; `out` is that of the sums, where it is another.
        roundings: those of each term before it is added.
        count: how many terms are added to each group, where some of them are 0 and not among `terms`.
        former: what the sums are added to.
    """
    count = torch.bincount(keys, minlength=groups) if count is None else count
    count = count.view(-1, *(1,) * (terms.dim() - 1))
    start = terms.new_zeros(groups, *terms.shape[1:]) if former is None else former
    exact, magnitude = start.index_add(0, keys, terms), start.abs().index_add(0, keys, terms.abs())
    steps = additions(count, tile) + roundings + (former is not None)
    return sum_bound(exact, magnitude, count + roundings, steps, dtype, out).masked_fill_(count == 0, 0)


def invariant_guarantee(item: str, error: Derived, dtype: torch.dtype | None = None, **others: Any) -> Guarantee:
    """Of results whose bits depend on an item's own inputs alone, wherever they are computed.

    Args:
        item: see `Guarantee.batch_invariant`.
        error: how far they may be from the exact results.
        dtype: of what is computed, and rounded once; None for copies.
        others: whatever else it says, or says otherwise.
    """
    accumulator, roundings = ("none", 0) if dtype is None else (short(wide_dtype(dtype)), 1)
    always = {"repeatable": True, "batch_invariant": item, "device_invariant": True, "error": error}
    return Guarantee(**{**always, "accumulator": accumulator, "roundings": roundings, **others})


def copy_guarantee(item: str, out_of_range: str) -> dict[str, Guarantee]:
    """Of an output whose elements are copies of inputs."""
    exact = Derived("0: bytes are copied", lambda *inputs: torch.zeros(()))
    special = "copied, payloads of NaN included"
    return {"out": invariant_guarantee(item, exact, special_values=special, out_of_range=out_of_range)}


def sum_error(bound: Callable[..., Tensor], terms: str, term: str, dtype: torch.dtype) -> Derived:
    """The error of sums of a dtype in words, "dout| over the row's tokens" and "a token", and in numbers."""
    unit = f"u = 2^{-53 if dtype == torch.float64 else -24}"
    return Derived(f"½ ulp + γ·Σ|{terms}, γ = n·u / (1 − n·u), {unit}, n the additions {term} goes through", bound)
