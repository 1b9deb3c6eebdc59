"""What `take_along_axis` is tested, verified and timed on."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Subject, Workload
from adjoint.contract.lookups import adjoint_of, bad_options, narrow_dtype, normal_values, on_device, zeros
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.ops.indexing.take_along_axis import reference, take_along_axis

Shape = tuple[int, ...]
Lay = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# ---------------------------------------------------------------------------------------------- inputs


def repeated_indices(generator: torch.Generator, shape: Shape, length: int, hot: float = 0.0) -> Tensor:
    """Random indices, some of them below 0. A share `hot` of them are the same element."""
    indices = torch.randint(-length, length, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < hot, length // 2, indices)


def distinct_indices(generator: torch.Generator, shape: Shape, length: int) -> Tensor:
    """Random indices along the last axis, without repetition in a line. Every other one counts from the end."""
    order = torch.rand((*shape[:-1], length), generator=generator).argsort(-1)[..., : shape[-1]]
    return torch.where(torch.arange(shape[-1]) % 2 == 1, order - length, order)


def _taken(
    shape: Shape,
    places: Shape,
    axis: int = -1,
    hot: float = 0.0,
    index_type: torch.dtype = torch.int64,
    distinct: bool = False,
    wrong: bool = False,
    lay: Lay = lambda x, indices: (x, indices),
) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        length = shape[axis]
        if distinct:
            indices = distinct_indices(generator, places, length)
        else:
            indices = repeated_indices(generator, places, length, hot)
        if wrong:  # below the first, past the last, and past 2^31
            indices.view(-1)[[0, -2, -1]] = torch.tensor([-length - 1, length, 2**31 + 1])
        return lay(normal_values(generator, dtype, device, *shape), indices.to(index_type).to(device))

    return make


def _strided(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """x with the axis as its slowest in memory, and every other index of a wider tensor."""
    return x.T.contiguous().T, torch.stack((indices, indices - 1), -1)[..., 0]


# -------------------------------------------------------------------------------------------- mistakes


def _mistaken(axis: int, gradient: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Answers]:
    """Right elements with a wrong gradient, `gradient(dout, x, indices)`."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        x, indices = inputs
        return (reference.take_along_axis(x, indices, axis),), (gradient(upstream[0], x, indices).to(x.dtype),)

    return answer


