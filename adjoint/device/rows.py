"""Tensors as kernels over rows read them: rows of adjacent elements. What lies otherwise is copied first."""

from typing import Any, NamedTuple

from torch import Tensor

from adjoint.core.launch import Setup
from adjoint.core.layout import leading_axes
from adjoint.core.op import Facts

KINDS = ("contiguous", "rows", "runs")
"""How rows follow each other: adjacent, any distance apart, or so in runs that are another distance apart."""


class Layout(NamedTuple):
    """How the tensors of a call lie, as the layout of a problem says it in words.

    >>> Layout.parse("runs; gate, dy copied; ds absent")
    Layout(kind='runs', copied=('gate', 'dy'), absent=('ds',))
    """

    kind: str
    copied: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()

    def __str__(self) -> str:
        words = ((self.copied, "copied"), (self.absent, "absent"))
        return "; ".join((self.kind, *(f"{', '.join(names)} {word}" for names, word in words if names)))

    @staticmethod
    def parse(text: str) -> "Layout":
        kind, *rest = text.split("; ")
        named = {part.rpartition(" ")[2]: tuple(part.rpartition(" ")[0].split(", ")) for part in rest}
        return Layout(kind, named.get("copied", ()), named.get("absent", ()))


def _kind(tensor: Tensor) -> int | None:
    """The index of its kind; None where a kernel cannot read it."""
    if tensor.is_contiguous():
        return 0
    axes = leading_axes(tensor) if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else None
    return None if axes is None else 2 if axes[1] else 1


def describe(x: Tensor, weight: Tensor | None = None, **others: Tensor | None) -> Facts:
    """The facts of a problem: dtypes of x and weight, how all tensors lie, the width and the number of rows."""
    kinds = {name: _kind(tensor) for name, tensor in {"x": x, **others}.items() if tensor is not None}
    copied = [name for name, kind in kinds.items() if kind is None]
    if weight is not None and not weight.is_contiguous():
        copied.append("weight")
    absent = tuple(name for name, tensor in others.items() if tensor is None)
    kind = KINDS[max(kind or 0 for kind in kinds.values())]
    size = x.shape[-1]
    dtypes = (x.dtype,) if weight is None else (x.dtype, weight.dtype)
    layout = str(Layout(kind, tuple(copied), absent))
    return Facts(dtypes, layout, (size, x.numel() // size if size else 0))


class Rows(NamedTuple):
    """A tensor whose row n begins at (n // inner)·outer + (n % inner)·step; contiguous ones need none of the three."""

    tensor: Tensor
    inner: int = 1
    outer: int = 0
    step: int = 0

    @property
    def is_aligned(self) -> bool:
        return self.tensor.data_ptr() % 16 == 0 and not (self.outer % 16 or self.step % 16)


class Reader:
    """Gives the tensors of a call as rows; adds the copies that a plan makes to its workspace."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.layout = setup, Layout.parse(setup.problem.layout)
        self.size, self.count = setup.problem.sizes
        element, *weight = setup.problem.dtypes
        for name in self.layout.copied:
            is_weight = name == "weight"
            region = (weight[0], self.size) if is_weight else (element, self.size * self.count)
            setup.scratch(**{f"copy_of_{name}": region})

    def memory(self, workspace: Tensor | None) -> Any:
        """The regions of a workspace; nothing is allocated where there are none."""
        return self.setup.memory(workspace) if self.setup.regions.bytes else {}

    def contiguous(self, name: str, tensor: Tensor, memory: Any) -> Tensor:
        return memory.contiguous(name, tensor) if name in self.layout.copied else tensor

    def rows(self, name: str, tensor: Tensor | None, memory: Any, instead: Tensor) -> Rows:
        """A tensor as rows; without one, some other tensor stands in its place, and is not read."""
        if tensor is None:
            return Rows(instead)
        tensor = self.contiguous(name, tensor, memory)
        if self.layout.kind == "contiguous":
            return Rows(tensor)
        inner, outer, step = leading_axes(tensor) or (1, 0, 0)
        return Rows(tensor, max(1, inner), outer, step)
