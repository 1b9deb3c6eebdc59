"""How far x·σ(gate) and its gradients may be from the exact results: docs/activation.md derives the constants."""

import torch
from torch import Tensor

from adjoint.ops.activation import reference
from adjoint.ops.activation.bounds import Arithmetic, Bounds
from adjoint.ops.activation.in_float32 import LOWEST


def arithmetic(name: str, dtype: torch.dtype) -> Arithmetic:
    """The errors of an arithmetic, a key of `bounds.ULP`, for a storage type. `slope` is relative to the result."""
    if dtype == torch.float64:
        return Arithmetic(torch.float64, 40, 80, lowest=-1416.0)
    if name == "float64":
        return Arithmetic(torch.float64, 40, 80, lowest=-708.0, by_torch=True)
    if name == "float32":
        return Arithmetic(torch.float32, 16, 24, lowest=LOWEST, by_torch=True)
    if dtype == torch.float32:
        return Arithmetic(torch.float32, 40, 80, lowest=-174.0)
    return Arithmetic(torch.float32, 24, 48, lowest=-174.0, growth=2)


_ROUNDED = 1 + 2.0**-50
"""Room for the roundings of the bound itself, which is evaluated in float64."""


class SigmoidBounds(Bounds):
    """Bounds of σ(gate)·factor and dy·x·σ'(gate). Neither σ nor its slope has a root, and the slope is even."""

    def value(self, gate: Tensor, factor: Tensor | None) -> Tensor:
        assert factor is not None
        sigmoid = reference.sigmoid(gate)
        error = self._relative(self.used.value, gate) * sigmoid * _ROUNDED
        # In float64 the σ of the reference underflows where ours does not.
        lost = self.used.underflow + (factor.abs() if self.dtype == torch.float64 else torch.zeros_like(factor))
        return self._rounded(gate, sigmoid, error, factor, self.tiny * lost)

    def slope(self, dy: Tensor, gate: Tensor, up: Tensor | None) -> Tensor:
        assert up is not None
        below, x = -gate.abs(), up.abs()
        slope = reference.sigmoid(gate) * reference.sigmoid(-gate)
        error = self._relative(self.used.slope, below) * slope * _ROUNDED
        if self.dtype == torch.float64:
            lost = 4 + dy.abs() + x + (dy * up).abs()
        else:
            lost = self._lost(dy.abs(), x, below, slope, slope)
        return self._rounded(below, dy * slope, error * dy.abs(), up, self.tiny * lost)


def in_words(used: Arithmetic, dtype: torch.dtype, output: str) -> str:
    """The bound of an output in words. `output` is "y", "dx" or "dgate"."""
    is_slope = output == "dgate"
    factor = "x" if output == "y" else "dy"
    size = "|dy·x|·σ·(1−σ)" if is_slope else f"|{factor}|·σ"
    units, below = (used.slope, "|gate|") if is_slope else (used.value, "max(−gate, 0)")
    relative = f"({units} + {used.growth}·{below})·u" if used.growth else f"{units}·u"
    lost = "4 + L" if is_slope else f"{used.underflow}"
    if dtype == torch.float64:
        lost = "4 + |dy| + |x| + |dy·x|" if is_slope else f"2 + |{factor}|"
    parts = [f"{relative}·{size}", f"η·({lost})" if " " in lost else f"{lost}·η"]
    if dtype != used.dtype:
        through = " + ½ ulp of float32" if used.dtype == torch.float64 and dtype.itemsize == 2 else ""
        parts.insert(0, f"½ ulp{through}")
    far = f"|gate| > {-used.lowest:g}" if is_slope else f"gate < −{-used.lowest:g}"
    where = f", all of it for {far}" * used.is_cut_off
    exponents = "u = 2⁻⁵³, η = 2⁻¹⁰⁷⁴" if used.dtype == torch.float64 else "u = 2⁻²⁴, η = 2⁻¹⁴⁹"
    return f"{' + '.join(parts)}{where}, {exponents}{', L as in docs/activation.md' * ('L' in lost)}"
