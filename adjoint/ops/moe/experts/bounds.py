"""How far the expert layer may be from the exact one, evaluated in float64 for the very inputs: see docs/experts.md.

Every number has a bound of its own. The error of a product has the errors of its operands and that of its sum. A number
that is rounded to 16 bits on the way has a further error of half a unit in the last place. What may overflow on the
way, and all that it reaches, has an infinite bound.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import overflow_threshold, spacing
from adjoint.core.problem import wide_dtype

SECOND_ORDER = 1.01
"""A factor that bounds what products of two small errors add to single errors."""

SILU = {True: (24, 48, 2), False: (40, 80, 0)}
"""The errors of silu and of its slope, in units u of the sizes of their terms, and their growth for each unit by which
a gate is below 0. The key says whether the type has 16 bits."""

SMALLEST_NORMAL = {torch.float32: 2.0**-126, torch.float64: 2.0**-1022}


class Value(NamedTuple):
    """Exact numbers, and how far the computed numbers may be from them."""

    exact: Tensor
    error: Tensor

    @property
    def size(self) -> Tensor:
        """The largest magnitudes that the computed numbers may have."""
        return self.exact.abs() + self.error


class Rows(NamedTuple):
    """The rows of an expert: their tokens and slots, routing weights, and values with the errors of a plan."""

    token: Tensor
    slot: Tensor
    weight: Tensor
    gate: Value
    up: Value
    silu: Value
    hidden: Value


class Bounds:
    """Bounds of the results of a layer.

    Args:
        element, weight: the types of the layer and of its routing weights.
        rounds_dh: whether the gradient of the hidden values is rounded to 16 bits as well.
    """

    def __init__(self, element: torch.dtype, weight: torch.dtype, rounds_dh: bool) -> None:
        self.element, self.weight, self.wide, self.rounds_dh = element, weight, wide_dtype(element), rounds_dh
        # The exact results of float64 are themselves computed in float64.
        self.u = torch.finfo(self.wide).eps / 2 * (2 if element == torch.float64 else 1)
        self.silu, self.slope, self.growth = SILU[element.itemsize == 2]
        self.tiny = SMALLEST_NORMAL[self.wide]  # the most that a number may lose by underflow
        self.largest = torch.finfo(self.wide).max

    # ------------------------------------------------------------------------------------------- steps

    def stored(self, value: Value, kind: torch.dtype | None = None) -> Value:
        """A value rounded to the type of the layer, or to `kind`. The type of the sums needs no rounding."""
        kind = kind or self.element
        if kind == self.wide:
            return value
        return value._replace(error=value.error + spacing(value.size, kind) / 2)

    def kept(self, value: Value) -> Value:
        """Rounded on the way to a result: what may have become infinite may be off by anything."""
        return _in_range(self.stored(value), value.size, overflow_threshold(self.element))

    def product(self, left: Value, right: Tensor) -> Value:
        """left · right, [m, n] · [n, p], where right is exact.

        The sum may have any order, and matrix instructions truncate it. They may also take numbers below the smallest
        normal number for 0.
        """
        share = SECOND_ORDER * 2 * (right.shape[0] + 4) * self.u
        size = right.abs()
        underflow = self.tiny * (1 + size.sum(0) + left.size.sum(1, keepdim=True))
        error = left.error @ size + share * (left.size @ size) + underflow
        return _in_range(Value(left.exact @ right, error), left.size @ size, self.largest)

    def times(self, *factors: Value, roundings: int = 1) -> Value:
        """The product of values, with a rounding for each operation. Underflows are multiplied by the other factors."""
        exact, size, most = factors[0].exact, factors[0].size, factors[0].size
        some = size.clamp_min(1)  # the largest product of some of them, which are multiplied in any order
        for factor in factors[1:]:
            exact, size, most = exact * factor.exact, size * factor.size, torch.maximum(most, factor.size)
            some = some * factor.size.clamp_min(1)
        error = size - exact.abs() + SECOND_ORDER * (len(factors) + roundings) * self.u * size
        # The difference of two nearly equal float64 numbers has an error as large as their roundings.
        error = error.clamp_min(0) + 2.0**-50 * size + self.tiny * (1 + most) ** (len(factors) - 1)
        return _in_range(Value(exact, error), some, self.largest)

    def _of_gate(self, gate: Value) -> tuple[Value, Value]:
        """silu and its slope of a gate, where |silu'| ≤ 1.1 and |silu''| ≤ ½ everywhere."""
        g, error = gate
        sigma = torch.sigmoid(g)
        silu, slope = g * sigma, sigma * (1 + g * torch.sigmoid(-g))
        terms = sigma * (1 + g.abs() * torch.sigmoid(-g)) + error
        grown = self.growth * (error - g.clamp_max(0)).clamp_max(174.0)
        of_silu = 1.1 * error
        of_silu = of_silu + (self.silu + grown) * self.u * (silu.abs() + of_silu) + 2 * self.tiny
        of_slope = 0.5 * error + (self.slope + grown) * self.u * terms + 2 * self.tiny
        return Value(silu, of_silu), Value(slope, of_slope)

    def _rows(self, x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor, expert: int) -> Rows:
        token, slot = (indices == expert).nonzero(as_tuple=True)
        both = self.kept(self.product(_exact(x[token]), gate_up[expert].T))
        inner = down.shape[2]
        gate, up = (Value(*(part[:, piece] for part in both)) for piece in (slice(inner), slice(inner, None)))
        silu, _ = self._of_gate(gate)
        return Rows(token, slot, weights[token, slot][:, None], gate, up, silu, self.times(silu, up))

    def _sum_of_slots(self, terms: list[tuple[Tensor, Value]], like: Tensor, slots: int) -> Value:
        """Adds up rows by token, one slot after the other."""
        exact, error, size = (torch.zeros_like(like) for _ in range(3))
        for token, rows in terms:
            exact.index_add_(0, token, rows.exact)
            error.index_add_(0, token, rows.error)
            size.index_add_(0, token, rows.size)
        error = error + SECOND_ORDER * (slots + 1) * self.u * size + self.tiny
        return _in_range(Value(exact, error), size, self.largest)

    # ----------------------------------------------------------------------------------------- results

    def y(self, x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        terms = []
        for expert in range(down.shape[0]):
            rows = self._rows(x, gate_up, down, indices, weights, expert)
            result = self.kept(self.product(self.kept(rows.hidden), down[expert].T))
            terms.append((rows.token, self.times(result, _exact(rows.weight))))
        return self.stored(self._sum_of_slots(terms, x, indices.shape[1])).error

    def gradient(
        self, name: str, dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor
    ) -> Tensor:
        """The bound of dx, dgate_up, ddown or dweights."""
        inputs = {"dx": x, "dgate_up": gate_up, "ddown": down, "dweights": weights}
        bound, terms = torch.zeros_like(inputs[name]), []
        for expert in range(down.shape[0]):
            rows = self._rows(x, gate_up, down, indices, weights, expert)
            upstream = dy[rows.token]
            if name == "ddown":
                scaled = self.kept(self.times(rows.hidden, _exact(rows.weight)))
                bound[expert] = self.stored(_transposed(self.product(_transposed(scaled), upstream))).error
                continue
            dh = self.product(_exact(upstream), down[expert])
            dh = self.kept(dh) if self.rounds_dh else dh
            if name == "dweights":
                products = self.times(rows.hidden, dh)
                share = SECOND_ORDER * (down.shape[2] + 4) * self.u
                error = products.error.sum(1) + share * products.size.sum(1) + self.tiny
                total = _in_range(Value(products.exact.sum(1), error), products.size.sum(1), self.largest)
                bound[rows.token, rows.slot] = self.stored(total, self.weight).error
                continue
            both = self._through_gate(rows, dh)
            if name == "dx":
                terms.append((rows.token, self.kept(self.product(both, gate_up[expert]))))
            else:
                bound[expert] = self.stored(self.product(_transposed(both), x[rows.token])).error
        return self.stored(self._sum_of_slots(terms, x, indices.shape[1])).error if name == "dx" else bound

    def _through_gate(self, rows: Rows, dh: Value) -> Value:
        """The rounded gradients of g and u, side by side."""
        _, slope = self._of_gate(rows.gate)
        weight = _exact(rows.weight)
        of_gate = self.times(dh, weight, rows.up, slope, roundings=4)
        of_up = self.times(dh, weight, rows.silu, roundings=3)
        return self.kept(Value(*(torch.cat(pair, 1) for pair in zip(of_gate, of_up, strict=True))))


def _in_range(value: Value, size: Tensor, largest: float) -> Value:
    """A value whose error is unknown where what it is made of may be larger than the largest number."""
    return value._replace(error=torch.where(size < largest, value.error, torch.inf))  # NaN is not smaller either


def _exact(tensor: Tensor) -> Value:
    return Value(tensor, torch.zeros_like(tensor))


def _transposed(value: Value) -> Value:
    return Value(value.exact.T, value.error.T)


def in_words(element: torch.dtype, rounds_dh: bool) -> str:
    """The bound of every output in words."""
    rounded = "g, u, h, dg, du" + (", dh" if rounds_dh else "") + " and each row's result rounded"
    sums = "sums off by 2·(n + 4)·u of the sizes of their n terms"
    unit = "u = 2⁻⁵³, twice" if element == torch.float64 else "u = 2⁻²⁴"
    return f"{f'½ ulp, {rounded}, ' if element.itemsize == 2 else ''}{sums}, {unit}, carried from product to product"
