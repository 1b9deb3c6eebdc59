"""The arguments of the norms: how they are checked, and what they are called for kernels and plain PyTorch alike.

The operators of `rms_norm`, of `rms_norm` with a residual and of `gated_rms_norm` take x, weight, residual or gate, ε,
and the offset or whether z is rounded before the weight. Gradients come in the order of the tensors.
"""

from typing import Any, NamedTuple

from torch import SymFloat, Tensor, float32

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short


class Forward(NamedTuple):
    """The arguments of a forward."""

    x: Tensor
    weight: Tensor
    residual: Tensor | None
    gate: Tensor | None
    eps: float
    offset: float
    rounds: bool

    @staticmethod
    def of(op: str, arguments: tuple[Any, ...]) -> "Forward":
        if op.startswith("gated"):
            x, weight, gate, eps, rounds = arguments
            return Forward(x, weight, None, gate, eps, 0.0, rounds)
        x, weight, *residual, eps, offset = arguments
        return Forward(x, weight, residual[0] if residual else None, None, eps, offset, False)


class Needs(NamedTuple):
    """Which gradients a backward computes. A residual has the gradient of x."""

    x: bool
    weight: bool
    gate: bool

    @staticmethod
    def of(op: str, mask: int) -> "Needs":
        first = mask & 5 if "residual" in op else mask & 1
        return Needs(bool(first), bool(mask & 2), op.startswith("gated") and bool(mask & 4))


class Backward(NamedTuple):
    """The arguments of a backward; x is the sum where there was a residual."""

    dy: Tensor | None
    ds: Tensor | None
    x: Tensor
    weight: Tensor
    gate: Tensor | None
    eps: float
    offset: float
    rounds: bool
    needs: Needs

    @staticmethod
    def of(op: str, arguments: tuple[Any, ...]) -> "Backward":
        dy, *rest, mask = arguments
        ds = rest.pop(0) if "residual" in op else None
        x, weight, _, gate, eps, offset, rounds = Forward.of(op, tuple(rest))
        return Backward(dy, ds, x, weight, gate, eps, offset, rounds, Needs.of(op, mask))


# ------------------------------------------------------------------------------------------------ checks


def require_rows(op: str, x: Tensor, eps: float) -> None:
    """A floating tensor with a last axis, and an ε that is not negative."""
    require_floating(op, "x", x)
    if x.dim() == 0:
        raise ArgumentError(f"{op}: x must have at least one axis, got shape ()")
    require_number(op, "eps", eps)
    if not eps >= 0:
        raise ArgumentError(f"{op}: eps must not be negative, got {eps}")


def require_number(op: str, name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | SymFloat):
        raise ArgumentError(f"{op}: {name} must be a number, got {type(value).__name__}")


def require_weight(op: str, weight: Tensor, x: Tensor) -> None:
    """A number for each column of x, of its dtype or float32."""
    require_floating(op, "weight", weight)
    if weight.shape != x.shape[-1:]:
        columns = f"one number for each of the {x.shape[-1]} columns of x"
        raise ArgumentError(f"{op}: weight must have {columns}, got shape {tuple(weight.shape)}")
    if weight.dtype not in (x.dtype, float32):
        raise ArgumentError(f"{op}: weight must be float32 or {short(x.dtype)}, as x is, got {short(weight.dtype)}")
    if weight.device != x.device:
        raise ArgumentError(f"{op}: weight must be on the device of x, {x.device}, got {weight.device}")
