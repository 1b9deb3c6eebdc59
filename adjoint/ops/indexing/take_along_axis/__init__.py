"""Taking along an axis.   out[…, j, …] = x[…, indices[…, j, …], …]

Adjoint, given dout:   dx[…, c, …] = Σ dout[…, j, …] over the j with indices[…, j, …] = c

and, along axes where x was broadcast, over those too. Saves the indices alone. The sum runs in float32 (float64
for float64), in an order fixed by the element's own entries, and is rounded once; elements never taken are 0.
Every element has one writer, without atomics. Where the caller promises that no index repeats within a line,
there is nothing to add: every line is written once.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError, is_checking, second_derivative
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.indexing import plans, walks

OutOfRange = Literal["raise", "zero"]

_OP = "take_along_axis"

# -------------------------------------------------------------------------------------------- checks


def _check_shapes(shape: tuple[int, ...], indices: Tensor, axis: int) -> None:
    """x and the indices have as many axes, and sizes that broadcast but along the axis."""
    if len(shape) == 0 or indices.dim() != len(shape):
        raise ArgumentError(
            f"{_OP}: indices must have as many axes as x, and at least one: "
            f"x has shape {tuple(shape)}, indices {tuple(indices.shape)}"
        )
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ArgumentError(f"{_OP}: axis must be an integer, got {axis!r}; flatten both to take from all of x")
    if not -len(shape) <= axis < len(shape):
        raise ArgumentError(
            f"{_OP}: axis must be within the {len(shape)} axes of x, from {-len(shape)} to {len(shape) - 1}, got {axis}"
        )
    for d, (own, other) in enumerate(zip(shape, indices.shape, strict=True)):
        if d != axis % len(shape) and own != other and own != 1 and other != 1:
            raise ArgumentError(
                f"{_OP}: but for axis {axis}, indices must have the sizes of x, or 1 on either side, "
                f"got {tuple(indices.shape)} for x of shape {tuple(shape)}"
            )


def _check(x: Tensor, indices: Tensor, axis: int, out_of_range: str, promised: bool) -> None:
    require_floating(_OP, "x", x)
    require_ids(_OP, "indices", indices, "x", x)
    _check_shapes(x.shape, indices, axis)
    if out_of_range not in plans.OUT_OF_RANGE:
        known = ", ".join(map(repr, plans.OUT_OF_RANGE))
        raise ArgumentError(f"{_OP}: out_of_range must be one of {known}, got {out_of_range!r}")


def _check_backward(dout: Tensor, indices: Tensor, shape: list[int], axis: int, distinct: bool) -> None:
    require_floating(_OP, "dout", dout)
    require_ids(_OP, "indices", indices, "dout", dout)
    _check_shapes(tuple(shape), indices, axis)
    expected = walks.taken_shape(shape, indices.shape, axis % len(shape))
    if tuple(dout.shape) != expected:
        raise ArgumentError(f"{_OP}: dout must have the shape of what is taken, {expected}, got {tuple(dout.shape)}")
    if distinct and (indices.shape[axis] > shape[axis] or is_broadcast(tuple(shape), indices, axis)):
        raise ArgumentError(
            f"{_OP}: entries of lines of {shape[axis]} elements cannot be distinct for x of shape {tuple(shape)} "
            f"and indices of shape {tuple(indices.shape)}"
        )


def is_broadcast(shape: tuple[int, ...], indices: Tensor, axis: int) -> bool:
    """Whether several lines of indices take from one line of x."""
    return any(
        own == 1 and other != 1
        for d, (own, other) in enumerate(zip(shape, indices.shape, strict=True))
        if d != axis % len(shape)
    )


# ----------------------------------------------------------------------------------------- operators


def _describe(x: Tensor, indices: Tensor, axis: int, out_of_range: str, promised: bool) -> Problem:
    taking = walks.taking(tuple(x.shape), x.stride(), tuple(indices.shape), indices.stride(), axis)
    return Problem(
        _OP,
        x.device,
        (x.dtype, indices.dtype),
        _layout(taking.walk.axes, 2, x.shape[axis], *taking.walk.sizes),
        (),
        (axis, out_of_range, promised),
    )


def _layout(axes: int, few: int, length: int, *sizes: int) -> str:
    """What kernels must be made for: how many axes they walk, and how far they count."""
    number = 1
    for size in sizes:
        number *= size
    layout = plans.TOO_MANY_AXES if axes > walks.MAX_AXES else plans.MANY_AXES if axes > few else ""
    large = plans.LARGE if max(number, length) > plans.MAX_NUMBER else ""
    return ", ".join(filter(None, (layout, large)))


def _describe_backward(dout: Tensor, indices: Tensor, shape: list[int], axis: int, distinct: bool) -> Problem:
    found = walks.lines(tuple(shape), tuple(indices.shape), indices.stride(), dout.stride(), axis)
    few = 1 if found.axis_step == 1 else 2
    axes = max(found.lines.axes, few + 1 if found.entries.axes > 1 else 1, found.entries.axes)
    return Problem(
        f"{_OP}_backward",
        dout.device,
        (dout.dtype, indices.dtype),
        _layout(axes, few, 1, dout.numel()),
        (found.line_count, found.entry_count),
        (tuple(shape), axis, distinct),
    )


_take_along_axis = define(
    _OP,
    "Tensor x, Tensor indices, int axis, str out_of_range, bool promised",
    "Tensor",
    outputs=("out",),
    tensors=("x", "indices"),
    check=_check,
    allocate=lambda x, indices, axis, out_of_range, promised: (
        x.new_empty(walks.taken_shape(x.shape, indices.shape, axis)),
    ),
    describe=_describe,
    candidates=lambda: plans.TAKE,
)
_take_along_axis_backward = define(
    f"{_OP}_backward",
    "Tensor dout, Tensor indices, SymInt[] shape, int axis, bool distinct",
    "Tensor",
    outputs=("dx",),
    tensors=("dout", "indices"),
    check=_check_backward,
    allocate=lambda dout, indices, shape, axis, distinct: (dout.new_empty(shape),),
    describe=_describe_backward,
    candidates=lambda: plans.TAKE_BACKWARD,
)


class _TakeAlongAxis(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, indices: Tensor, axis: int, out_of_range: str, distinct: bool, promised: bool, text: str
    ) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.shape, ctx.axis, ctx.distinct, ctx.preference = x.shape, axis, distinct, text
        return _take_along_axis(x, indices, axis, out_of_range, promised, text)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative(_OP)
        (indices,) = ctx.saved_tensors
        dx = _take_along_axis_backward(dout, indices, ctx.shape, ctx.axis, ctx.distinct, ctx.preference)
        return dx, None, None, None, None, None, None


def take_along_axis(
    x: Float[Tensor, "*shape"],
    indices: Int[Tensor, "*places"],
    axis: int = -1,
    *,
    distinct: bool = False,
    out_of_range: OutOfRange = "raise",
    preference: Preference | None = None,
) -> Float[Tensor, "*taken"]:
    """out[…, j, …] = x[…, indices[…, j, …], …]: byte-identical copies of elements along an axis.

    Args:
        x: float64, float32, bfloat16 or float16, kept by the result; any strides.
        indices: int32 or int64, any strides, with as many axes as x. Along `axis` it may have any size; along
            the others x and indices broadcast. An index below 0 counts from the end. Indices carry no gradient.
        axis: the axis to take along. Negative counts from the end.
        distinct: the caller's promise that no index repeats within a line, as after a top-k. The adjoint then
            has nothing to add, and writes each line once. Inside `adjoint.checked()` the promise is verified.
        out_of_range: "raise" reports the first index that the axis does not have, by position and value: at
            once on the CPU; on a GPU through `adjoint.check()`, with zeros meanwhile. "zero" gives zeros and
            no gradient, silently.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: x is not floating, indices are not integers, devices differ, shapes do not broadcast,
            distinct is promised of more indices than the axis has elements, or (on the CPU) an index is out
            of range.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    >>> out = take_along_axis(x, torch.tensor([[2, 2], [0, -1]]))
    >>> out
    tensor([[3., 3.],
            [4., 6.]], grad_fn=<_TakeAlongAxisBackward>)
    >>> out.sum().backward()
    >>> x.grad
    tensor([[0., 0., 2.],
            [1., 0., 1.]])
    """
    axis, once = _validate(x, indices, axis, distinct, out_of_range)
    text = resolve(preference)
    promised = distinct and is_checking()
    if not (x.requires_grad and torch.is_grad_enabled()):
        return _take_along_axis(x, indices, axis, out_of_range, promised, text)
    return _TakeAlongAxis.apply(x, indices, axis, out_of_range, once, promised, text)  # type: ignore[no-any-return]


def _validate(x: Tensor, indices: Tensor, axis: int, distinct: bool, out_of_range: str) -> tuple[int, bool]:
    """Raises for wrong arguments; the axis counted from the beginning, and whether an element is taken once at most.

    Where x is broadcast, several lines of indices take from one line of x, and distinct speaks of each alone.
    """
    _check(x, indices, axis, out_of_range, False)
    if not isinstance(distinct, bool):
        raise ArgumentError(f"{_OP}: distinct must be True or False, got {distinct!r}")
    axis %= x.dim()
    if distinct and indices.shape[axis] > x.shape[axis]:
        raise ArgumentError(
            f"{_OP}: distinct promises that no index repeats within a line, and the axis has {x.shape[axis]} elements; "
            f"got {indices.shape[axis]} indices along it; leave distinct out"
        )
    return axis, distinct and not is_broadcast(tuple(x.shape), indices, axis)


def _bind(
    x: Tensor,
    indices: Tensor,
    axis: int = -1,
    *,
    distinct: bool = False,
    out_of_range: OutOfRange = "raise",
) -> Call:
    axis, once = _validate(x, indices, axis, distinct, out_of_range)
    return Call(
        _take_along_axis,
        (x, indices, axis, out_of_range, distinct and is_checking()),
        _take_along_axis_backward,
        lambda upstream, outputs: (upstream[0], indices, tuple(x.shape), axis, once),
    )


publish(take_along_axis, _bind)
