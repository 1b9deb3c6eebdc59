"""Tensors as kernels over rows read them: rows of adjacent elements. Tensors with another layout are copied first."""

from torch import Tensor

from adjoint.core.launch import Setup
from adjoint.core.layout import Rows, copied_names, leading_axes
from adjoint.core.op import Facts
from adjoint.core.workspace import Memory

KINDS = ("contiguous", "rows", "runs")
"""How rows follow each other, which kernels are compiled for: adjacent, any distance apart, or so in runs that are
another distance apart."""


def _kind(tensor: Tensor) -> int | None:
    """The index of its kind; None where a kernel cannot read it."""
    if tensor.is_contiguous():
        return 0
    axes = leading_axes(tensor) if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else None
    return None if axes is None else 2 if axes[1] else 1


def describe(x: Tensor, weight: Tensor | None = None, **others: Tensor | None) -> Facts:
    """The facts of a problem: dtypes of x and weight, how all tensors lie, the width and the number of rows.

    The layout is the kind of all rows, then names: "runs; gate, dy copied; ds absent".
    """
    kinds = {name: _kind(tensor) for name, tensor in {"x": x, **others}.items() if tensor is not None}
    copied = [name for name, kind in kinds.items() if kind is None]
    if weight is not None and not weight.is_contiguous():
        copied.append("weight")
    absent = [name for name, tensor in others.items() if tensor is None]
    layout = KINDS[max(kind or 0 for kind in kinds.values())]
    layout += f"; {', '.join(copied)} copied" if copied else ""
    layout += f"; {', '.join(absent)} absent" if absent else ""
    size = x.shape[-1]
    dtypes = (x.dtype,) if weight is None else (x.dtype, weight.dtype)
    return Facts(dtypes, layout, (size, x.numel() // size if size else 0))


class RowReader:
    """Gives the tensors of a call as rows of the kind of its problem; adds copies to the workspace."""

    def __init__(self, setup: Setup) -> None:
        (element, *weight), (size, count), layout = setup.problem.dtypes, setup.problem.sizes, setup.problem.layout
        self.kind, self.copied = layout.partition(";")[0], copied_names(layout)
        setup.copies(**{x: (weight[0], size) if x == "weight" else (element, size * count) for x in self.copied})

    def contiguous(self, name: str, tensor: Tensor, memory: Memory) -> Tensor:
        return memory.contiguous(name, tensor) if name in self.copied else tensor

    def rows(self, name: str, tensor: Tensor | None, memory: Memory, instead: Tensor) -> Rows:
        """A tensor as rows; without one, some other tensor stands in its place, and is not read."""
        if tensor is None:
            return Rows(instead)
        tensor = self.contiguous(name, tensor, memory)
        return Rows(tensor) if self.kind == "contiguous" else Rows.of(tensor)
