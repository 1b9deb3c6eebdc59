"""The norms by what they take, one set of names for kernels, plain PyTorch and bounds, and checks of arguments."""

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple

from torch import SymFloat, Tensor

from adjoint.core.arguments import require_float32_or_like, require_floating
from adjoint.core.errors import ArgumentError


class Arguments(NamedTuple):
    """The arguments of an operator by name. Tensors that it does not take, or that are absent, are None; an absent
    offset is 0."""

    x: Tensor
    weight: Tensor
    residual: Any
    gate: Any
    dy: Any
    ds: Any
    eps: float
    offset: float
    rounds: bool | None


def by_name(*names: str) -> Callable[[tuple[Any, ...]], Arguments]:
    """A function that converts a tuple that begins with arguments of these names to `Arguments`."""
    pick = itemgetter(*(names.index(x) if x in names else -2 if x == "offset" else -1 for x in Arguments._fields))
    return lambda arguments: Arguments._make(pick((*arguments, 0.0, None)))


class Norm:
    """A norm: whether it has a weight, normalises the sum with a residual, and is multiplied by a gate.

    Attributes:
        inputs: the tensors that the public function takes, in its order.
        forward, backward: give the arguments of the operators as `Arguments`. With a residual, x of a backward is the
            sum.
    """

    def __init__(self, *, weight: bool = True, residual: bool = False, gate: bool = False) -> None:
        self.weight, self.residual, self.gate = weight, residual, gate
        weights, residuals, gates = ("weight",) * weight, ("residual",) * residual, ("gate",) * gate
        self.inputs = ("x", *gates, *weights, *residuals)
        self.upstream = ("dy", *("ds",) * residual)
        options = ("eps", *("rounds" if gate else "offset",) * weight)
        self.forward = by_name("x", *weights, *residuals, *gates, *options)
        self.backward = by_name(*self.upstream, "x", *weights, *gates, *options)

    def needs(self, mask: int) -> tuple[bool, bool, bool]:
        """Whether a backward computes the gradients of x, which a residual shares, of the weight and of the gate."""
        return bool(mask & (5 if self.residual else 1)), bool(mask & 2), self.gate and bool(mask & 4)


RMS, RESIDUAL, GATED, L2 = Norm(), Norm(residual=True), Norm(gate=True), Norm(weight=False)


def require_rows(op: str, x: Tensor, eps: float) -> None:
    """Requires a floating tensor with a last axis, and an ε that is not negative."""
    require_floating(op, "x", x)
    if x.dim() == 0:
        raise ArgumentError(f"{op}: x must have at least one axis, got shape ()")
    require_eps(op, eps)


def require_eps(op: str, eps: float) -> None:
    require_number(op, "eps", eps)
    if not eps >= 0:
        raise ArgumentError(f"{op}: eps must not be negative, got {eps}")


def require_number(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | SymFloat):
        raise ArgumentError(f"{op}: {name} must be a number, got {type(value).__name__}")


def require_weight(op: str, weight: Tensor, x: Tensor) -> None:
    """Requires a number for each column of x, in the dtype of x or in float32."""
    require_floating(op, "weight", weight)
    if weight.shape != x.shape[-1:]:
        columns = f"one number for each of the {x.shape[-1]} columns of x"
        raise ArgumentError(f"{op}: weight must have {columns}, got shape {tuple(weight.shape)}")
    require_float32_or_like(op, "weight", weight, "x", x)
    if weight.device != x.device:
        raise ArgumentError(f"{op}: weight must be on the device of x, {x.device}, got {weight.device}")
