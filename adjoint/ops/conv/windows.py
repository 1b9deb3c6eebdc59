"""Sums over the taps of a window in plain PyTorch: of rows [batch, length, channels]."""

from collections.abc import Sequence

import torch
from torch import Tensor

_PRODUCTS_AT_ONCE = 2**17
"""Numbers of all windows that are multiplied in one call of torch: so few that a call for each tap takes longer."""


def windows(rows: Tensor, length: int) -> Tensor:
    """For each tap the rows that it is multiplied with, [W, batch, length, channels]."""
    return rows.unfold(1, length, 1).permute(1, 0, 3, 2)


def taps_of(weight: Tensor, kind: torch.dtype) -> tuple[Tensor, ...]:
    """The W taps of a weight [channels, W], that of the oldest token first: each [channels], of a type."""
    return weight.to(kind).t().contiguous().unbind()


def add_taps(rows: Tensor, taps: Sequence[Tensor], bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """z_t = bias + Σ_j taps[j]·rows_{t+j}, [batch, length − W + 1, channels].

    Tap by tap, the oldest token first, in operations that torch computes alike for every element: a token has the same
    bits in a whole sequence, after a prefix of it, and in a step.
    """
    first, *others = windows(rows, rows.shape[1] - len(taps) + 1).unbind()
    z = torch.mul(first, taps[0], out=out)
    for window, tap in zip(others, taps[1:], strict=True):
        z.addcmul_(window, tap)
    return z if bias is None else z.add_(bias)


def multiply_windows(rows: Tensor, slopes: Tensor) -> Tensor:
    """Σ_t slopes_t·rows_{t+j} for each tap j, [W, channels]: the gradient of taps from that of z."""
    every = windows(rows, slopes.shape[1])
    if every.numel() <= _PRODUCTS_AT_ONCE:
        return (every * slopes).sum((1, 2))
    products = torch.empty_like(slopes)
    return torch.stack([torch.mul(window, slopes, out=products).sum((0, 1)) for window in every])
