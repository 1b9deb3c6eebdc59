"""What an output promises, as data, and how a promise about error is measured.

A guarantee has independent flags about bits, facts about the arithmetic, and one statement about error, of a named
kind:

- `Enumerated`: every input, a 16-bit number, was tried; the largest error in units in the last place.
- `Derived`: a theorem in the docs; its bound is evaluated in float64 for the very inputs of the call.
- `Empirical`: a norm-relative ceiling recorded on named cases.

A guarantee may also have a `recorded` ceiling, which promises nothing. The op's own cases stay below it. A promise for
every input has room for a regression; the ceiling notices it.

Each kind measures an output against the exact result by `measure`, which tests and `adjoint verify` share. A tolerance
that appears in no guarantee appears in no test.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class Measurement:
    """A measured error, the limit that its guarantee states, and the unit of both.

    `expected` is the norm of the error over the norm of the expected error; None where there is no model of the
    roundings.
    """

    value: float
    limit: float
    unit: str
    expected: float | None = None

    @property
    def holds(self) -> bool:
        return self.value <= self.limit  # False for NaN

    def __str__(self) -> str:
        beside = "" if self.expected is None else f", {self.expected:.2f} of what is expected"
        return f"{self.value:.4g} {self.unit} (limit {self.limit:.4g}){beside}"


class Figures(NamedTuple):
    """The norm of an output's bound for some inputs, and the norm of its expected error.

    `expected` is None where there is no model of the roundings.
    """

    bound: float
    expected: float | None

    def __str__(self) -> str:
        return f"at most {self.bound:.2g}" + ("" if self.expected is None else f", about {self.expected:.2g} expected")


@dataclass(frozen=True)
class Enumerated:
    """The largest error, in units in the last place of the output, over every input there is."""

    max_ulp: float
    over: str
    kind: ClassVar[str] = "enumerated"

    def measure(self, output: Tensor, exact: Tensor, *inputs: Tensor) -> Measurement:
        return Measurement(_largest(error_in_ulp(output, exact)), self.max_ulp, "ulp")

    def __str__(self) -> str:
        return f"≤ {self.max_ulp:g} ulp, enumerated over {self.over}"


@dataclass(frozen=True)
class Derived:
    """A running-error bound: `bound(*inputs)` gives, in float64, the largest error of each element.

    `inputs` are those of the reference, in its order. An output that overflows counts as the number after the largest
    one, to which it would be rounded if that number existed. The bound is infinite outside of its domain, and promises
    nothing there. With `axes`, the bound is on the norm of the error along that many last axes, such as those of a
    token's vector, and its own axes are the remaining ones. Where there is a model of the roundings,
    `expected(*inputs)` gives, for each bound, the expected root mean square of the error. It is no promise.
    """

    formula: str
    bound: Callable[..., Tensor]
    axes: int = 0
    expected: Callable[..., Tensor] | None = None
    kind: ClassVar[str] = "derived"

    @property
    def is_zero(self) -> bool:
        """Whether it says that there is no error: "0: bytes are copied"."""
        return self.formula.partition(":")[0] == "0"

    def measure(self, output: Tensor, exact: Tensor, *inputs: Tensor) -> Measurement:
        bound = self.bound(*inputs)
        error = rounding_error(output, exact)
        if self.axes:
            error = norm_of(error, self.axes)
        share = torch.where((error == 0) | bound.isposinf(), 0.0, error / bound)
        return Measurement(_largest(share), 1.0, "of the bound", self._of_expected(error, *inputs))

    def _of_expected(self, error: Tensor, *inputs: Tensor) -> float | None:
        if self.expected is None or not error.numel():
            return None
        expected = float(self.expected(*inputs).norm())
        return float(error.norm()) / expected if expected else None

    def figures(self, *inputs: Tensor | None) -> Figures:
        """The norm of the bound and that of the expected error, for the reference's inputs in any floating type."""
        wide = [x.double() if x is not None and x.is_floating_point() else x for x in inputs]
        with torch.no_grad():
            expected = None if self.expected is None else float(self.expected(*wide).norm())
            return Figures(float(self.bound(*wide).norm()), expected)

    def __str__(self) -> str:
        return f"≤ {self.formula}, derived"


@dataclass(frozen=True)
class Empirical:
    """A ceiling on ‖output − exact‖ / ‖exact‖, recorded on named cases.

    With a `floor`, the norm of the exact result counts at least as much as if all of its elements were that large. It
    is for types that lose digits below it.
    """

    ceiling: float
    cases: str
    floor: float = 0.0
    kind: ClassVar[str] = "empirical"

    def measure(self, output: Tensor, exact: Tensor, *inputs: Tensor) -> Measurement:
        error = absolute_error(output, exact).norm()
        scale = exact.double().norm().clamp_min(self.floor * exact.numel() ** 0.5)
        relative = float(error / scale) if scale > 0 else float(error)
        return Measurement(relative, self.ceiling, "relative")

    def __str__(self) -> str:
        smaller = f", or to elements of {self.floor:g} where they are smaller" if self.floor else ""
        return f"≤ {self.ceiling:g} relative{smaller}, recorded on {self.cases}"