def _mistakes(axis: int) -> dict[str, Callable[..., Answers]]:
    def right(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        return reference.take_along_axis_backward(dout.double(), x.double(), indices, axis)

    def lines_exchanged(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        x, indices = inputs
        out = reference.take_along_axis(x, indices.flip(0), axis)
        return (out,), (right(upstream[0], x, indices.flip(0)).to(x.dtype),)

    def without_the_last(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        last = dout.shape[axis] - 1
        return right(dout.narrow(axis, 0, last), x, indices.narrow(axis, 0, last))

    return {
        "zero output": zeros,
        "lines exchanged": lines_exchanged,
        "the last entry dropped": _mistaken(axis, without_the_last),
        "the next element": _mistaken(axis, lambda dout, x, i: right(dout, x, i).roll(1, axis)),
    }


def _overwritten(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(-1, indices.long() % x.shape[-1], dout)


def _added_narrowly(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    narrow = narrow_dtype(x.dtype)
    total = torch.zeros(x.shape, dtype=narrow, device=x.device)
    indices = indices.long() % x.shape[-1]
    for entry in range(min(dout.shape[-1], 2000)):
        here = indices[..., entry : entry + 1]
        total.scatter_(-1, here, total.gather(-1, here) + dout[..., entry : entry + 1].to(narrow))
    return total


# -------------------------------------------------------------------------------------------- subjects

TAKE = Subject(
    name="take_along_axis",
    function=take_along_axis,
    inputs=("x", "indices"),
    reference=lambda x, indices: (reference.take_along_axis(x, indices),),
    reference_backward=lambda dout, x, indices: (reference.take_along_axis_backward(dout, x, indices),),
    cases=(
        Case("short lines", _taken((3, 4), (3, 6))),
        Case("more than a tile of one element", _taken((3, 5), (3, 40), hot=0.95, index_type=torch.int32)),
        Case("strided", _taken((3, 19), (3, 7), lay=_strided)),
        Case("one of each", _taken((1, 1), (1, 1))),
        Case("no indices", _taken((4, 5), (4, 0))),
        Case("a router", _taken((4099, 512), (4099, 10), hot=0.5), heavy=True),
        Case("sorted", _taken((2, 30), (2, 1100), hot=0.3), heavy=True),
        Case("many of each line", _taken((517, 300), (517, 200), hot=0.3), heavy=True),
        Case("long lines", _taken((5, 32768), (5, 32768), hot=0.5), heavy=True),
    ),
    mistakes=_mistakes(-1)
    | {
        "repeated indices overwrite": _mistaken(-1, _overwritten),
        "sums in a narrow type": _mistaken(-1, _added_narrowly),
    },
    plans=("triton.take+triton.sorted",),
)

DISTINCT = replace(
    TAKE,
    name="take_along_axis[distinct]",
    keywords={"distinct": True},
    cases=(
        Case("a few of many", _taken((3, 5), (3, 3), distinct=True, index_type=torch.int32)),
        Case("some of many", _taken((2, 60), (2, 40), distinct=True)),
        Case("scattered", _taken((2, 1100), (2, 1050), distinct=True)),
        Case("a router", _taken((4099, 512), (4099, 10), distinct=True), heavy=True),
        Case("long lines", _taken((5, 32768), (5, 30000), distinct=True), heavy=True),
    ),
    mistakes=_mistakes(-1),
    dtypes=(torch.float64, torch.bfloat16),
    plans=(),
)

INNER = replace(
    DISTINCT,
    name="take_along_axis[axis=1]",
    keywords={"axis": 1, "out_of_range": "zero"},
    reference=lambda x, indices: (reference.take_along_axis(x, indices, 1),),
    reference_backward=lambda dout, x, indices: (reference.take_along_axis_backward(dout, x, indices, 1),),
    cases=(
        Case("indices out of range", _taken((2, 3, 2), (2, 4, 2), 1, wrong=True)),
        Case("indices broadcast", _taken((3, 7, 6), (3, 4, 1), 1)),
        Case("both broadcast", _taken((2, 5, 1, 3), (2, 3, 4, 1), 1, index_type=torch.int32)),
        Case("many lines", _taken((33, 300, 77), (33, 9, 77), 1), heavy=True),
        Case("many summed", _taken((33, 40, 1), (33, 9, 300), 1), heavy=True),
    ),
    mistakes=_mistakes(1),
)

SUBJECTS = (TAKE, DISTINCT, INNER)

# ------------------------------------------------------------------------------------------- bad calls

_LINES, _LENGTH = 3, 6


def _x(device: torch.device | str, *shape: int) -> Tensor:
    return torch.zeros(shape or (_LINES, _LENGTH), device=device)


def _indices(device: torch.device | str, *shape: int) -> Tensor:
    return torch.zeros(shape or (_LINES, 2), dtype=torch.int64, device=device)


def _take(device: torch.device, **options: Any) -> Tensor:
    return take_along_axis(_x(device), _indices(device), **options)


def _with_index(position: int, value: int, dtype: torch.dtype = torch.int64) -> Callable[[torch.device], None]:
    """A call with 300 indices in 100 lines, all of them right but one, and its gradient."""

    def call(device: torch.device) -> None:
        indices = torch.arange(300, device=device).remainder(2 * _LENGTH).sub(_LENGTH).to(dtype)
        indices[position] = value
        x = _x(device, 100, _LENGTH).requires_grad_()
        take_along_axis(x, indices.view(100, 3)).sum().backward()
        adjoint.check()

    return call


def _out_of_range_of_broadcast_indices(device: torch.device) -> None:
    indices = _indices(device, 1, 4)
    indices[0, 2] = _LENGTH
    take_along_axis(_x(device), indices)
    adjoint.check()


def _broken_promise(*line: int) -> Callable[[torch.device], None]:
    """A call with a line that has an index twice, behind a line that does not."""

    def call(device: torch.device) -> None:
        indices = torch.tensor([list(range(len(line))), line], device=device)
        with adjoint.checked():
            take_along_axis(_x(device, 2, _LENGTH), indices, distinct=True)

    return call


def _differentiate(device: torch.device, **options: Any) -> None:
    x, indices = _x(device).requires_grad_(), _indices(device, _LINES, 300)
    take_along_axis(x, indices, **options).sum().backward()


def _operator(dout: Tensor, indices: Tensor, distinct: bool = False) -> Tensor:
    return torch.ops.adjoint.take_along_axis_backward(dout, indices, [_LINES, _LENGTH], 1, distinct, "")


def _plan(device: torch.device, lines: int = _LINES, dtype: torch.dtype = torch.float32, out: Any = None) -> Any:
    """Runs the plan of the backward."""
    plan = adjoint_of(take_along_axis, _x(device), _indices(device))
    return plan.run(_x(device, lines, 2).to(dtype), _indices(device), out=out)


BAD_CALLS = (
    BadCall("boolean indices", lambda d: take_along_axis(_x(d), _indices(d).bool()), "indices", "int64", "bool"),
    BadCall("narrow indices", lambda d: take_along_axis(_x(d), _indices(d).short()), "indices", "int16", ".long()"),
    BadCall("fewer axes", lambda d: take_along_axis(_x(d), _indices(d, 2)),
            "indices", "as many axes", "(3, 6)", "(2,)"),
    BadCall("no axes", lambda d: take_along_axis(_x(d)[0, 0], _indices(d)[0, 0]), "at least one"),
    BadCall("sizes that do not broadcast", lambda d: take_along_axis(_x(d), _indices(d, 2, 2)),
            "axis -1", "(2, 2)", "(3, 6)"),
    BadCall("axis past the last", lambda d: _take(d, axis=2), "axis", "-2 to 1", "got 2"),
    BadCall("axis before the first", lambda d: _take(d, axis=-3), "axis", "got -3"),
    BadCall("no axis", lambda d: _take(d, axis=None), "axis", "integer", "None", "flatten"),
    BadCall("boolean axis", lambda d: _take(d, axis=True), "axis", "integer", "True"),
    BadCall("distinct that is a number", lambda d: _take(d, distinct=1), "distinct", "True or False"),
    BadCall("more distinct indices than elements",
            lambda d: take_along_axis(_x(d), _indices(d, _LINES, 7), distinct=True),
            "distinct", "6 elements", "7 indices"),
    BadCall("more distinct indices than elements, along another axis",
            lambda d: take_along_axis(_x(d), _indices(d, 4, _LENGTH), 0, distinct=True),
            "distinct", "3 elements", "4 indices"),
    *bad_options("take_along_axis", _differentiate),
    BadCall("the first index too large", _with_index(0, _LENGTH),
            "take_along_axis: indices", "got 6 at position 0 ", '"zero"'),
    BadCall("an index in the middle too large", _with_index(150, 1000), "got 1000 at position 150 "),
    BadCall("the last index too large", _with_index(-1, 6, torch.int32), "got 6 at position 299 "),
    BadCall("an index before the first", _with_index(3, -7), "got -7 at position 3 "),
    BadCall("an index before the first, in 32 bits", _with_index(3, -7, torch.int32), "got -7 at position 3 "),
    BadCall("an index that is right modulo 2^32", _with_index(257, 2**32 + 2), "got 4294967298 at position 257 "),
    BadCall("an index past 2^31", _with_index(9, 2**31), "got 2147483648 at position 9 "),
    BadCall("the smallest index there is", _with_index(40, -(2**63)), f"got {-(2**63)} at position 40 "),
    BadCall("an index out of range, of indices that are broadcast", _out_of_range_of_broadcast_indices,
            "got 6 at position 2 "),
    BadCall("a promise that is broken", _broken_promise(4, 0, 4),
            "distinct=True", "4 at position 5 ", "leave distinct out"),
    BadCall("a promise that is broken from the end", _broken_promise(1, 5, -1), "-1 at position 5 "),
    BadCall("dout of the wrong shape, to the operator", lambda d: _operator(_x(d, _LINES, 3), _indices(d)),
            "dout", "(3, 2)", "(3, 3)"),
    BadCall("a promise that cannot be kept, to the operator",
            lambda d: _operator(_x(d, _LINES, 7), _indices(d, _LINES, 7), True), "distinct", "6 elements", "(3, 7)"),
    BadCall("dout of the wrong shape, to the plan", lambda d: _plan(d, lines=4), "dout", "(3, 2)", "(4, 2)"),
    BadCall("dout of another dtype than the plan's", lambda d: _plan(d, dtype=torch.float16),
            "not made for", "float16", "float32", error=Unsupported),
    BadCall("out= of the wrong shape, to the adjoint", lambda d: _plan(d, out=_x(d, 5, 4)),
            "out=", "dx", "(3, 6)", "(5, 4)"),
)  # fmt: skip

# ------------------------------------------------------------------------------------------- workloads


def _on_device(rows: int, length: int, number: int, distinct: bool) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        of_device = on_device(device, generator)
        x = torch.randn(rows, length, dtype=dtype, device=device, generator=of_device)
        if distinct:
            return x, x.topk(number).indices
        return x, torch.randint(length, (rows, number), device=device, generator=of_device)

    return make


def _workloads() -> Iterable[Workload]:
    size, index_size = 4, 8
    for rows, length, number in ((32768, 512, 10), (32768, 256, 8), (65536, 128, 8), (64, 32768, 32768)):
        entries = rows * number
        for subject in (TAKE, DISTINCT):
            promised = subject is DISTINCT
            yield Workload(
                f"{subject.name} {rows}×{length}, {number} of each line, float32",
                subject,
                _on_device(rows, length, number, promised),
                entries * (2 * size + index_size),
                rows * length * size + entries * (size + index_size),
                lambda x, indices: torch.take_along_dim(x, indices, -1),
                dtype=torch.float32,
                directions=("backward",) if promised else ("forward", "backward"),
                deterministic=not promised,
                devices=("cuda",),
            )


WORKLOADS = tuple(_workloads())


def built_calls() -> Iterator[tuple[Call, str] | tuple[Call, str, bool]]:
    """Calls of every plan in every dtype, and in float32 the further kernels for layouts, types and sizes."""

    def call(
        shape: Shape,
        places: Shape,
        dtype: torch.dtype = torch.float32,
        index: torch.dtype = torch.int64,
        axis: int = -1,
        distinct: bool = False,
    ) -> Call:
        x = torch.empty(shape, dtype=dtype, device="meta")
        return bind(take_along_axis, x, torch.empty(places, dtype=index, device="meta"), axis, distinct=distinct)

    lines, few, many = (8, 512), (8, 10), (8, 64)
    for dtype in TAKE.dtypes:
        unaligned = dtype in (torch.float64, torch.float32)
        yield call(lines, few, dtype), "triton.take"
        yield call(lines, few, dtype), "triton.few", unaligned
        yield call(lines, many, dtype), "triton.lines", unaligned
        yield call((2, 2048), (2, 1100), dtype, distinct=True), "triton.scatter"
        yield call(lines, (8, 1100), dtype), "triton.sorted"
    yield call(lines, few, distinct=True), "triton.few"
    yield call(lines, many, distinct=True), "triton.lines"
    # Axes that do not merge, more elements than 32 bits can count, and keys that need more.
    for plan in ("triton.take", "triton.few", "triton.lines", "triton.sorted"):
        number = 64 if plan == "triton.lines" else 10
        yield call(lines, (8, number), index=torch.int32), plan
        yield call((3, 512, 5, 2), (3, number, 1, 2), axis=1), plan
    for index in (torch.int32, torch.int64):
        yield call((8, 2048), (8, 1100), index=index, distinct=True), "triton.scatter"
    yield call((3, 2048, 5, 2), (3, 1100, 1, 2), axis=1, distinct=True), "triton.scatter"
    large = (2**11, 2**18, 3, 2)
    yield call(large, (2**11, 2**18, 1, 2), axis=1, distinct=True), "triton.take"
    yield call(large, (2**11, 2**18, 1, 2), axis=1, distinct=True), "triton.scatter"
    yield call((8, 2**30), many), "triton.lines"
