"""Where elements of tensors of any strides lie: the fewest axes that serve all tensors of a call at once.

The forward visits the elements of its output in order; the adjoint visits lines, and the entries of each. A line is
what one index chooses from: the elements of x along the axis. Its entries are the elements of the output that
were taken from it, in the output's order: those along the axis and, where x was broadcast, along that axis too.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

Shape = tuple[int, ...]

MAX_AXES = 4
"""The most axes that a kernel can handle separately."""

MAX_NUMBER = 2**30
"""The most elements, and entries of a line, that the kernels can count."""

MANY_AXES, TOO_MANY_AXES, LARGE = "many axes", "more axes than four", "past 30 bits"
"""The words of a layout."""


class Axes(NamedTuple):
    """At least one axis, outermost first, with each tensor's steps along the axes."""

    sizes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]

    @property
    def number(self) -> int:
        return len(self.sizes)

    def numbers(self, sizes: str, *steps: str) -> dict[str, tuple[int, ...]]:
        """The numbers that kernels take, by parameter: sizes of all axes but the outermost, and each tensor's steps.

        They are padded at the front to `MAX_AXES` axes.
        """
        missing = MAX_AXES - self.number
        named = {sizes: ((1,) * missing + self.sizes)[1:]}
        return named | {name: (0,) * missing + row for name, row in zip(steps, self.steps, strict=True)}


def merged(sizes: Sequence[int], *steps: Sequence[int]) -> Axes:
    """Removes axes of size 1, and merges neighbours where every tensor allows it. The order of elements stays.

    >>> merged((2, 3, 4), (12, 4, 1), (0, 0, 1))
    Axes(sizes=(6, 4), steps=((4, 1), (0, 1)))
    """
    fewest: list[int] = []
    rows: list[list[int]] = [[] for _ in steps]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        here = [row[axis] for row in steps]
        if fewest and all(row[-1] == step * size for row, step in zip(rows, here, strict=True)):
            fewest[-1] *= size
            for row, step in zip(rows, here, strict=True):
                row[-1] = step
        else:
            fewest.append(size)
            for row, step in zip(rows, here, strict=True):
                row.append(step)
    if not fewest:
        return Axes((1,), tuple((0,) for _ in steps))
    return Axes(tuple(fewest), tuple(map(tuple, rows)))


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def broadcast(shape: Sequence[int], strides: Sequence[int], onto: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor expanded onto a shape."""
    return tuple(0 if size == 1 and n != 1 else step for size, step, n in zip(shape, strides, onto, strict=True))


def output_shape(x: Sequence[int], indices: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of the output: that of the broadcast, with the size of the indices along the axis."""
    axis %= len(x)
    return tuple(i if d == axis or a == 1 else a for d, (a, i) in enumerate(zip(x, indices, strict=True)))


def _words(axes: int, few: int, *numbers: int) -> str:
    """The layout in words, which says how many axes kernels must handle and how far they must count."""
    layout = TOO_MANY_AXES if axes > MAX_AXES else MANY_AXES if axes > few else ""
    return ", ".join(filter(None, (layout, LARGE if max(numbers) > MAX_NUMBER else "")))


class Elements(NamedTuple):
    """The elements of the output, in order.

    Attributes:
        plain: whether the indices are adjacent in memory, in the order of the output.
        numbers: the sizes and the steps of x (0 along the axis), of the indices, and of the indices' numbering, as
            `take_forward` takes them.
        layout: what the kernel must be compiled for, in words.
    """

    plain: bool
    numbers: Mapping[str, Any]
    layout: str


def elements_of(x: Tensor, indices: Tensor, axis: int) -> Elements:
    """The elements of a call's output."""
    return _elements(x.shape, x.stride(), indices.shape, indices.stride(), axis)


@lru_cache(maxsize=4096)
def _elements(shape: Shape, strides: Shape, indices: Shape, index_strides: Shape, axis: int) -> Elements:
    axis %= len(shape)
    out = output_shape(shape, indices, axis)
    of_x = broadcast(shape, strides, out)
    spread = broadcast(indices, index_strides, out)
    axes = merged(out, (*of_x[:axis], 0, *of_x[axis + 1 :]), spread, broadcast(indices, contiguous(indices), out))
    plain = all(n == 1 or a == b for n, a, b in zip(out, spread, contiguous(out), strict=True))
    numbers = axes.numbers("sizes", "x_steps", "index_steps", "number_steps")
    return Elements(plain, numbers, _words(axes.number, 2, prod(axes.sizes), shape[axis]))


class Lines(NamedTuple):
    """The lines of x, and the entries of each.

    Attributes:
        axes: steps of dx, of the indices and of dout from line to line.
        entry_axes: steps of the indices and of dout from entry to entry.
        line_count, entry_count: how many lines there are, and entries of each.
        axis_step: the step of dx along the axis.
        numbers: sizes and steps as kernels take them, with `entries`, the elements of a line as `length`, and
            `axis_step`.
        layout: what kernels must be made for.
    """

    axes: Axes
    entry_axes: Axes
    line_count: int
    entry_count: int
    axis_step: int
    numbers: Mapping[str, Any]
    layout: str

    def select(self, parameters: Iterable[str]) -> dict[str, Any]:
        """The sizes and steps that are parameters of a kernel."""
        return {name: self.numbers[name] for name in parameters if name in self.numbers}


def lines_of(dout: Tensor, indices: Tensor, shape: Sequence[int], axis: int) -> Lines:
    """The lines of an adjoint: `shape` is that of x, whose gradient is contiguous."""
    return _lines(tuple(shape), indices.shape, indices.stride(), dout.stride(), axis)


@lru_cache(maxsize=4096)
def _lines(shape: Shape, indices: Shape, index_strides: Shape, dout_strides: Shape, axis: int) -> Lines:
    out = output_shape(shape, indices, axis)
    of_dx = contiguous(shape)
    spread = broadcast(indices, index_strides, out)
    summed = [d for d in range(len(out)) if d == axis or (shape[d] == 1 and out[d] != 1)]
    across = [d for d in range(len(out)) if d not in summed]

    def only(axes: list[int], strides: Sequence[int]) -> list[int]:
        return [strides[d] for d in axes]

    line_count, entry_count = prod(only(across, out)), prod(only(summed, out))
    axes = merged(only(across, out), only(across, of_dx), only(across, spread), only(across, dout_strides))
    entry_axes = merged(only(summed, out), only(summed, spread), only(summed, dout_strides))
    numbers: dict[str, Any] = axes.numbers("line_sizes", "dx_steps", "line_index_steps", "line_dout_steps")
    numbers |= entry_axes.numbers("entry_sizes", "index_steps", "dout_steps")
    numbers |= {"entries": entry_count, "length": shape[axis], "axis_step": of_dx[axis]}
    few = 1 if of_dx[axis] == 1 else 2
    most = max(axes.number, few + 1 if entry_axes.number > 1 else 1, entry_axes.number)
    layout = _words(most, few, line_count * entry_count)
    return Lines(axes, entry_axes, line_count, entry_count, of_dx[axis], numbers, layout)
