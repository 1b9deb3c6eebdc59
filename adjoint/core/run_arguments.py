"""Checks of what `Plan.run` is given to write to: `out=` and `workspace=`."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from adjoint.core.errors import ArgumentError
from adjoint.core.layout import share_memory
from adjoint.core.problem import short

if TYPE_CHECKING:
    from adjoint.core.plan import Operator, Plan


def check_outputs(operator: "Operator", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """Raises unless `out=` has the shape, dtype, device, strides and memory that outputs must have."""
    like = operator.allocate(*(a.to("meta") if isinstance(a, Tensor) else a for a in arguments))
    op = operator.name
    if len(outputs) != len(like):
        raise ArgumentError(f"{op}: out= must hold {len(like)} tensors, got {len(outputs)}")
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    for name, got, expected in zip(operator.outputs, outputs, like, strict=True):
        if not isinstance(got, Tensor):
            raise ArgumentError(f"{op}: out= for {name} must be a tensor, got {type(got).__name__}")
        if tuple(got.shape) != tuple(expected.shape):
            raise ArgumentError(
                f"{op}: out= for {name} must have shape {tuple(expected.shape)}, got {tuple(got.shape)}"
            )
        if got.dtype != expected.dtype:
            raise ArgumentError(f"{op}: out= for {name} must be {short(expected.dtype)}, got {short(got.dtype)}")
        if got.device != device:
            raise ArgumentError(f"{op}: out= for {name} must be on {device}, got {got.device}")
        if got.numel() and any(
            size > 1 and mine != theirs
            for size, mine, theirs in zip(got.shape, got.stride(), expected.stride(), strict=True)
        ):
            raise ArgumentError(f"{op}: out= for {name} must have strides {expected.stride()}, got {got.stride()}")

    taken = {n: a for n, a in zip(operator.tensors, arguments, strict=False) if isinstance(a, Tensor)}
    for name, got in zip(operator.outputs, outputs, strict=True):
        for other, memory in taken.items():
            if share_memory(got, memory):
                raise ArgumentError(
                    f"{op}: out= for {name} shares memory with {other}, which the kernel reads or writes as well; "
                    f"give it memory of its own"
                )
        taken[f"out= for {name}"] = got


def check_workspace(plan: "Plan", workspace: Tensor) -> None:
    """Raises unless `workspace=` is contiguous memory on the plan's device, and enough of it."""
    op, needed = plan.operator.name, plan.workspace_bytes
    if not isinstance(workspace, Tensor):
        raise ArgumentError(f"{op}: workspace= must be a tensor, got {type(workspace).__name__}")
    if needed is None:
        raise ArgumentError(f"{op}: plan {plan.name} takes no workspace=; the library behind it allocates its own")
    if workspace.device != plan.problem.device or not workspace.is_contiguous():
        raise ArgumentError(f"{op}: workspace= must be contiguous and on {plan.problem.device}, got {workspace.device}")
    got = workspace.numel() * workspace.element_size()
    if got < needed:
        raise ArgumentError(f"{op}: workspace= is too small: {needed} bytes are needed, got {got}")
