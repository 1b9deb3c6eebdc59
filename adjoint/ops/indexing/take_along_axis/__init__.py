"""Taking along an axis.   out[…, j, …] = x[…, indices[…, j, …], …]

Adjoint, given dout:   dx[…, c, …] = Σ dout[…, j, …] over the j with indices[…, j, …] = c

and, along axes where x was broadcast, over those too. Saves the indices alone. The sum runs in float32 (float64
for float64), in an order fixed by the element's own entries, and is rounded once; elements never taken are 0.
Every element has one writer, without atomics. Where the caller promises that no index repeats within a line,
there is nothing to add: every line is written once.
"""

from collections.abc import Sequence
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import as_int, require_flag, require_floating, require_ids
from adjoint.core.errors import ArgumentError, is_checking
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.indexing.take_along_axis import plans
from adjoint.ops.indexing.take_along_axis.layout import elements_of, lines_of, output_shape

OutOfRange = Literal["raise", "zero"]

_OP = "take_along_axis"

# -------------------------------------------------------------------------------------------- checks


def _check_shapes(shape: tuple[int, ...], indices: Tensor, axis: int) -> None:
    """Requires x and indices with the same number of axes, and with sizes that broadcast except along `axis`."""
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
    for d, (size, other) in enumerate(zip(shape, indices.shape, strict=True)):
        if d != axis % len(shape) and size != other and size != 1 and other != 1:
            raise ArgumentError(
                f"{_OP}: but for axis {axis}, indices must have the sizes of x, or 1 on either side, "
                f"got {tuple(indices.shape)} for x of shape {tuple(shape)}"
            )


def _check(x: Tensor, indices: Tensor, axis: int, out_of_range: str, distinct: bool, verify: bool) -> None:
    require_floating(_OP, "x", x)
    require_ids(_OP, "indices", indices, "x", x)
    _check_shapes(x.shape, indices, axis)
    if out_of_range not in plans.OUT_OF_RANGE:
        names = ", ".join(map(repr, plans.OUT_OF_RANGE))
        raise ArgumentError(f"{_OP}: out_of_range must be one of {names}, got {out_of_range!r}")
    require_flag(_OP, "distinct", distinct)
    if distinct and indices.shape[axis] > x.shape[axis]:
        raise ArgumentError(
            f"{_OP}: distinct promises that no index repeats within a line, and the axis has {x.shape[axis]} elements; "
            f"got {indices.shape[axis]} indices along it; leave distinct out"
        )


def _check_backward(dout: Tensor, indices: Tensor, shape: list[int], axis: int, distinct: bool) -> None:
    require_floating(_OP, "dout", dout)
    require_ids(_OP, "indices", indices, "dout", dout)
    _check_shapes(tuple(shape), indices, axis)
    expected = output_shape(shape, indices.shape, axis)
    if tuple(dout.shape) != expected:
        raise ArgumentError(f"{_OP}: dout must have the shape of what is taken, {expected}, got {tuple(dout.shape)}")
    if distinct and (indices.shape[axis] > shape[axis] or _is_broadcast(shape, indices, axis)):
        raise ArgumentError(
            f"{_OP}: entries of lines of {shape[axis]} elements cannot be distinct for x of shape {tuple(shape)} "
            f"and indices of shape {tuple(indices.shape)}"
        )


def _is_broadcast(shape: Sequence[int], indices: Tensor, axis: int) -> bool:
    """Whether several lines of indices take from one line of x."""
    return any(
        size == 1 and other != 1
        for d, (size, other) in enumerate(zip(shape, indices.shape, strict=True))
        if d != axis % len(shape)
    )


# --------------------------------------------------------------------------------------- declaration


def _describe(x: Tensor, indices: Tensor, axis: int, *options: Any) -> Facts:
    return Facts((x.dtype, indices.dtype), elements_of(x, indices, axis).layout)


def _describe_backward(dout: Tensor, indices: Tensor, shape: Sequence[int], axis: int, distinct: bool) -> Facts:
    lines = lines_of(dout, indices, shape, axis)
    return Facts((dout.dtype, indices.dtype), lines.layout, (lines.line_count, lines.entry_count))


def _options_of(x: Tensor, indices: Tensor, axis: int, _: str, distinct: bool, verify: bool) -> tuple[Any, ...]:
    """The shape of x, the axis counted from the beginning, and whether an element is taken at most once.

    If x is broadcast, several lines of indices take from one line of x, and `distinct` is a promise about each line
    of indices alone.
    """
    return x.shape, axis % x.dim(), distinct and not _is_broadcast(x.shape, indices, axis)


_take_along_axis = Op(
    _OP,
    inputs=("x", "indices"),
    differentiable=("x",),
    options="int axis, str out_of_range, bool distinct, bool verify",
    outputs=("out",),
    check=_check,
    allocate=lambda x, indices, axis, *options: (x.new_empty(output_shape(x.shape, indices.shape, axis)),),
    describe=_describe,
    forward=lambda: plans.TAKE,
    adjoint=Adjoint(
        lambda: plans.TAKE_BACKWARD,
        _describe_backward,
        saves=("indices",),
        options="SymInt[] shape, int axis, bool distinct",
        options_of=_options_of,
        check=_check_backward,
        allocate=lambda dout, indices, shape, axis, distinct: (dout.new_empty(shape),),
    ),
)


@_take_along_axis.public
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
        indices: int32 or int64, any strides, with as many axes as x. Along `axis` it may have any size. Along the other
            axes x and indices broadcast. An index below 0 counts from the end. Indices have no gradient.
        axis: the axis to take along. A negative number counts from the end.
        distinct: the caller's promise that no index repeats within a line, as after a top-k. The adjoint then has
            nothing to add, and writes each line once. Inside `adjoint.checked()` the promise is verified.
        out_of_range: "raise" reports the position and value of the first index that is out of range: at once on the
            CPU, and on a GPU through `adjoint.check()`, with zeros meanwhile. "zero" gives zeros and no gradient, and
            reports nothing.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: x is not floating, indices are not integers, devices differ, shapes do not broadcast,
            `distinct` is set for more indices than the axis has elements, or (on the CPU) an index is out of range.
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
    verify = distinct is True and is_checking()
    return _take_along_axis.call(  # type: ignore[no-any-return]
        x, indices, as_int(axis), out_of_range, distinct, verify, preference=preference
    )
