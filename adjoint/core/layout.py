"""The layout of tensors in memory: neighbouring elements, overlaps, and the rows that kernels read."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


def to_meta(value: Any) -> Any:
    """A meta tensor of the same sizes, strides and dtype as a tensor; a value that is no tensor stays as it is."""
    return value.to("meta") if isinstance(value, Tensor) else value


def empty_like(tensor: Tensor) -> Tensor:
    """Empty contiguous memory of the shape of a tensor. `tensor.new_empty(tensor.shape)` takes twice as long."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


class Axes(NamedTuple):
    """The fewest axes that reach every element of all tensors: their `sizes`, and each tensor's strides along them."""

    sizes: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]


def coalesce(tensors: Sequence[Tensor]) -> Axes:
    """Merges the axes of tensors of equal shape wherever every tensor allows it.

    Axes of size 1 vanish. The others are ordered by the last tensor's strides, largest first, so tensors that share a
    permutation of their axes give the same result as contiguous ones. At least one axis remains.

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
    """Whether two indices of a tensor may share memory, as after `expand`. "No" is always right; "yes" may be wrong."""
    reach = 0
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def begins_as_allocated(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous and begins at a multiple of 64 bytes, as memory that torch allocates on the CPU.

    The order of the sums in a library's product may depend on where its result begins.
    """
    return tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


def share_memory(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors, neither of which overlaps itself, may have an element in common.

    Two halves of one packed tensor have overlapping address ranges but no element in common. So tensors with equal
    strides are compared exactly, and others by their ranges.
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
    """Whether two tensors have an element in common, if the second begins `distance` elements behind the first.

    Both have the same strides. Neither overlaps itself, so along each axis there are only few steps to try: those whose
    rest the inner axes can reach.
    """
    sizes = zip(first.stride(), first.shape, second.shape, strict=True)
    axes = sorted(((stride, a, b) for stride, a, b in sizes if stride and max(a, b) > 1), reverse=True)
    reaches = [(0, 0)]  # how far each tensor reaches along the inner axes
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
    """All axes but the last, merged to at most two: (inner size, outer stride, inner stride).

    Item n lies at (n // inner size)·outer stride + (n % inner size)·inner stride. An outer stride of 0 says that there
    is only one axis. The result is None where two axes are not enough. It is also None where the outer of two axes has
    the stride 0, as after `expand`.

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
    """A tensor as kernels read it, as rows of adjacent elements: row n begins at (n // inner)·outer + (n % inner)·step.

    A contiguous tensor needs none of the three numbers.
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
    """Whether kernels can read a tensor in place: it has rows of adjacent elements, along at most two axes."""
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
