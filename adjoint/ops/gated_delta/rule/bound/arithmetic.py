"""What a plan of the gated delta rule rounds, and how."""

from dataclasses import dataclass

import torch

SLACK = 1.02
"""A factor for products of two errors of float32 or float64, and for the roundings of this evaluation itself."""

NOISE = 2.0**-46
"""The share of a chunk's terms that a reference in float64 may lose if its result for a token is 0, as dk is if β is
0."""

FLUSHED = 2.0**-125
"""What a number of float32 that underflows may have been, a product of a key with its decay too: what multiplies it may
be large."""


TF32_PRODUCT = 3 * 2.0**-20
"""The share of its terms that a product of float32 numbers loses if each number is two truncated TF32 numbers: 2⁻²⁰ of
either number, and the product of both second parts."""


@dataclass(frozen=True)
class Arithmetic:
    """The roundings of a plan. Losses are relative: shares of a number itself, or of the terms of a product.

    Attributes:
        wide: the type of accumulators, gates and states.
        storage: the 16-bit type of the operands of products and of memory between them; None if that type is `wide`.
        cut: whether matrix instructions add. They truncate where other instructions round.
        block: the rows of a diagonal block of the chunk's matrix that is inverted by substitution.
        merge: the loss of a product that merges two inverses.
        inverse: the loss of T on its way to memory, before it is rounded there.
        short_sums: whether G is a single float32 where differences of it are computed.
        score, new_value: the losses of P and v' before the product that gives the outputs.
        row_product: the loss of a row before the products for dβ and dg.
        gradient_product: the loss of a product of the backward.
        without_W: whether the reverse scan has k̃ dS + Pᵀ do in two parts and multiplies that by T, so that neither W
            nor Tᵀ Pᵀ do is rounded.
        normalized: the loss of q and k if they are normalised; 0 if they are not.
        segment: the tokens of the segments into which a long sequence is split; 0 if none is split.
        reverse_segment: the same for the reverse scan.
        unsplit_reverse: the tokens of the longest sequence that the reverse scan does not split.
    """

    wide: torch.dtype
    storage: torch.dtype | None = None
    cut: bool = False
    block: int = 16
    merge: float = 0.0
    inverse: float = 0.0
    short_sums: bool = False
    score: float = 0.0
    new_value: float = 0.0
    row_product: float = 0.0
    gradient_product: float = 0.0
    without_W: bool = False
    normalized: float = 0.0
    segment: int = 0
    reverse_segment: int = 0
    unsplit_reverse: int = 0

    @property
    def unit(self) -> float:
        """The unit roundoff of accumulators; for float64 twice as much, because its reference rounds as well."""
        return torch.finfo(self.wide).eps / (1 if self.wide == torch.float64 else 2)

    @property
    def u(self) -> float:
        """The unit roundoff of storage."""
        return torch.finfo(self.storage).eps / 2 if self.storage else 0.0

    @property
    def tiny(self) -> float:
        """The error of rounding numbers below the normal range to storage, which is no share of the number."""
        return max(unit_below_normal(self.storage), FLUSHED) if self.storage else FLUSHED

    def sum_of(self, terms: int) -> float:
        """The share of its terms that a sum of `terms` products, with a few factors, loses in any order.

        In matrix instructions there are up to three products of parts for each term, and an addition loses twice as
        much.
        """
        return 2 * (3 * terms + 8) * self.unit if self.cut else (terms + 8) * self.unit

    def row(self, size: int) -> float:
        """The norm of the error of rounding a row of `size` such numbers to storage."""
        return self.tiny * size**0.5 if self.storage else 0.0


def unit_below_normal(dtype: torch.dtype) -> float:
    """Half the distance between the smallest numbers of a type."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def rounding(dtype: torch.dtype, wide: torch.dtype) -> float:
    """The unit roundoff of a result's type; 0 if it is that of the accumulator."""
    return 0.0 if dtype == wide else torch.finfo(dtype).eps / 2
