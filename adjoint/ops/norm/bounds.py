"""How far results may be from the exact ones: docs/norm.md derives the constants.

With unit u of the arithmetic and L levels in the sum over a row, the relative error of r is at most (L/2 + 4)·u: the
sum's terms are positive, and a root halves what is under it. Everything else counts the roundings behind it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, spacing
from adjoint.ops.norm import reference

SILU = {True: (180, 260), False: (40, 80)}
"""The error of silu and of its slope in units u, relative to their terms' sizes, for 16-bit types and for others."""


class Bounds:
    """The bounds of a problem's results.

    Attributes:
        element: the dtype of x, y, dx and dgate; `weight` that of dweight.
        arithmetic: the type that everything is computed in.
        levels: additions that a term of a sum over a row goes through; `chain`: of the sum over all rows.
        rounded: whether z is rounded to the element's type before the weight; `residual`: whether x is such a sum.
    """

    def __init__(
        self, element: torch.dtype, weight: torch.dtype, arithmetic: torch.dtype, eps: float, offset: float, *,
        levels: int, chain: int, rounded: bool = False, residual: bool = False,
    ) -> None:  # fmt: skip
        info = torch.finfo(arithmetic)
        self.element, self.weight, self.arithmetic, self.eps, self.offset = element, weight, arithmetic, eps, offset
        # The exact results of float64 are themselves computed in float64.
        self.u = info.eps / 2 * (2 if element == torch.float64 else 1)
        self.levels, self.chain, self.residual = levels, chain, residual
        self.rounded, self.u_residual = rounded, torch.finfo(element).eps / 2 * residual
        self.silu, self.slope = SILU[element.itemsize == 2]
        self.tiny = info.smallest_normal  # what products that underflow may cost
        self.tiny_silu = info.smallest_normal * 2**30  # silu below it counts as 0

    def _stored(self, exact: Tensor, before: Tensor, kind: torch.dtype) -> Tensor:
        """An error before the result is rounded to its type, and that rounding.

        torch rounds float64 to 16 bits by way of float32.
        """
        if kind == self.arithmetic:
            return before
        if self.arithmetic == torch.float64 and kind.itemsize == 2:
            before = before + 2.0**-24 * (exact.abs() + before)
        return before + spacing(exact.abs() + before, kind) / 2

    def _rounding(self, z: Tensor) -> Tensor:
        """The error of z where it is rounded before the weight."""
        if self.rounded and self.element != self.arithmetic:
            return spacing(z, self.element) / 2 + 2.0**-24 * z
        return torch.zeros_like(z)

    def _sizes(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """r, |z|, and the size of w with that of its terms."""
        r = reference.reciprocal(x, self.eps)
        return r, (x * r).abs(), (self.offset + weight).abs() + abs(self.offset)

    def _size_of_silu(self, gate: Tensor) -> Tensor:
        return reference.silu(gate).abs() + self.tiny_silu

    def s(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        return self._stored(x + residual, self.u * (x + residual).abs(), self.element)

    def y(self, x: Tensor, weight: Tensor, residual: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
        x = x if residual is None else x + residual
        exact = reference.rms_norm(x, weight, self.eps, self.offset)
        _, z, w = self._sizes(x, weight)
        units = self.levels / 2 + 8
        if gate is not None:
            exact, w, units = exact * reference.silu(gate), w * self._size_of_silu(gate), units + self.silu
        relative = units * self.u + 2.01 * self.u_residual
        before = (relative * z + 1.01 * self._rounding(z)) * w + self.tiny * (1 + w)
        return self._stored(exact, before, self.element)

    def dx(self, dy: Tensor, ds: Tensor | None, x: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
        """Relative to r·(|u·w| + |z|·mean|u·w·z|)."""
        u = dy if gate is None else dy * reference.silu(gate)
        exact, _ = reference.rms_norm_backward(u, x, weight, self.eps, self.offset)
        r, z, w = self._sizes(x, weight)
        a = (dy.abs() if gate is None else dy.abs() * self._size_of_silu(gate)) * w
        units = 3 * self.levels + 26 + (0 if gate is None else 2 * self.silu)
        size = r * (a + z * (a * z).mean(-1, keepdim=True))
        before = (units * self.u + 5.01 * self.u_residual) * size + self.tiny * (1 + r) * (1 + z) * (1 + w)
        if ds is not None:
            exact, before = exact + ds, before + self.u * (exact.abs() + ds.abs())
        return self._stored(exact, before, self.element)

    def dweight(self, dy: Tensor, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Relative to the sum of |u·z|, over a chain of additions that the number of rows fixes."""
        z = x * reference.reciprocal(x, self.eps)
        u = dy if gate is None else dy * reference.silu(gate)
        size = dy.abs() * (1 if gate is None else self._size_of_silu(gate))
        units = self.chain + self.levels / 2 + 8 + (0 if gate is None else self.silu)
        relative = 1.01 * units * self.u + 2.01 * self.u_residual
        errors = size * (relative * z.abs() + 1.01 * self._rounding(z.abs()))
        exact, before = (t.reshape(-1, x.shape[-1]).sum(0) for t in (u * z, errors))
        return self._stored(exact, before + self.tiny * self.chain, self.weight)

    def dgate(self, dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        """Relative to |dy·z·w|·(σ + |gate|·σ·(1 − σ)), since silu' has a root."""
        exact = dy * reference.rms_norm(x, weight, self.eps, 0.0) * reference.silu_slope(gate)
        _, z, w = self._sizes(x, weight)
        terms = torch.sigmoid(gate) * (1 + gate.abs() * torch.sigmoid(-gate)) + self.tiny_silu
        units = self.levels / 2 + 10 + self.slope
        error = units * self.u * z + 1.01 * self._rounding(z)
        before = error * dy.abs() * w * terms + self.tiny * (1 + dy.abs()) * (1 + w)
        return self._stored(exact, before, self.element)

    # l2_norm: z and r are those of the root of the sum, and there is no weight

    def l2_y(self, x: Tensor) -> Tensor:
        exact = reference.l2_norm(x, self.eps)
        return self._stored(exact, (self.levels / 2 + 10) * self.u * exact.abs() + self.tiny, self.element)

    def l2_dx(self, dy: Tensor, x: Tensor) -> Tensor:
        """Relative to r·(|dy| + |y|·Σ|y·dy|)."""
        exact, y = reference.l2_norm_backward(dy, x, self.eps), reference.l2_norm(x, self.eps).abs()
        r = 1 / torch.sqrt(x.square().sum(-1, keepdim=True) + self.eps)
        size = r * (dy.abs() + y * (y * dy.abs()).sum(-1, keepdim=True))
        before = (3 * self.levels + 32) * self.u * size + self.tiny * (1 + r) * (1 + x.shape[-1] * y)
        return self._stored(exact, before, self.element)


def derived(words: str, bound: Callable[..., Tensor]) -> Derived:
    return Derived(f"½ ulp + {words}: docs/norm.md", bound)
