"""How far the activations may be from the exact results: docs/activation.md derives the constants.

silu of a 16-bit number has a stated error in units in the last place, because all numbers were tried. All other results
are products of two or three numbers, which are too many to try. Their bounds have an error before the result is
rounded, and that rounding.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.ops.activation import reference
from adjoint.ops.activation.in_float32 import LOWEST

ULP: Mapping[str, Mapping[torch.dtype, float]] = {
    "float64": {torch.bfloat16: 0.501, torch.float16: 0.501},
    "nvidia": {torch.bfloat16: 0.502, torch.float16: 0.501},
    "portable": {torch.bfloat16: 0.502, torch.float16: 0.501},
}
"""The largest error of silu in units in the last place, over every 16-bit number, by arithmetic and dtype.

torch's float32 is not among them, because it gives 0 for some bfloat16 numbers whose silu is not 0.
"""


class Arithmetic(NamedTuple):
    """The errors of an arithmetic before the result is rounded.

    Attributes:
        dtype: the type of the arithmetic. u is half of its eps, η its smallest number, and ν its smallest normal one.
        value: the error of silu(gate)·factor in units u of its size.
        slope: the error of dy·up·silu'(gate) in units u of the sizes of its terms, |dy·up|·(σ + |gate|·σ·(1 − σ)).
        lowest: for gates below this, silu and its slope may count as 0.
        growth: the further units u of value and slope for each unit by which a gate is below 0.
        underflow: the number of η that silu(gate)·factor may lose by underflow.
        by_torch: whether dy·σ(gate) and dy·silu'(gate) are computed before the product with up. Otherwise half
            exponentials are multiplied into dy and into up first.
        rounds_between: whether silu(gate) and dy·silu'(gate) are rounded to the storage type before they are
            multiplied.
        multiplies_first: whether it is dy·up that is rounded so, and multiplied by silu'(gate) then.
        takes_infinities: whether there is a promise for infinite gates.
    """

    dtype: torch.dtype
    value: int
    slope: int
    lowest: float
    growth: int = 0
    underflow: int = 2
    by_torch: bool = False
    rounds_between: bool = False
    multiplies_first: bool = False
    takes_infinities: bool = True

    @property
    def is_cut_off(self) -> bool:
        """Whether a promise mentions `lowest`. Torch's float64 does not need it for its storage types."""
        return not (self.by_torch and self.dtype == torch.float64)


def arithmetic(name: str, dtype: torch.dtype) -> Arithmetic:
    """The errors of an arithmetic ("float64", "float32", "nvidia" or "portable") for a storage type."""
    if dtype == torch.float64:
        return Arithmetic(torch.float64, 40, 80, lowest=-1416.0)
    if name == "float64":
        return Arithmetic(torch.float64, 40, 80, lowest=-708.0, by_torch=True)
    if name == "float32":
        rounds_between = dtype != torch.float32
        return Arithmetic(
            torch.float32, 16, 64, lowest=LOWEST, by_torch=True, rounds_between=rounds_between,
            multiplies_first=dtype == torch.float16, takes_infinities=False,
        )  # fmt: skip
    if dtype == torch.float32:
        return Arithmetic(torch.float32, 40, 80, lowest=-174.0)
    return Arithmetic(torch.float32, 24, 48, lowest=-174.0, growth=2, underflow=400)


