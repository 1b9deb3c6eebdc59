"""The order of sums, written a second time: one term after the other, and the tree of tiles."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

TILE = 32

Sum = Callable[[Sequence[Tensor], Tensor], Tensor]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type a sum of a dtype runs in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_order(terms: Sequence[Tensor], zero: Tensor) -> Tensor:
    """The obvious loop."""
    total = zero
    for term in terms:
        total = total + term
    return total


def in_tiles(terms: Sequence[Tensor], zero: Tensor) -> Tensor:
    """Tiles of 32 in order; their sums are the terms of the next level."""
    while len(terms) > TILE:
        terms = [in_order(terms[begin : begin + TILE], zero) for begin in range(0, len(terms), TILE)]
    return in_order(terms, zero)


def rows_of(gradient: Tensor, ids: Tensor, rows: int, total: Sum = in_tiles) -> Tensor:
    """dweight before it is rounded: for each row, the sum of its tokens' gradients."""
    flat = gradient.reshape(ids.numel(), gradient.shape[-1]).to(wide(gradient.dtype))
    zero = flat.new_zeros(gradient.shape[-1])
    sums = [total(flat[ids.reshape(-1) == row].unbind(), zero) for row in range(rows)]
    return torch.stack(sums) if sums else flat.new_zeros(0, gradient.shape[-1])
