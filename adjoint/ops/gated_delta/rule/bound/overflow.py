"""Overflows of sums and of numbers that kernels round to 16 bits. Nothing is promised there, and bounds are infinite.

float16 ends at 65504, and intermediate numbers may be larger than results: E, the products of Y and v' for dk, has
terms that cancel. The test adds the bound of the error to the exact number, so a number that passes is never infinite.

Sums end with the type of the accumulator. A plan may multiply by a decay, by β or by a scale before a sum or behind it,
and by 0 what another token must not see. So the terms of sums are taken without any of these.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import overflow_threshold
from adjoint.ops.gated_delta.rule.bound.arithmetic import Arithmetic

SHARE = 2.0**-8
"""The share of the largest number that the terms of one value head may have."""


def may_overflow(a: Arithmetic, magnitude: Tensor) -> Tensor:
    """Where numbers of at most these magnitudes may become infinite in storage."""
    limit = overflow_threshold(a.storage) if a.storage else float("inf")
    return magnitude >= limit


def sums_may_overflow(a: Arithmetic, scale: float, terms: Tensor) -> Tensor:
    """Where sums of terms of these magnitudes, and of as many value heads as share a key head, may be infinite."""
    most = torch.finfo(a.wide).max * SHARE / max(1.0, abs(scale))
    return ~(terms < most)  # also where the terms themselves have no place in float64


def matrix_may_overflow(a: Arithmetic, x: Tensor, row_sizes: Tensor) -> Tensor:
    """Whether one of a lane's rows may overflow. `row_sizes` bound the norms of the rows and of their errors."""
    errors = row_sizes - x.norm(dim=-1)
    return may_overflow(a, x.abs().amax(-1) + errors.clamp_min(0)).any(-1)


class Lost(NamedTuple):
    """Masks, [lanes, 64], of a chunk's tokens whose gradients an overflow in storage may reach."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