class Bounds:
    """Bounds of the errors of an arithmetic's results in a storage type, as functions of the exact arguments in
    float64."""

    def __init__(self, used: Arithmetic, dtype: torch.dtype) -> None:
        info = torch.finfo(used.dtype)
        self.used, self.dtype = used, dtype
        self.unit, self.tiny, self.normal = info.eps / 2, info.smallest_normal * info.eps, info.smallest_normal
        between = torch.finfo(dtype) if used.rounds_between else info
        self.most = min(info.max, between.max) / 2  # of dy, whose product with a slope of up to 1.1 may not overflow

    def value(self, gate: Tensor, factor: Tensor | None) -> Tensor:
        """The bound of silu(gate)·factor. Every operation rounds once, and silu underflows for gates near 0."""
        silu = reference.silu(gate)
        error = self._relative(self.used.value, gate) * silu.abs()
        lost = self.used.underflow + torch.where(gate.abs() < 4 * self.normal, _size(factor), 0.0)
        if self.dtype == torch.float64:  # the silu of the reference underflows where ours does not
            lost = 2 + gate.abs() + _size(factor)
        return self._rounded(gate, silu, error, factor, self.tiny * lost + self._of_reference(gate, _size(factor), 1.0))

    def slope(self, dy: Tensor, gate: Tensor, up: Tensor | None) -> Tensor:
        """The bound of dy·up·silu'(gate). silu' has a root, so the error is relative to the sizes of its terms."""
        sigma, slope = reference.sigmoid(gate), reference.silu_slope(gate)
        terms = sigma + gate.abs().clamp_max(1e300) * sigma * reference.sigmoid(-gate)  # σ at infinite gates
        error = self._relative(self.used.slope, gate) * terms
        lost = self._lost(dy.abs(), _size(up), gate, torch.minimum(sigma, slope.abs() - error), terms)
        lost = self.tiny * lost + self._of_reference(gate, dy.abs(), _size(up))
        if up is not None and self.used.multiplies_first:
            product = dy * up  # where it overflows, it is not rounded
            rounding = spacing(product.abs().clamp_max(torch.finfo(self.dtype).max), self.dtype) / 2
            error = error * (product.abs() + rounding) + slope.abs() * rounding
            bound = self._rounded(gate, product * slope, error, None, lost)
        else:
            bound = self._rounded(gate, dy * slope, error * dy.abs(), up, lost)
        return torch.where(dy.abs() <= self.most, bound, torch.inf) if self.used.by_torch else bound

    def _of_reference(self, gate: Tensor, first: Tensor | float, second: Tensor | float) -> Tensor | float:
        """The error of the reference itself, in float64, where its σ is subnormal: η·(2 + |gate|)·first·second.

        Neither factor is multiplied by η alone, because that would round the factor.
        """
        if self.dtype != torch.float64:
            return 0.0
        half = self.tiny**0.5
        product = (2 + gate.abs().clamp_max(2048)) * (first * half + self.tiny) * (second * half + self.tiny)
        return torch.where(gate < -708, product, 0.0)

    def _lost(self, dy: Tensor, up: Tensor | float, gate: Tensor, least: Tensor, terms: Tensor) -> Tensor:
        """The number of η that the products of a slope lose by underflow. The loss of one is multiplied by the other.

        `least` is a lower bound of every number by which a factor is multiplied.
        """
        if self.dtype == torch.float64:  # as above
            return 2 + 4 * dy + 4 * up
        if self.used.multiplies_first and isinstance(up, Tensor):  # dy·up first or, where that overflows, dy
            least, up = least * up.clamp_max(1), up.clamp_min(1)
        if self.used.by_torch:
            return 4 + torch.where(dy * least < 2 * self.normal, 48 * up, 0.0)
        half = (gate.clamp_max(0) / 2).exp().clamp_min(self.normal)
        first = torch.where(dy * half < 2 * self.normal, up * terms / half, 0.0)
        second = torch.where(up * least / half < 4 * self.normal, dy * half, 0.0)
        return 4 + first + second

    def _relative(self, units: int, gate: Tensor) -> Tensor:
        errors = (units + self.used.growth * gate.clamp_max(0).abs()) * self.unit
        return torch.where(gate < self.used.lowest, 1.0, errors)

    def _rounded(self, gate: Tensor, value: Tensor, error: Tensor, factor: Tensor | None, lost: Tensor) -> Tensor:
        """The error of value·factor, or of the value alone, including the roundings to the storage type.

        Torch rounds float64 to 16-bit types through float32.
        """
        if factor is not None and self.used.rounds_between:
            error = error + spacing(value.abs() + error, self.dtype) / 2
        exact, error = (value * _size(factor)).abs(), error * _size(factor) + lost
        through = (torch.float32,) if self.used.dtype == torch.float64 and self.dtype.itemsize == 2 else ()
        for kind in (*through, self.dtype) if self.dtype != self.used.dtype else ():
            error = error + spacing(exact + error, kind) / 2
        return error if self.used.takes_infinities else torch.where(gate.isinf(), torch.inf, error)


def _size(factor: Tensor | None) -> Tensor | float:
    return 1.0 if factor is None else factor.abs()


def in_words(used: Arithmetic, dtype: torch.dtype, kind: str, has_up: bool) -> str:
    """The bound of an output in words. `kind` is "y", "dgate" or "dup"."""
    x = "gate" if has_up else "x"
    value, factor = {"y": (f"silu({x})", "up"), "dup": (f"silu({x})", "dy"), "dgate": (f"dy·silu'({x})", "up")}[kind]
    has_factor = has_up or kind == "dup"
    units = used.slope if kind == "dgate" else used.value
    relative = f"({units} + {used.growth}·max(−{x}, 0))·u" if used.growth else f"{units}·u"
    if kind == "dgate":
        size, lost = f"|{'dy·up' if has_up else 'dy'}|·(σ + |{x}|·σ·(1−σ))", "4 + L"
    else:
        size = f"|{value}{f'·{factor}' * has_factor}|"
        lost = f"{used.underflow} + {f'|{factor}|' if has_factor else 1}·[|{x}| < 4ν]"
    if dtype == torch.float64:
        lost = (
            f"2 + 4·|dy| + 4{'·|up|' * has_up}" if kind == "dgate" else f"2 + |{x}| + {f'|{factor}|' * has_factor or 1}"
        )
        factors = ("·|dy·up|" if has_up else "·|dy|") if kind == "dgate" else f"·|{factor}|" * has_factor
        lost += f" + (2 + |{x}|){factors}·[{x} < −708]"
    parts = [f"{relative}·{size}", f"η·({lost})"]
    if has_factor and used.rounds_between:
        first, second = ("dy·up", f"silu'({x})") if kind == "dgate" and used.multiplies_first else (value, factor)
        parts.insert(0, f"½ ulp({first})·|{second}|")
    if dtype != used.dtype:
        through = " + ½ ulp of float32" if used.dtype == torch.float64 and dtype.itemsize == 2 else ""
        parts.insert(0, f"½ ulp{through}")
    below = f", all of it for {x} < −{-used.lowest:g}" if used.is_cut_off else ""
    exponents = "u = 2⁻⁵³, η = 2⁻¹⁰⁷⁴" if used.dtype == torch.float64 else "u = 2⁻²⁴, η = 2⁻¹⁴⁹"
    where = (
        ", L as in docs/activation.md"
        if kind == "dgate"
        else f", ν = 2⁻{'¹⁰²²' if used.dtype == torch.float64 else '¹²⁶'}"
    )
    return f"{' + '.join(parts)}{below}, {exponents}{where * (dtype != torch.float64)}"
