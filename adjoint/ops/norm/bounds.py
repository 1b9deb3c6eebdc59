"""How far results may be from the exact ones: docs/norm.md derives the constants.

With unit u of the arithmetic and L levels in the sum over a row, the relative error of r is at most (L/2 + 4)·u: the
sum's terms are positive, and a root halves what is under it. Everything else counts the roundings behind it.

A product that underflows loses less than the smallest normal number ν, which later products multiply. So each counts as
larger by `floor`, ν/u, than it is: u times that is ν, and goes wherever the product goes.
"""

import torch
from torch import Tensor

from adjoint.core.guarantee import overflow_threshold, spacing
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
        self.most = 2.0**1000 if arithmetic == torch.float64 else 2.0**100
        self.overflow = overflow_threshold(element) if norm.residual else float("inf")
        self.u_residual = torch.finfo(element).eps / 2 * norm.residual
        self.levels, self.chain = levels, chain
        self.silu, self.slope = SILU[element.itemsize == 2] if norm.gate else (0, 0)
        self.floor = info.smallest_normal / self.u
        self.tiny_silu = info.smallest_normal * 2**30  # silu below it counts as 0

    def _stored(self, exact: Tensor, before: Tensor, kind: torch.dtype) -> Tensor:
        """An error before the result is rounded to its type, and that rounding.

        torch rounds float64 to 16 bits by way of float32.
        """
        if kind == self.arithmetic:
            return before
        if self.arithmetic == torch.float64 and kind.itemsize == 2:
            before = before + spacing(exact.abs() + before, torch.float32) / 2
        return before + spacing(exact.abs() + before, kind) / 2

    def _rounding(self, z: Tensor) -> Tensor:
        """The error of z where it is rounded before the weight."""
        nothing = torch.zeros_like(z)
        return self._stored(z, nothing, self.element) if self.rounded else nothing

    def _sizes(self, of: Arguments) -> tuple[Tensor, Tensor, Tensor]:
        """r, |z|, and the size of w with that of its terms."""
        r = reference.reciprocal(of.x, self.eps)
        return r, (of.x * r).abs() + self.floor, (self.offset + of.weight).abs() + abs(self.offset)

    def _gate(self, gate: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
        """silu(gate) and its size, or 1 where there is no gate."""
        if gate is None:
            return 1.0, 1.0
        silu = reference.silu(gate)
        return silu, silu.abs() + self.tiny_silu

    def _squares(self, x: Tensor) -> Tensor:
        """What the root is of: the mean of squares and ε."""
        return x.square().mean(-1, keepdim=True) + self.eps

    def _placed(self, before: Tensor, of: Arguments, *sizes: Tensor) -> Tensor:
        """The error, infinite in rows outside of the domain.

        Their squares or terms may have no place in the arithmetic, or their sums with the residual none in their type.
        """
        squares = self._squares(of.x)
        inside = (squares >= 1 / self.most) & (squares <= self.most)
        inside &= ((1 + self.u) * of.x.abs() < self.overflow).all(-1, keepdim=True)
        for size in sizes:
            inside &= (size < self.most).all(-1, keepdim=True)
        return torch.where(inside, before, torch.inf)

    def s(self, of: Arguments) -> Tensor:
        return self._stored(of.x, self.u * of.x.abs(), self.element)

    def y(self, of: Arguments) -> Tensor:
        (_, z, w), (silu, size) = self._sizes(of), self._gate(of.gate)
        exact = reference.rms_norm(of.x, of.weight, self.eps, self.offset) * silu
        relative = (self.levels / 2 + 8 + self.silu) * self.u + 2.01 * self.u_residual
        before = relative * ((z * w + self.floor) * size + self.floor) + 1.01 * self._rounding(z) * w * size
        return self._stored(exact, self._placed(before, of, z * w * size), self.element)

    def dx(self, of: Arguments) -> Tensor:
        """Relative to r·(|d·w| + |z|·mean|d·w·z|)."""
        (r, z, w), (silu, size) = self._sizes(of), self._gate(of.gate)
        exact, _ = reference.rms_norm_backward(of.dy * silu, of.x, of.weight, self.eps, self.offset)
        u = of.dy.abs() * size + self.floor
        a = u * w + self.floor
        sums, along = ((a * factor).sum(-1, keepdim=True) for factor in (z, of.x.abs()))
        size = r * (a + z * ((a * z).mean(-1, keepdim=True) + (1 + r) * self.floor)) + self.floor
        relative = (3 * self.levels + 26 + 2 * self.silu) * self.u + 5.1 * self.u_residual
        before = relative * size
        if of.ds is not None:
            exact, before = exact + of.ds, before + self.u * (exact.abs() + of.ds.abs())
        return self._stored(exact, self._placed(before, of, u, a, along, sums, sums * z, size), self.element)

    dresidual = dx

    def dweight(self, of: Arguments) -> Tensor:
        """Relative to the sum of |u·z|, over a chain of additions that the number of rows fixes."""
        (r, z, _), (silu, size) = self._sizes(of), self._gate(of.gate)
        exact, size = of.dy * silu * (of.x * r), of.dy.abs() * size + self.floor
        relative = 1.01 * (self.chain + self.levels / 2 + 8 + self.silu) * self.u + 2.01 * self.u_residual
        errors = self._placed(relative * (size * z + self.floor) + 1.01 * size * self._rounding(z), of, size)
        exact, before, size = (t.reshape(-1, of.x.shape[-1]).sum(0) for t in (exact, errors, size * z))
        before = torch.where(size < self.most, before, torch.inf)
        return self._stored(exact, before, self.weight)

    def dgate(self, of: Arguments) -> Tensor:
        """Relative to |dy·z·w|·(σ + |gate|·σ·(1 − σ)), since silu' has a root."""
        exact = of.dy * reference.rms_norm(of.x, of.weight, self.eps, 0.0) * reference.silu_slope(of.gate)
        (_, z, w), dy = self._sizes(of), of.dy.abs()
        terms = torch.sigmoid(of.gate) * (1 + of.gate.abs() * torch.sigmoid(-of.gate)) + self.tiny_silu
        size = (dy * (z * w + self.floor) + w * self.floor) * terms + self.floor
        before = (self.levels / 2 + 10 + self.slope) * self.u * size + 1.01 * self._rounding(z) * dy * w * terms
        return self._stored(exact, self._placed(before, of, z * w, dy * z * w * (1 + terms), dy), self.element)


class L2Bounds(Bounds):
    """z and r are those of the root of the sum, and there is no weight."""

    def _squares(self, x: Tensor) -> Tensor:
        return x.square().sum(-1, keepdim=True) + self.eps

    def y(self, of: Arguments) -> Tensor:
        exact = reference.l2_norm(of.x, self.eps)
        before = (self.levels / 2 + 10) * self.u * (exact.abs() + self.floor)
        return self._stored(exact, self._placed(before, of), self.element)

    def dx(self, of: Arguments) -> Tensor:
        """Relative to r·(|dy| + |y|·Σ|y·dy|)."""
        exact, y = reference.l2_norm_backward(of.dy, of.x, self.eps), reference.l2_norm(of.x, self.eps).abs()
        r, dy, y = 1 / torch.sqrt(of.x.square().sum(-1, keepdim=True) + self.eps), of.dy.abs(), y + self.floor
        sums = (y * dy + self.floor).sum(-1, keepdim=True)
        size = r * (dy + y * sums) + self.floor
        before = self._placed((3 * self.levels + 32) * self.u * size, of, dy, sums, size)
        return self._stored(exact, before, self.element)
