"""How kernels walk tensors of any strides: the fewest axes that serve all of them at once.

Taking visits the elements of the output in order; its adjoint visits lines, and the entries of each. A line is
what one index chooses from: the elements of x along the axis. Its entries are the elements of the output that
were taken from it, in the output's order: those along the axis and, where x was broadcast, along that axis too.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

MAX_AXES = 4
"""Axes a kernel can walk."""


class Walk(NamedTuple):
    """Axes, outermost first, and each tensor's steps along them; at least one axis.

    `flat` are the numbers a kernel takes: the sizes of all axes but the outermost, then each tensor's steps, as
    many as for `MAX_AXES` axes, the missing ones first.
    """

    sizes: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]

    @property
    def axes(self) -> int:
        return len(self.sizes)

    @property
    def flat(self) -> tuple[int, ...]:
        sizes = (1,) * (MAX_AXES - self.axes) + self.sizes
        steps = tuple((0,) * (MAX_AXES - self.axes) + steps for steps in self.steps)
        return (*sizes[1:], *(step for own in steps for step in own))


def merged(sizes: Sequence[int], *steps: Sequence[int]) -> Walk:
    """Axes of size 1 vanish, and neighbours merge where every tensor allows it. The order of elements stays.

    >>> merged((2, 3, 4), (12, 4, 1), (0, 0, 1))
    Walk(sizes=(6, 4), steps=((4, 1), (0, 1)))
    """
    kept: list[int] = []
    own: list[list[int]] = [[] for _ in steps]
    for axis, size in enumerate(sizes):
        if size == 1:
            continue
        here = [row[axis] for row in steps]
        if kept and all(row[-1] == step * size for row, step in zip(own, here, strict=True)):
            kept[-1] *= size
            for row, step in zip(own, here, strict=True):
                row[-1] = step
        else:
            kept.append(size)
            for row, step in zip(own, here, strict=True):
                row.append(step)
    if not kept:
        return Walk((1,), tuple((0,) for _ in steps))
    return Walk(tuple(kept), tuple(map(tuple, own)))


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


def taken_shape(x: Sequence[int], indices: Sequence[int], axis: int) -> tuple[int, ...]:
    """The shape of what is taken: broadcast, but along the axis as long as the indices."""
    return tuple(i if d == axis or a == 1 else a for d, (a, i) in enumerate(zip(x, indices, strict=True)))


class Taking(NamedTuple):
    """Every element of the output, in order; steps of x (none along the axis), of the indices, and of the
    indices' own numbering.

    Attributes:
        plain: whether the indices lie one after the other in the output's order.
    """

    walk: Walk
    plain: bool


@lru_cache(maxsize=4096)
def taking(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    indices: tuple[int, ...],
    index_strides: tuple[int, ...],
    axis: int,
) -> Taking:
    """How to walk a call, from the shape and strides of x and of the indices."""
    out = taken_shape(shape, indices, axis)
    own = broadcast(shape, strides, out)
    spread = broadcast(indices, index_strides, out)
    walk = merged(out, (*own[:axis], 0, *own[axis + 1 :]), spread, broadcast(indices, contiguous(indices), out))
    plain = all(n == 1 or a == b for n, a, b in zip(out, spread, contiguous(out), strict=True))
    return Taking(walk, plain)


class Lines(NamedTuple):
    """The lines of x, and the entries of each.

    Attributes:
        lines: steps of dx, of the indices and of dout from line to line.
        entries: steps of the indices and of dout from entry to entry.
        line_count, entry_count: how many there are.
        axis_step: the step of dx along the axis.
    """

    lines: Walk
    entries: Walk
    line_count: int
    entry_count: int
    axis_step: int


@lru_cache(maxsize=4096)
def lines(
    shape: tuple[int, ...],
    indices: tuple[int, ...],
    index_strides: tuple[int, ...],
    dout_strides: tuple[int, ...],
    axis: int,
) -> Lines:
    """How the adjoint walks: `shape` is that of x, whose gradient is contiguous."""
    out = taken_shape(shape, indices, axis)
    own = contiguous(shape)
    spread = broadcast(indices, index_strides, out)
    summed = [d for d in range(len(out)) if d == axis or (shape[d] == 1 and out[d] != 1)]
    kept = [d for d in range(len(out)) if d not in summed]

    def only(axes: list[int], strides: Sequence[int]) -> list[int]:
        return [strides[d] for d in axes]

    line_count = entry_count = 1
    for d in kept:
        line_count *= out[d]
    for d in summed:
        entry_count *= out[d]
    return Lines(
        merged(only(kept, out), only(kept, own), only(kept, spread), only(kept, dout_strides)),
        merged(only(summed, out), only(summed, spread), only(summed, dout_strides)),
        line_count,
        entry_count,
        own[axis],
    )
