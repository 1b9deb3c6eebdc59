"""What a plan of the gated delta rule rounds, and how."""

from dataclasses import dataclass

import torch

SLACK = 1.02
"""Products of two errors of float32, or of float64, and what this evaluation rounds itself."""

NOISE = 2.0**-46
"""What a reference in float64 may lose of a chunk's terms, where its result for a token is 0, as dk is where β is."""

FLUSHED = 2.0**-125
"""What a number of float32 that underflows may have been, a product of a key with its decay too: what multiplies it may
be large."""


TF32_PRODUCT = 3 * 2.0**-20
"""What a product of float32 numbers, each of them two TF32 numbers that are cut, loses of its terms: 2⁻²⁰ of either
number, and the product of both second parts."""


@dataclass(frozen=True)
class Arithmetic:
    """What a plan rounds, and how.

    Attributes:
        wide: the type of accumulators, gates and states.
        storage: the 16-bit type of what products take and memory keeps between them; None where that is wide too.
        cut: whether matrix instructions add, which cut what others round.
        block: rows of a diagonal block of the chunk's matrix that is inverted by substitution.
        merge: what a product that merges two inverses loses of its terms.
        inverse: what T loses of itself on its way to memory, before it is rounded there.
        short_sums: whether G is one float32 where differences of it are formed.
        score, new_value: what P and v' lose of themselves before the product that gives the outputs.
        row_product: what a row loses of itself before the products that dβ and dg take.
        gradient_product: what a product of the backward loses of its terms.
        without_W: whether the reverse scan has k̃ dS + Pᵀ do in two parts and multiplies that with T, so that neither W
            nor Tᵀ Pᵀ do is rounded.
        normalized: what q and k lose of themselves where they are normalised; 0 where they are not.
        segment: tokens of the segments that a long sequence is split into; 0 where none is split.
        reverse_segment, unsplit_reverse: the same of the reverse scan, and the longest sequence that it does not split.
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
        """The unit roundoff of accumulators; twice that of float64, whose reference rounds as much."""
        return torch.finfo(self.wide).eps / (1 if self.wide == torch.float64 else 2)

    @property
    def u(self) -> float:
        """The unit roundoff of storage."""
        return torch.finfo(self.storage).eps / 2 if self.storage else 0.0

    @property
    def tiny(self) -> float:
        """What rounding to storage may cost where it is no share of a number."""
        return max(unit_below_normal(self.storage), FLUSHED) if self.storage else FLUSHED

    def sum_of(self, terms: int) -> float:
        """What a sum of so many products, and a few factors, loses of its terms, in any order.

        In the accumulators of matrix instructions up to three products of parts meet, and an addition costs twice.
        """
        return 2 * (3 * terms + 8) * self.unit if self.cut else (terms + 8) * self.unit

    def row(self, size: int) -> float:
        """What rounding a row of so many numbers to storage may cost in the same way."""
        return self.tiny * size**0.5 if self.storage else 0.0


def unit_below_normal(dtype: torch.dtype) -> float:
    """Half the distance of the smallest numbers of a type."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def rounding(dtype: torch.dtype, wide: torch.dtype) -> float:
    """The unit roundoff of a result's type, 0 where it is the accumulator's."""
    return 0.0 if dtype == wide else torch.finfo(dtype).eps / 2
