"""Running error analysis: exact numbers, each with a bound of the error of the computed number in its place.

Operations carry number and bound along. The bounds are those of IEEE arithmetic with unit roundoff u and sums in any
order: the error of an operation is at most the errors of its operands, and u of the largest result that it may have. So
a computation by steps has a bound for every number, evaluated for the very inputs, in float64.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing

NOISE = 2.0**-50
"""What the evaluation of a bound, in float64, may lose of it."""


class Arithmetic(NamedTuple):
    """What operations round to, u, and what they may lose where they underflow."""

    unit: float
    tiny: float

    @staticmethod
    def of(computed: torch.dtype, storage: torch.dtype) -> "Arithmetic":
        """Of a type that results of another are computed in. The exact results of float64 round as much as it does."""
        info = torch.finfo(computed)
        return Arithmetic(info.eps / (1 if storage == torch.float64 else 2), info.smallest_normal)


class Running:
    """Numbers, and how far what is computed in their place may be from them."""

    def __init__(self, arithmetic: Arithmetic, exact: Tensor, error: Tensor | None = None) -> None:
        self.arithmetic, self.exact = arithmetic, exact
        self.error = torch.zeros_like(exact) if error is None else error

    @property
    def size(self) -> Tensor:
        """The largest that may be computed in their place."""
        return self.exact.abs() + self.error

    def _rounded(self, exact: Tensor, error: Tensor, terms: Tensor | None = None, operations: float = 1) -> "Running":
        """A result whose terms' sizes go through so many roundings; by default the result itself, through one."""
        u, tiny = self.arithmetic
        share = operations * u / (1 - operations * u) + NOISE
        size = exact.abs() + error if terms is None else terms
        return Running(self.arithmetic, exact, error + share * size + tiny)

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
        # What underflowed in one factor is multiplied by the other.
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
        """e^x: an error of x is one of the result, of itself; the function rounds the product of x with log₂e, too."""
        exact = self.exact.exp()
        u, tiny = self.arithmetic
        far = self.exact.abs().nan_to_num(posinf=0.0)
        error = exact * (torch.expm1(self.error) + torch.exp(self.error) * (4 * far + roundings) * u)
        return Running(self.arithmetic, exact, error + tiny)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Running":
        """What only moves numbers, or sets some of them to 0."""
        return Running(self.arithmetic, function(self.exact), function(self.error))

    @property
    def mT(self) -> "Running":
        return self.map(lambda x: x.mT)

    def stored(self, computed: torch.dtype, kind: torch.dtype) -> Tensor:
        """The bound once the numbers are rounded to a type. torch rounds float64 to 16 bits by way of float32."""
        if kind == computed:
            return self.error
        error = self.error
        if computed == torch.float64 and kind.itemsize == 2:
            error = error + 2.0**-24 * self.size + torch.finfo(torch.float32).smallest_normal * 2.0**-23
        return error + spacing(self.exact.abs() + error, kind) / 2
