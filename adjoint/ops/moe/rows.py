"""The rows that the router and its losses read: which logits they take, and how rows lie in memory.

Kernels read rows of adjacent elements, along at most two axes. The last axis is never strided in a kernel: Triton lays
a row out over threads by what it knows about strides, and sums in an order that follows from the layout. With a stride
it does not know, version 3.6 spreads a row over several warps, reads slowly, and adds in another order than for the
same row of adjacent elements. What lies in any other way is copied first.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating
from adjoint.core.errors import ArgumentError
from adjoint.core.launch import Setup
from adjoint.core.layout import leading_axes
from adjoint.core.problem import short
from adjoint.core.workspace import Memory

MAX_EXPERTS = 1024
"""What one warp sorts."""


def check_logits(op: str, logits: Tensor) -> None:
    """A floating tensor [..., experts] of a type and a number of experts the kernels have."""
    require_floating(op, "logits", logits)
    if logits.dtype == torch.float64:
        raise ArgumentError(
            f"{op}: logits must be bfloat16, float16 or float32, got {short(logits.dtype)}; "
            f"convert them first, for example with logits.float()"
        )
    if logits.dim() == 0:
        raise ArgumentError(f"{op}: logits must have an axis of experts, the last, got a tensor without axes")
    if not 1 <= logits.shape[-1] <= MAX_EXPERTS:
        raise ArgumentError(
            f"{op}: logits must have 1 to {MAX_EXPERTS} experts along the last axis, got shape {tuple(logits.shape)}"
        )


# ---------------------------------------------------------------------------------------------- layout


def lies_as_rows(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor as it is."""
    if tensor.numel() == 0:
        return True
    return (tensor.shape[-1] == 1 or tensor.stride(-1) == 1) and leading_axes(tensor) is not None


def layout_of(rows: dict[str, Tensor | None], contiguous: dict[str, Tensor | None]) -> str:
    """The names of the tensors that are copied first: `rows` must lie as rows, `contiguous` be that."""
    names = [name for name, tensor in rows.items() if tensor is not None and not lies_as_rows(tensor)]
    names += [name for name, tensor in contiguous.items() if tensor is not None and not tensor.is_contiguous()]
    return f"{', '.join(names)} copied" if names else ""


class Rows(NamedTuple):
    """A tensor [..., columns] as rows of adjacent elements, row n at (n // inner)·outer + (n % inner)·inner stride."""

    tensor: Tensor
    inner: int
    outer_stride: int
    inner_stride: int


class Copies:
    """Contiguous copies of the tensors that a problem's layout names, in the workspace."""

    def __init__(self, setup: Setup, **sizes: tuple[torch.dtype, int]) -> None:
        self.setup = setup
        self.names = [name for name in sizes if name in setup.problem.layout.removesuffix(" copied").split(", ")]
        setup.scratch(**{name: sizes[name] for name in self.names})

    def memory(self, workspace: Tensor | None) -> Memory | None:
        """The workspace of a run that needs it for copies alone; None where nothing is copied."""
        return self.setup.memory(workspace) if self.names else None

    def contiguous(self, name: str, tensor: Tensor, memory: Memory | None) -> Tensor:
        """The tensor, or its copy."""
        if memory is None or name not in self.names:
            return tensor
        return memory.tensor(name).view(tensor.shape).copy_(tensor)

    def rows(self, name: str, tensor: Tensor, memory: Memory | None) -> Rows:
        """How to read a tensor that is not empty, or its copy."""
        tensor = self.contiguous(name, tensor, memory)
        axes = leading_axes(tensor)
        assert axes is not None
        return Rows(tensor, *axes)
