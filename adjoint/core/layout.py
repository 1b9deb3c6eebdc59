"""The layout of tensors in memory: neighbouring elements, overlaps, and the rows that kernels read."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor


def to_meta(value: Any) -> Any:
    """A tensor without its memory, of the same sizes, strides and dtype; what is no tensor stays as it is."""
    return value.to("meta") if isinstance(value, Tensor) else value


class Axes(NamedTuple):
    """The fewest axes that reach every element of all tensors: `sizes`, and each tensor's strides by axis."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def coalesce(tensors: Sequence[Tensor]) -> Axes:
    """Merges the axes of tensors of equal shape wherever every tensor allows it.

    Axes of size 1 vanish; the rest are ordered by the last tensor's strides, largest first, so
    tensors that share a permutation are like contiguous ones. At least one axis remains.

    >>> import torch
    >>> x = torch.empty(3, 4, 10)
    >>> coalesce([x[..., :5], torch.empty(3, 4, 5)])
    Axes(sizes=(12, 5), strides=((10, 1), (5, 1)))
    """
    shape = tensors[0].shape
    leader = tensors[-1].stride()
    order = sorted((axis for axis in range(len(shape)) if shape[axis] != 1), key=lambda axis: -leader[axis])
    sizes: list[int] = []
    strides: list[list[int]] = [[] for _ in tensors]
    for axis in order:
        steps = [tensor.stride(axis) for tensor in tensors]
        if sizes and all(row[-1] == step * shape[axis] for row, step in zip(strides, steps, strict=True)):
            sizes[-1] *= shape[axis]
            for row, step in zip(strides, steps, strict=True):
                row[-1] = step
        else:
            sizes.append(shape[axis])
            for row, step in zip(strides, steps, strict=True):
                row.append(step)
    if not sizes:
        return Axes((1,), tuple((1,) for _ in tensors))
    return Axes(tuple(sizes), tuple(tuple(row) for row in strides))


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether two indices of a tensor may share memory, as after `expand`. Never says no wrongly."""
    reach = 0
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def begins_as_allocated(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and begins as torch's memory on the CPU does, at a multiple of 64 bytes. A
    library's product looks at where its result begins, and takes another order of sums by it."""
    return tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors, neither of which overlaps itself, may have an element in common.

    Two halves of one packed tensor have address ranges that meet, and no element in common: tensors
    with equal strides are compared exactly, others by their ranges.
    """
    if first.numel() == 0 or second.numel() == 0 or first.device != second.device:
        return False
    a, b = _range(first), _range(second)
    if a[1] <= b[0] or b[1] <= a[0]:
        return False
    if first.stride() != second.stride() or first.element_size() != second.element_size():
        return True
    distance = second.data_ptr() - first.data_ptr()
    if distance % first.element_size():
        return True
    return _reachable(distance // first.element_size(), first, second)


def _range(tensor: Tensor) -> tuple[int, int]:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _reachable(distance: int, first: Tensor, second: Tensor) -> bool:
    """Whether an element of the first tensor lies where one of the second does, which begins `distance` elements later.

    Both have the same strides. Of tensors that do not overlap themselves few steps along an axis are in reach of the
    inner ones.
    """
    sizes = zip(first.stride(), first.shape, second.shape, strict=True)
    axes = sorted(((stride, a, b) for stride, a, b in sizes if stride and max(a, b) > 1), reverse=True)
    reaches = [(0, 0)]  # of each tensor along the inner axes
    for stride, own, other in reversed(axes):
        ahead, behind = reaches[0]
        reaches.insert(0, (ahead + (own - 1) * stride, behind + (other - 1) * stride))

    def spans(rest: int, depth: int) -> bool:
        if depth == len(axes):
            return rest == 0
        stride, own, other = axes[depth]
        ahead, behind = reaches[depth + 1]
        least, most = max(1 - other, -((ahead - rest) // stride)), min(own - 1, (rest + behind) // stride)
        return any(spans(rest - step * stride, depth + 1) for step in range(least, most + 1))

    return spans(distance, 0)


def leading_axes(tensor: Tensor) -> tuple[int, int, int] | None:
    """All axes but the last in order, as (inner, outer stride, inner stride).

    Item n lies at (n // inner)·outer + (n % inner)·inner stride. None where two axes are not enough, and where the
    outer of two has the stride 0, as after `expand`: an outer stride of 0 says that there is one axis.

    >>> import torch
    >>> leading_axes(torch.empty(3, 4, 10))
    (12, 0, 10)
    >>> leading_axes(torch.empty(4, 3, 10).transpose(0, 1))
    (4, 10, 30)
    >>> leading_axes(torch.empty(3, 10).expand(4, 3, 10)) is None
    True
    """
    axes: list[tuple[int, int]] = []
    for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
        if size == 1:
            continue
        if axes and axes[-1][1] == stride * size:
            axes[-1] = (axes[-1][0] * size, stride)
        else:
            axes.append((size, stride))
    if len(axes) > 2 or (len(axes) == 2 and axes[0][1] == 0):
        return None
    if len(axes) < 2:
        size, stride = axes[0] if axes else (1, 0)
        return size, 0, stride
    return axes[1][0], axes[0][1], axes[1][1]


# -------------------------------------------------------------------------------------------------- rows


class Rows(NamedTuple):
    """A tensor as kernels read it: row n, of adjacent elements, begins at (n // inner)·outer + (n % inner)·step.

    Contiguous tensors need none of the three.
    """

    tensor: Tensor
    inner: int = 1
    outer: int = 0
    step: int = 0

    @staticmethod
    def of(tensor: Tensor) -> "Rows":
        """A tensor that `lies_as_rows`."""
        axes = leading_axes(tensor)
        assert axes is not None
        return Rows(tensor, max(1, axes[0]), *axes[1:])

    @property
    def is_aligned(self) -> bool:
        return self.tensor.data_ptr() % 16 == 0 and not (self.outer % 16 or self.step % 16)


def lies_as_rows(tensor: Tensor) -> bool:
    """Whether kernels can read a tensor where it lies: rows of adjacent elements, along at most two axes."""
    if tensor.is_contiguous():
        return True
    adjacent = tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return tensor.numel() == 0 or (adjacent and leading_axes(tensor) is not None)


def copied_layout(rows: Mapping[str, Tensor | None], contiguous: Mapping[str, Tensor | None] | None = None) -> str:
    """The layout of a problem: the names of the tensors that are copied before kernels read them.

    Args:
        rows: tensors that must lie as rows.
        contiguous: tensors that must be contiguous.
    """
    copied = [name for name, x in rows.items() if x is not None and not (x.is_contiguous() or lies_as_rows(x))]
    if contiguous:
        copied += [name for name, x in contiguous.items() if x is not None and not x.is_contiguous()]
    return f"{', '.join(copied)} copied" if copied else ""


def copied_names(layout: str) -> list[str]:
    """The tensors that the layout of a problem names as copied.

    >>> copied_names("runs; gate, dy copied; ds absent")
    ['gate', 'dy']
    """
    parts = (part.removesuffix(" copied") for part in layout.split("; ") if part.endswith(" copied"))
    return [name for part in parts for name in part.split(", ")]
