"""Checks of metadata that all ops share: each raises an error whose sentence names the argument."""

from numbers import Integral
from typing import TYPE_CHECKING, Any

from torch import Tensor, bfloat16, dtype, float16, float32, float64, int32, int64, strided

from adjoint.core.errors import ArgumentError
from adjoint.core.layout import share_memory, to_meta
from adjoint.core.problem import short

if TYPE_CHECKING:
    from adjoint.core.op.operator import Operator
    from adjoint.core.plan import Plan

FLOATING: tuple[dtype, ...] = (float64, float32, bfloat16, float16)
_FLOATING = frozenset(FLOATING)


def alike(first: Tensor, second: Tensor) -> bool:
    """Whether two values are floating tensors that an op takes, with equal shape, dtype and device.

    This is the fast test of the common case. Where it says no, `require_floating` and `require_like` say why.
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
    """Requires a tensor of one of the four floating types, on a device that ops run on."""
    _require_dense(op, name, value)
    if value.dtype not in _FLOATING:
        raise ArgumentError(
            f"{op}: {name} must be one of {', '.join(map(short, FLOATING))}, got {short(value.dtype)}; "
            f"convert it first, for example with {name}.float()"
        )
    if not (value.is_cpu or value.is_cuda or value.is_meta):
        raise ArgumentError(f"{op}: {name} must be on the CPU or a CUDA device, got {value.device}")


def as_int(value: Any) -> Any:
    """Converts an integer of numpy to Python's. Every other value stays as it is, and a later check names it."""
    return (
        int(value) if type(value) is not int and isinstance(value, Integral) and not isinstance(value, bool) else value
    )


def require_integer(op: str, name: str, value: Any) -> int:
    """Requires an integer, of Python or numpy, and returns Python's. A bool is no integer here."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentError(f"{op}: {name} must be an integer, got {value!r}")
    return int(value)


def require_flag(op: str, name: str, value: Any) -> bool:
    """Requires True or False; other values with a truth value, such as 1, are refused."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{op}: {name} must be True or False, got {value!r}")
    return value


def require_float32_or_like(op: str, name: str, value: Tensor, like: str, other: Tensor) -> None:
    """Requires the dtype float32, or the dtype of another tensor."""
    if value.dtype not in (other.dtype, float32):
        kinds = "float32" if other.dtype == float32 else f"float32 or {short(other.dtype)}"
        raise ArgumentError(f"{op}: {name} must be {kinds}, as {like} is, got {short(value.dtype)}")


def reuse_form(op: str, reuse_inputs: Any) -> str:
    """The form of the backward that `reuse_inputs` asks for, as `Op.call` takes it."""
    return "reuse" * require_flag(op, "reuse_inputs", reuse_inputs)


def require_size(op: str, name: str, value: Any) -> int:
    """Requires a number of rows, columns or heads: an integer of at least 1."""
    if (size := require_integer(op, name, value)) < 1:
        raise ArgumentError(f"{op}: {name} must be at least 1, got {size}")
    return size


def require_ids(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    """Requires a tensor of int32 or int64, on the device of another tensor."""
    _require_dense(op, name, value)
    if value.dtype not in (int32, int64):
        raise ArgumentError(
            f"{op}: {name} must be int32 or int64, got {short(value.dtype)}; convert it first, "
            f"for example with {name}.long()"
        )
    _require_device(op, name, value, like_name, like)


def require_like(
    op: str, name: str, value: Tensor, like_name: str, like: Tensor, shape: tuple[int, ...] | None = None
) -> None:
    """Requires a tensor with the dtype and device of another tensor, and with its shape unless `shape` is stated."""
    _require_dense(op, name, value)
    if value.shape != (like.shape if shape is None else shape):
        expected = f"the shape of {like_name}, {tuple(like.shape)}" if shape is None else f"shape {tuple(shape)}"
        raise ArgumentError(f"{op}: {name} must have {expected}, got {tuple(value.shape)}")
    if value.dtype != like.dtype:
        raise ArgumentError(
            f"{op}: {name} must have the dtype of {like_name}, {short(like.dtype)}, got {short(value.dtype)}"
        )
    _require_device(op, name, value, like_name, like)


def _require_dense(op: str, name: str, value: Any) -> None:
    """Requires a tensor with strides that is not nested."""
    if not isinstance(value, Tensor):
        raise ArgumentError(f"{op}: {name} must be a tensor, got {type(value).__name__}")
    if value.layout != strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise ArgumentError(f"{op}: {name} must be a dense tensor with strides, got {kind}; convert it first")


def _require_device(op: str, name: str, value: Tensor, like_name: str, like: Tensor) -> None:
    if value.device != like.device:
        raise ArgumentError(f"{op}: {name} must be on the device of {like_name}, {like.device}, got {value.device}")


# --------------------------------------------------------------- the memory that a caller passes to `Plan.run`


def check_outputs(operator: "Operator", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """Raises unless `out=` has the shape, dtype, device, strides and memory that outputs must have."""
    op, like = operator.name, operator.allocate(*map(to_meta, arguments))
    if len(outputs) != len(like):
        raise ArgumentError(f"{op}: out= must hold {len(like)} tensors, got {len(outputs)}")
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    for name, output, expected in zip(operator.outputs, outputs, like, strict=True):
        _require_dense(op, f"out= for {name}", output)
        if output.shape != expected.shape:
            wrong = f"have shape {tuple(expected.shape)}, got {tuple(output.shape)}"
        elif output.dtype != expected.dtype:
            wrong = f"be {short(expected.dtype)}, got {short(output.dtype)}"
        elif output.device != device:
            wrong = f"be on {device}, got {output.device}"
        elif output.numel() and any(
            size > 1 and step != expected_step
            for size, step, expected_step in zip(output.shape, output.stride(), expected.stride(), strict=True)
        ):
            wrong = f"have strides {expected.stride()}, got {output.stride()}"
        else:
            continue
        raise ArgumentError(f"{op}: out= for {name} must {wrong}")

    in_use = {name: a for name, a in zip(operator.tensors, arguments, strict=False) if isinstance(a, Tensor)}
    for name, output in zip(operator.outputs, outputs, strict=True):
        for other, memory in in_use.items():
            if share_memory(output, memory):
                raise ArgumentError(
                    f"{op}: out= for {name} shares memory with {other}, which the kernel reads or writes as well; "
                    f"give it memory of its own"
                )
        in_use[f"out= for {name}"] = output


def check_workspace(plan: "Plan", workspace: Tensor) -> None:
    """Raises unless `workspace=` is contiguous, on the plan's device, and large enough."""
    op, least = plan.operator.name, plan.workspace_bytes
    _require_dense(op, "workspace=", workspace)
    if least is None:
        raise ArgumentError(f"{op}: plan {plan.name} takes no workspace=; the library behind it allocates its own")
    if workspace.device != plan.problem.device or not workspace.is_contiguous():
        raise ArgumentError(f"{op}: workspace= must be contiguous and on {plan.problem.device}, got {workspace.device}")
    size = workspace.numel() * workspace.element_size()
    if size < least:
        raise ArgumentError(f"{op}: workspace= is too small: {least} bytes are needed, got {size}")
