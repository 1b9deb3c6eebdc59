"""Checks of what metadata shows, shared by every op: each raises a sentence that names the argument."""

from torch import Tensor, bfloat16, dtype, float16, float32, float64, int32, int64, strided

from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short

FLOATING: tuple[dtype, ...] = (float64, float32, bfloat16, float16)
_FLOATING = frozenset(FLOATING)


def alike(first: Tensor, second: Tensor) -> bool:
    """Whether two values are floating tensors an op takes, of one shape, dtype and device: the common case, fast.

    When not, `require_floating` and `require_like` say why.
    """
    try:
        return (
            first.shape == second.shape
            and first.dtype == second.dtype
            and first.device == second.device
            and first.dtype in _FLOATING
            and (first.is_cpu or first.is_cuda)
            and first.layout == second.layout == strided
            and not (first.is_nested or second.is_nested)
        )
    except AttributeError:
        return False


def require_floating(op: str, name: str, value: Tensor) -> None:
    """A tensor of one of the four floating types, on a device the ops run on."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in _FLOATING:
        raise ArgumentError(
            f"{op}: {name} must be one of {', '.join(map(short, FLOATING))}, got {short(value.dtype)}; "
            f"convert it first, for example with {name}.float()"
        )
    _require_strided(op, name, value)
    if not (value.is_cpu or value.is_cuda or value.is_meta):
        raise ArgumentError(f"{op}: {name} must be on the CPU or a CUDA device, got {value.device}")


def require_ids(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """A tensor of int32 or int64, on the device of another."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in (int32, int64):
        raise ArgumentError(
            f"{op}: {name} must be int32 or int64, got {short(value.dtype)}; convert it first, "
            f"for example with {name}.long()"
        )
    _require_strided(op, name, value)
    if value.device != like.device:
        raise ArgumentError(f"{op}: {name} must be on the device of {like_name}, {like.device}, got {value.device}")


def _require_strided(op: str, name: str, value: Tensor) -> None:
    if value.layout != strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise ArgumentError(f"{op}: {name} must be a dense tensor with strides, got {kind}; convert it first")


def require_like(
    op: str, name: str, value: Tensor, like_name: str, like: Tensor, shape: tuple[int, ...] | None = None
) -> None:
    """A tensor of the dtype and device of another, and of its shape or the one given."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    _require_strided(op, name, value)
    if shape is not None:
        if value.shape != shape:
            raise ArgumentError(f"{op}: {name} must have shape {tuple(shape)}, got {tuple(value.shape)}")
    elif value.shape != like.shape:
        raise ArgumentError(
            f"{op}: {name} must have the shape of {like_name}, {tuple(like.shape)}, got {tuple(value.shape)}"
        )
    if value.dtype != like.dtype:
        raise ArgumentError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {short(value.dtype)}"
        )
    if value.device != like.device:
        raise ArgumentError(f"{op}: {name} must be on the device of {like_name}, {like.device}, got {value.device}")
