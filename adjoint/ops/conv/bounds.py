"""How far results may be from the exact ones, evaluated for the very inputs of a call: docs/conv.md derives it.

With unit u of the arithmetic and W taps, z has an error of at most E = γ(W + 2)·(|bias| + Σ|w·x|), where
γ(n) = n·u / (1 − n·u): each of its terms is rounded at most so often, whether products are rounded or not.
|silu'| ≤ 1.1 and |silu''| ≤ ½ carry E on to y and dz.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing, without_nan
from adjoint.core.problem import short
from adjoint.ops.conv import reference

SILU = {True: (180, 260), False: (40, 80)}
"""The error of silu and of its slope in units u, relative to their terms' sizes, for 16-bit types and for others."""


class Inputs(NamedTuple):
    """The arguments of a reference; of a step, states are those of its rows."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    state: Tensor | None = None
    cu_seqlens: Tensor | None = None


class Bounds:
    """The bounds of a problem's results, each a method of the result's name.

    Args:
        element, weight, bias: the types of x, the weight and the bias, and so of their gradients.
        arithmetic: the type that everything is computed in.
        is_silu: whether there is an activation.
        chain: how many additions a term of dweight goes through.
    """

    def __init__(
        self, element: torch.dtype, weight: torch.dtype, bias: torch.dtype, arithmetic: torch.dtype, is_silu: bool,
        chain: int,
    ) -> None:  # fmt: skip
        info = torch.finfo(arithmetic)
        self.element, self.weight_type, self.bias_type, self.arithmetic = element, weight, bias, arithmetic
        self.is_silu, self.chain = is_silu, chain
        # The exact results of float64 are themselves computed in float64.
        self.u = info.eps / 2 * (2 if element == torch.float64 else 1)
        self.silu, self.slope = SILU[element.itemsize == 2] if is_silu else (0, 0)
        self.tiny = info.smallest_normal  # what products that underflow may cost
        self.most = info.max / 4  # of the sums of terms for which there is a promise
        self.tiny_silu = info.smallest_normal * 2**30 * is_silu  # silu below it counts as 0

    def _gamma(self, roundings: int) -> float:
        return roundings * self.u / (1 - roundings * self.u)

    def _stored(self, exact: Tensor, before: Tensor, kind: torch.dtype) -> Tensor:
        """An error before the result is rounded to its type, and that rounding.

        torch rounds float64 to 16 bits by way of float32.
        """
        before = without_nan(before)
        if kind == self.arithmetic:
            return before
        if self.arithmetic == torch.float64 and kind.itemsize == 2:
            before = before + 2.0**-24 * (exact.abs() + before)
        return before + spacing(exact.abs() + before, kind) / 2

    def _placed(self, error: Tensor, size: Tensor) -> Tensor:
        """The error, infinite where sums of terms of these sizes may have no place in the arithmetic."""
        return torch.where(size < self.most, error, torch.inf)

    def _preactivation(self, of: Inputs) -> tuple[Tensor, Tensor]:
        """z, and its error."""
        width = of.weight.shape[1]
        bias, state = (None if t is None else t.abs() for t in (of.bias, of.state))
        size = reference.preactivation(of.x.abs(), of.weight.abs(), bias, state, of.cu_seqlens)
        error = self._placed(self._gamma(width + 2) * size + self.tiny * width, size)
        return reference.preactivation(*of), error

    def y(self, of: Inputs) -> Tensor:
        z, error = self._preactivation(of)
        if not self.is_silu:
            return self._stored(z, error, self.element)
        exact = reference.silu(z)
        moved = 1.1 * error
        before = moved + self.silu * self.u * (exact.abs() + moved + self.tiny_silu) + self.tiny
        return self._stored(exact, before, self.element)

    def _upstream(self, of: Inputs, dy: Tensor) -> tuple[Tensor, Tensor]:
        """dz, and its error."""
        if not self.is_silu:
            return dy, torch.zeros_like(dy)
        z, error = self._preactivation(of)
        terms = torch.sigmoid(z) * (1 + z.abs() * torch.sigmoid(-z)) + error + self.tiny_silu
        relative = 0.5 * error + (self.slope + 2) * self.u * terms
        return dy * reference.silu_slope(z), dy.abs() * relative + self.tiny

    def gradients(self, of: Inputs, dy: Tensor, dfinal_state: Tensor | None) -> reference.Gradients:
        """The bounds of all gradients."""
        dz, error = self._upstream(of, dy)
        state = None if of.state is None else of.state.abs()
        sizes = (of.x.abs(), of.weight.abs(), state, of.cu_seqlens)
        exact = reference.adjoint(dz, of.x, of.weight, of.state, of.cu_seqlens, dfinal_state)
        dfinal = None if dfinal_state is None else dfinal_state.abs()
        terms = reference.adjoint(dz.abs() + error, *sizes, dfinal)
        errors = reference.adjoint(error, *sizes)
        width = of.weight.shape[1]
        near, sums = self._gamma(width + 2), self._gamma(self.chain + 2)
        kinds = (self.element, self.weight_type, self.bias_type, self.element)
        return reference.Gradients(*(
            self._stored(e, self._placed(moved + (sums if name in ("weight", "bias") else near) * size + self.tiny * (
                self.chain if name in ("weight", "bias") else width
            ) * (1 + size), size), kind)
            for name, e, moved, size, kind in zip(reference.Gradients._fields, exact, errors, terms, kinds, strict=True)
        ))  # fmt: skip


def words(name: str, arithmetic: torch.dtype) -> str:
    """A bound in words."""
    unit = f"u = 2^{-53 if arithmetic == torch.float64 else -24}, {short(arithmetic)}"
    sizes = {
        "y": "1.1·γ(W + 2)·(|bias| + Σ|w·x|) + silu·u·|y|",
        "dx": "Σ|w|·E(dz) + γ(W + 2)·Σ|w·dz|",
        "dweight": "Σ|x|·E(dz) + γ(K + 2)·Σ|dz·x|, K the additions that the number of tokens fixes",
        "dbias": "ΣE(dz) + γ(K + 2)·Σ|dz|, K the additions that the number of tokens fixes",
    }
    return f"½ ulp + {sizes.get(name, sizes['dx'])}, {unit}: docs/conv.md"