class EvaluatedOnce:
    """A function of tensors whose results the bounds of several outputs share: it runs once for the same tensors.

    It runs again where somebody has written to one of them since, and forgets its results when one of them is gone.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._last: tuple[list[Any], Any] | None = None

    def __call__(self, *inputs: Tensor | None) -> Any:
        last = self._last  # read once, as other threads may replace it
        if last is not None and _are_now(inputs, last[0]):
            return last[1]
        states = [None if x is None else (weakref.ref(x, self._forget), _version(x)) for x in inputs]
        with torch.no_grad():
            results = self._function(*inputs)
        self._last = states, results
        return results

    def _forget(self, gone: Any) -> None:
        self._last = None


def _are_now(inputs: Sequence[Tensor | None], states: Sequence[Any]) -> bool:
    """Whether inputs are the tensors whose states were noted, and nobody has written to them since."""
    return len(inputs) == len(states) and all(
        state is None if x is None else state is not None and state[0]() is x and state[1] == _version(x) is not None
        for x, state in zip(inputs, states, strict=True)
    )


def _version(tensor: Tensor) -> int | None:
    """How often a tensor was written to; None where torch does not count."""
    return None if tensor.is_inference() else tensor._version


ErrorStatement = Enumerated | Derived | Empirical


@dataclass(frozen=True)
class Guarantee:
    """What one output of one plan promises. A flag that is not set promises nothing.

    Attributes:
        repeatable: same inputs, same device, same bits; on the CPU with the same number of threads.
        batch_invariant: the item (an element, a row, a token) whose bits do not depend on the rest of its batch, on its
            alignment or on its strides; empty when not promised.
        prefix_invariant: the bits at a position depend only on that position and earlier ones.
        device_invariant: IEEE operations in an order fixed by the indices: the same bits everywhere.
        accumulator: the type of the arithmetic.
        roundings: the number of roundings to the storage type between input and output.
        error: how far the output may be from the exact result.
        recorded: a ceiling on the error on the op's cases; no promise for other inputs. None where it would say no more
            than `error`.
        domain: the inputs for which all of this holds.
        special_values: what infinities, NaN and signed zeros give.
        out_of_range: what an index out of range gives, for ops that take indices.
        ties: how equal candidates are ordered, for ops that select.
    """

    repeatable: bool
    batch_invariant: str
    device_invariant: bool
    accumulator: str
    roundings: int
    error: ErrorStatement
    prefix_invariant: bool = False
    domain: str = "every input"
    special_values: str = ""
    out_of_range: str = ""
    ties: str = ""
    recorded: Empirical | None = None

    @property
    def flags(self) -> str:
        """The promises about bits, in words; "none" when there are none."""
        named = [name for name in ("repeatable", "prefix_invariant", "device_invariant") if getattr(self, name)]
        if self.batch_invariant:
            named.insert(1 if self.repeatable else 0, f"batch_invariant({self.batch_invariant})")
        return ", ".join(named) or "none"

    def __str__(self) -> str:
        lines = [
            f"bits: {self.flags}",
            f"arithmetic: {self.accumulator}, {self.roundings} rounding{'s' if self.roundings != 1 else ''}",
            f"error: {self.error}",
        ]
        if self.recorded is not None:
            lines.append(f"recorded: {self.recorded}")
        lines.append(f"domain: {self.domain}")
        for name in ("special_values", "out_of_range", "ties"):
            if getattr(self, name):
                lines.append(f"{name.replace('_', ' ')}: {getattr(self, name)}")
        return "\n".join(lines)


def norm_of(x: Tensor, axes: int = 1) -> Tensor:
    """The Euclidean norm over the last axes, of numbers too whose squares have no place in their type."""
    flat = x.flatten(-axes)
    if not flat.shape[-1]:
        return flat.sum(-1)
    largest = flat.abs().amax(-1, keepdim=True)
    exponent = torch.where(largest.isfinite(), torch.frexp(largest).exponent, 0).clamp(-1000, 1000)
    return torch.ldexp(torch.ldexp(flat, -exponent).norm(dim=-1), exponent.squeeze(-1))


def without_nan(bound: Tensor) -> Tensor:
    """A bound that is infinite where infinities on the way made it NaN: nothing is promised there."""
    return torch.where(bound.isnan(), torch.inf, bound)


def spacing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbouring values of `dtype` around `exact`, in float64."""
    info = torch.finfo(dtype)
    magnitude = exact.abs().double().clamp_min(info.smallest_normal)
    _, exponent = torch.frexp(magnitude)  # magnitude = m · 2^exponent, m in [1/2, 1)
    return torch.ldexp(torch.full_like(magnitude, info.eps), exponent - 1)


def overflow_threshold(dtype: torch.dtype) -> float:
    """The smallest magnitude that is rounded to infinity: the largest number and half its unit in the last place."""
    info = torch.finfo(dtype)
    return info.max + math.ldexp(info.eps, math.frexp(info.max)[1] - 2)


def absolute_error(output: Tensor, exact: Tensor) -> Tensor:
    """|output − exact| in float64. Equal infinities, and NaN in both, count as no error.

    Infinity is right where the exact value is past the overflow threshold of the output's type.
    """
    got, exact = output.double(), exact.double()
    expected = torch.where(exact.abs() >= overflow_threshold(output.dtype), exact.sign() * float("inf"), exact)
    agree = (got == expected) | (got.isnan() & expected.isnan())
    return torch.where(agree, 0.0, (got - exact).abs())


def rounding_error(output: Tensor, exact: Tensor) -> Tensor:
    """`absolute_error`, except that an infinite output for a finite result counts as the number after the largest."""
    _, exponent = math.frexp(torch.finfo(output.dtype).max)
    error = absolute_error(output, exact)
    # Halves, because in float64 the number after the largest is infinite.
    distance = (output.sign().double() * math.ldexp(1.0, exponent - 1) - exact.double() / 2).abs() * 2
    return torch.where(output.isinf() & exact.isfinite() & (error > 0), distance, error)


def error_in_ulp(output: Tensor, exact: Tensor) -> Tensor:
    """The error of each element in units in the last place of the output's type at the exact value."""
    return absolute_error(output, exact) / spacing(exact, output.dtype)


def _largest(errors: Tensor) -> float:
    if errors.numel() == 0:
        return 0.0
    return float(errors.nan_to_num(nan=float("inf")).max())
