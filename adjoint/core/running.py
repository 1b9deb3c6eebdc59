"""Running error analysis: exact numbers, each with a bound of the error of the computed number in its place.

Operations carry number and bound along. The bounds are those of IEEE arithmetic with unit roundoff u and sums in any
order: the error of an operation is at most the errors of its operands, and u of the largest result that it may have. So
a computation by steps has a bound for every number, evaluated for the very inputs, in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing, without_nan

NOISE = 2.0**-50
"""The share of a bound that its evaluation in float64 may lose."""


class Arithmetic(NamedTuple):
    """The unit roundoff u of operations, the largest error that underflow may add, and half the largest number."""

    unit: float
    tiny: float
    most: float

    @staticmethod
    def of(computed: torch.dtype, storage: torch.dtype) -> "Arithmetic":
        """The arithmetic of the type in which results of a storage type are computed.

        For float64 u is doubled, because the exact results are in float64 too and round as much.
        """
        info = torch.finfo(computed)
        return Arithmetic(info.eps / (1 if storage == torch.float64 else 2), info.smallest_normal, info.max / 2)


class Running:
    """Exact numbers, and how far the computed numbers may be from them."""

    def __init__(self, arithmetic: Arithmetic, exact: Tensor, error: Tensor | None = None) -> None:
        self.arithmetic, self.exact = arithmetic, exact
        self.error = torch.zeros_like(exact) if error is None else error

    @property
    def size(self) -> Tensor:
        """The largest magnitudes that the computed numbers may have."""
        return self.exact.abs() + self.error

    def _rounded(self, exact: Tensor, error: Tensor, terms: Tensor | None = None, operations: float = 1) -> "Running":
        """A result with the error of `operations` further roundings of `terms`; by default, of the result itself.

        The error is infinite where the terms may have no place in the arithmetic's type.
        """
        u, tiny, most = self.arithmetic
        share = operations * u / (1 - operations * u) + NOISE
        size = exact.abs() + error if terms is None else terms
        return Running(self.arithmetic, exact, torch.where(size < most, error + share * size + tiny, torch.inf))

    def __add__(self, other: "Running") -> "Running":
        return self._rounded(self.exact + other.exact, self.error + other.error)

    def __sub__(self, other: "Running") -> "Running":
        return self + -other

    def __neg__(self) -> "Running":
        return Running(self.arithmetic, -self.exact, self.error)

    def __mul__(self, other: "Running | float") -> "Running":
        if not isinstance(other, Running):
            return self._rounded(self.exact * other, self.error * abs(other))
        error = self.exact.abs() * other.error + self.error * other.size
        product = self._rounded(self.exact * other.exact, error)
        # An underflow in one factor is multiplied by the other factor.
        product.error = product.error + self.arithmetic.tiny * (self.size + other.size)
        return product

    def __matmul__(self, other: "Running") -> "Running":
        error = self.exact.abs() @ other.error + self.error @ other.size
        return self._rounded(self.exact @ other.exact, error, self.size @ other.size, self.exact.shape[-1] + 1)

    def sum(self, axis: int) -> "Running":
        return self._rounded(self.exact.sum(axis), self.error.sum(axis), self.size.sum(axis), self.exact.shape[axis])

    def cumsum(self, axis: int) -> "Running":
        exact, error, size = (x.cumsum(axis) for x in (self.exact, self.error, self.size))
        return self._rounded(exact, error, size, self.exact.shape[axis])

    def exp(self, roundings: int = 8) -> "Running":
        """e^x. An absolute error of x is a relative error of the result; the product of x with log₂e is rounded too."""
        exact = self.exact.exp()
        u, tiny, _ = self.arithmetic
        far = self.exact.abs().nan_to_num(posinf=0.0)
        error = exact * (torch.expm1(self.error) + torch.exp(self.error) * (4 * far + roundings) * u)
        return Running(self.arithmetic, exact, error + tiny)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Running":
        """Applies a function that only moves numbers or sets some of them to 0."""
        return Running(self.arithmetic, function(self.exact), function(self.error))

    @property
    def mT(self) -> "Running":
        return self.map(lambda x: x.mT)

    def stored(self, computed: torch.dtype, kind: torch.dtype) -> Tensor:
        """The bound after the numbers are rounded to `kind`. Torch rounds float64 to 16-bit types through float32."""
        error = without_nan(self.error)
        if kind == computed:
            return error
        if computed == torch.float64 and kind.itemsize == 2:
            error = error + 2.0**-24 * self.size + torch.finfo(torch.float32).smallest_normal * 2.0**-23
        return error + spacing(self.exact.abs() + error, kind) / 2
