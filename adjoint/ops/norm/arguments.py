"""Checks that the norms share."""

from torch import Tensor, float32

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short


def require_rows(op: str, name: str, value: Tensor) -> None:
    """A floating tensor with a last axis."""
    require_floating(op, name, value)
    if value.dim() == 0:
        raise ArgumentError(f"{op}: {name} must have at least one axis, got shape ()")


def require_weight(op: str, weight: Tensor, x: Tensor) -> None:
    """A number for each column of x, of its dtype or float32."""
    require_floating(op, "weight", weight)
    if weight.shape != x.shape[-1:]:
        raise ArgumentError(
            f"{op}: weight must have one number for each of the {x.shape[-1]} columns of x, got shape "
            f"{tuple(weight.shape)}"
        )
    if weight.dtype not in (x.dtype, float32):
        raise ArgumentError(f"{op}: weight must be float32 or {short(x.dtype)}, as x is, got {short(weight.dtype)}")
    if weight.device != x.device:
        raise ArgumentError(f"{op}: weight must be on the device of x, {x.device}, got {weight.device}")


def require_eps(op: str, eps: float) -> None:
    if not eps >= 0:
        raise ArgumentError(f"{op}: eps must not be negative, got {eps}")
