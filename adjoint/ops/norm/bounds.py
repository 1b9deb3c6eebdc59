"""How far results may be from the exact ones: docs/norm.md derives the constants.

With unit u of the arithmetic and L levels in the sum over a row, the relative error of r is at most (L/2 + 4)·u: the
sum's terms are positive, and a root halves what is under it. Everything else counts the roundings behind it.
"""

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.core.problem import Problem
from adjoint.ops.norm import reference
from adjoint.ops.norm.arguments import Arguments, Norm

SILU = {True: (180, 260), False: (40, 80)}
"""The error of silu and of its slope in units u, relative to their terms' sizes, for 16-bit types and for others."""


class Bounds:
    """The bounds of a problem's results, each a method of the result's name; x is the sum where there is a residual.

    Everything is computed in the type `arithmetic`; a term of a sum over a row goes through `levels` additions, one of
    the sum over all rows through `chain`.
    """

    def __init__(self, norm: Norm, problem: Problem, arithmetic: torch.dtype, levels: int, chain: int) -> None:
        info, (element, *_), (self.eps, *more) = torch.finfo(arithmetic), problem.dtypes, problem.options
        self.offset: float = more[0] if norm.weight and not norm.gate else 0.0
        self.rounded: bool = norm.gate and more[0]
        self.arithmetic, self.element, self.weight = arithmetic, element, problem.dtypes[-1]
        # The exact results of float64 are themselves computed in float64.
        self.u = info.eps / 2 * (2 if element == torch.float64 else 1)
        self.u_residual = torch.finfo(element).eps / 2 * norm.residual
        self.levels, self.chain = levels, chain
        self.silu, self.slope = SILU[element.itemsize == 2] if norm.gate else (0, 0)
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

    def _sizes(self, of: Arguments) -> tuple[Tensor, Tensor, Tensor]:
        """r, |z|, and the size of w with that of its terms."""
        r = reference.reciprocal(of.x, self.eps)
        return r, (of.x * r).abs(), (self.offset + of.weight).abs() + abs(self.offset)

    def _gated(self, values: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
        """values·silu(gate), and the size of that."""
        if gate is None:
            return values, values.abs()
        silu = reference.silu(gate)
        return values * silu, values.abs() * (silu.abs() + self.tiny_silu)

    def s(self, of: Arguments) -> Tensor:
        return self._stored(of.x, self.u * of.x.abs(), self.element)

    def y(self, of: Arguments) -> Tensor:
        _, z, w = self._sizes(of)
        exact, _ = self._gated(reference.rms_norm(of.x, of.weight, self.eps, self.offset), of.gate)
        _, w = self._gated(w, of.gate)
        relative = (self.levels / 2 + 8 + self.silu) * self.u + 2.01 * self.u_residual
        before = (relative * z + 1.01 * self._rounding(z)) * w + self.tiny * (1 + w)
        return self._stored(exact, before, self.element)

    def dx(self, of: Arguments) -> Tensor:
        """Relative to r·(|d·w| + |z|·mean|d·w·z|)."""
        u, a = self._gated(of.dy, of.gate)
        exact, _ = reference.rms_norm_backward(u, of.x, of.weight, self.eps, self.offset)
        r, z, w = self._sizes(of)
        a = a * w
        size = r * (a + z * (a * z).mean(-1, keepdim=True))
        relative = (3 * self.levels + 26 + 2 * self.silu) * self.u + 5.1 * self.u_residual
        before = relative * size + self.tiny * (1 + r) * (1 + z) * (1 + w)
        if of.ds is not None:
            exact, before = exact + of.ds, before + self.u * (exact.abs() + of.ds.abs())
        return self._stored(exact, before, self.element)

    dresidual = dx

    def dweight(self, of: Arguments) -> Tensor:
        """Relative to the sum of |u·z|, over a chain of additions that the number of rows fixes."""
        (u, size), z = self._gated(of.dy, of.gate), of.x * reference.reciprocal(of.x, self.eps)
        relative = 1.01 * (self.chain + self.levels / 2 + 8 + self.silu) * self.u + 2.01 * self.u_residual
        errors = size * (relative * z.abs() + 1.01 * self._rounding(z.abs()))
        exact, before = (t.reshape(-1, of.x.shape[-1]).sum(0) for t in (u * z, errors))
        return self._stored(exact, before + self.tiny * self.chain, self.weight)

    def dgate(self, of: Arguments) -> Tensor:
        """Relative to |dy·z·w|·(σ + |gate|·σ·(1 − σ)), since silu' has a root."""
        exact = of.dy * reference.rms_norm(of.x, of.weight, self.eps, 0.0) * reference.silu_slope(of.gate)
        (_, z, w), dy = self._sizes(of), of.dy.abs()
        terms = torch.sigmoid(of.gate) * (1 + of.gate.abs() * torch.sigmoid(-of.gate)) + self.tiny_silu
        error = (self.levels / 2 + 10 + self.slope) * self.u * z + 1.01 * self._rounding(z)
        return self._stored(exact, error * dy * w * terms + self.tiny * (1 + dy) * (1 + w), self.element)


class L2Bounds(Bounds):
    """z and r are those of the root of the sum, and there is no weight."""

    def y(self, of: Arguments) -> Tensor:
        exact = reference.l2_norm(of.x, self.eps)
        return self._stored(exact, (self.levels / 2 + 10) * self.u * exact.abs() + self.tiny, self.element)

    def dx(self, of: Arguments) -> Tensor:
        """Relative to r·(|dy| + |y|·Σ|y·dy|)."""
        exact, y = reference.l2_norm_backward(of.dy, of.x, self.eps), reference.l2_norm(of.x, self.eps).abs()
        r, dy = 1 / torch.sqrt(of.x.square().sum(-1, keepdim=True) + self.eps), of.dy.abs()
        size = r * (dy + y * (y * dy).sum(-1, keepdim=True))
        before = (3 * self.levels + 32) * self.u * size + self.tiny * (1 + r) * (1 + of.x.shape[-1] * y)
        return self._stored(exact, before, self.element)
