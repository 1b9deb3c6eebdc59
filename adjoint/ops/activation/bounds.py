"""How far the activations may be from the exact results: docs/activation.md derives the constants.

silu of a 16-bit number has a stated error in units in the last place: every number was tried. Everything else is a
product of two or three numbers, too many to try: an error before the result is rounded, and that rounding.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.ops.activation import reference

ULP: Mapping[str, Mapping[torch.dtype, float]] = {
    "float64": {torch.bfloat16: 0.501, torch.float16: 0.501},
    "float32": {torch.bfloat16: 0.501, torch.float16: 0.505},
    "nvidia": {torch.bfloat16: 0.502, torch.float16: 0.501},
    "portable": {torch.bfloat16: 0.502, torch.float16: 0.501},
}
"""The largest error of silu in units in the last place, over every 16-bit number, by arithmetic and dtype."""


class Arithmetic(NamedTuple):
    """What an arithmetic costs before the result is rounded.

    Attributes:
        dtype: the type it runs in; u is half of its eps, η its smallest number.
        value: the error of silu(gate)·factor in units u of its size.
        slope: the error of dy·up·silu'(gate) in units u of its terms' sizes, |dy·up|·(σ + |gate|·σ·(1 − σ)).
        growth: units u more, of both, for each unit by which a gate is below 0.
        value_underflow: numbers η that silu(gate)·factor may lose on the way.
        slope_underflow: numbers η, times |up|, that dy·up·silu'(gate) may lose on the way.
        lowest: silu and its slope may count as 0 for gates below.
        rounds_between: silu(gate) and dy·silu'(gate) are rounded to the storage type before they are multiplied.
    """

    dtype: torch.dtype
    value: int
    slope: int
    growth: int = 0
    value_underflow: int = 2
    slope_underflow: int = 4
    lowest: float = -math.inf
    rounds_between: bool = False


def arithmetic(name: str, dtype: torch.dtype) -> Arithmetic:
    """What an arithmetic, by its key in `ULP`, costs for a storage type."""
    if name == "float64" or dtype == torch.float64:
        return Arithmetic(torch.float64, 40, 80)
    if name == "float32":
        return Arithmetic(torch.float32, 16, 64, slope_underflow=48, rounds_between=dtype != torch.float32)
    if dtype == torch.float32:
        return Arithmetic(torch.float32, 40, 80, lowest=-174.0)
    return Arithmetic(torch.float32, 24, 48, growth=2, value_underflow=400, lowest=-174.0)


class Bounds:
    """The errors of an arithmetic's results in a storage type: functions of the exact arguments, in float64."""

    def __init__(self, used: Arithmetic, dtype: torch.dtype) -> None:
        info = torch.finfo(used.dtype)
        self.used, self.dtype = used, dtype
        self.unit, self.tiny = info.eps / 2, info.smallest_normal * info.eps

    def value(self, gate: Tensor, factor: Tensor | None) -> Tensor:
        """For silu(gate)·factor: every operation rounds once, products may underflow."""
        silu, size = reference.silu(gate), _size(factor)
        error = self._relative(self.used.value, gate) * silu.abs()
        lost = self.used.value_underflow + gate.abs() + size
        return self._rounded(silu, error, factor, self.tiny * lost)

    def slope(self, dy: Tensor, gate: Tensor, up: Tensor | None) -> Tensor:
        """For dy·up·silu'(gate): silu' has a root, so the error is relative to the sizes of its terms."""
        sigma, size = reference.sigmoid(gate), _size(up)
        terms = sigma + gate.abs().clamp_max(1e300) * sigma * reference.sigmoid(-gate)  # 0 at infinite gates
        error = self._relative(self.used.slope, gate) * terms * dy.abs()
        lost = 2 + 4 * dy.abs() + self.used.slope_underflow * size
        return self._rounded(dy * reference.silu_slope(gate), error, up, self.tiny * lost)

    def _relative(self, units: int, gate: Tensor) -> Tensor:
        errors = (units + self.used.growth * gate.clamp_max(0).abs()) * self.unit
        return torch.where(gate < self.used.lowest, 1.0, errors)

    def _rounded(self, value: Tensor, error: Tensor, factor: Tensor | None, lost: Tensor) -> Tensor:
        """The error of value·factor, or of the value alone, with the roundings to the storage type.

        torch rounds float64 to 16 bits by way of float32.
        """
        if factor is not None and self.used.rounds_between:
            error = error + spacing(value.abs() + error, self.dtype) / 2
        exact, error = (value * _size(factor)).abs(), error * _size(factor) + lost
        through = (torch.float32,) if self.used.dtype == torch.float64 and self.dtype.itemsize == 2 else ()
        for kind in (*through, self.dtype) if self.dtype != self.used.dtype else ():
            error = error + spacing(exact + error, kind) / 2
        return error


def _size(factor: Tensor | None) -> Tensor | float:
    return 1.0 if factor is None else factor.abs()


def in_words(used: Arithmetic, dtype: torch.dtype, kind: str, has_up: bool) -> str:
    """The bound of an output of a kind: "y", "dgate" or "dup"."""
    x = "gate" if has_up else "x"
    value, factor = {"y": (f"silu({x})", "up"), "dup": (f"silu({x})", "dy"), "dgate": (f"dy·silu'({x})", "up")}[kind]
    has_factor = has_up or kind == "dup"
    units = used.slope if kind == "dgate" else used.value
    relative = f"({units} + {used.growth}·max(−{x}, 0))·u" if used.growth else f"{units}·u"
    if kind == "dgate":
        size = f"|{'dy·up' if has_up else 'dy'}|·(σ + |{x}|·σ·(1−σ))"
        lost = f"2 + 4·|dy| + {used.slope_underflow}{'·|up|' * has_up}"
    else:
        size = f"|{value}{f'·{factor}' * has_factor}|"
        lost = f"{used.value_underflow} + |{x}| + {f'|{factor}|' if has_factor else 1}"
    parts = [f"{relative}·{size}", f"η·({lost})"]
    if has_factor and used.rounds_between:
        parts.insert(0, f"½ ulp({value})·|{factor}|")
    if dtype != used.dtype:
        through = " + ½ ulp of float32" if used.dtype == torch.float64 and dtype.itemsize == 2 else ""
        parts.insert(0, f"½ ulp{through}")
    below = f", all of it for {x} < {used.lowest:g}".replace("-", "−") if used.lowest > -math.inf else ""
    exponents = "u = 2⁻⁵³, η = 2⁻¹⁰⁷⁴" if used.dtype == torch.float64 else "u = 2⁻²⁴, η = 2⁻¹⁴⁹"
    return f"{' + '.join(parts)}{below}, {exponents}"
