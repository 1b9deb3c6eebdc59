"""The lines, indices and layouts taking along an axis is tested, verified and timed on."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Inputs, Make, Subject, Workload
from adjoint.ops.indexing import reference
from adjoint.ops.indexing.bad_calls import BAD_CALLS
from adjoint.ops.indexing.builds import builds
from adjoint.ops.indexing.take_along_axis import take_along_axis

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

Shape = tuple[int, ...]
Lay = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

# ---------------------------------------------------------------------------------------------- inputs


def _values(generator: torch.Generator, dtype: torch.dtype, device: torch.device, shape: Shape) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def repeated_indices(generator: torch.Generator, shape: Shape, length: int, hot: float = 0.0) -> Tensor:
    """Random indices, below 0 too, a share of which are one element."""
    indices = torch.randint(-length, length, shape, generator=generator)
    return torch.where(torch.rand(shape, generator=generator) < hot, length // 2, indices)


def distinct_indices(generator: torch.Generator, shape: Shape, length: int) -> Tensor:
    """Random indices along the last axis, none twice in a line; every other one counts from the end."""
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
        return lay(_values(generator, dtype, device, shape), indices.to(index_type).to(device))

    return make


def _strided(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The axis the slowest of x; every other index of a wider tensor."""
    return x.T.contiguous().T, torch.stack((indices, indices - 1), -1)[..., 0]


# -------------------------------------------------------------------------------------------- mistakes


def _narrow_sums(dtype: torch.dtype) -> torch.dtype:
    """A type too narrow to add values of a dtype in."""
    return {torch.float64: torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)


def _mistaken(axis: int, gradient: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[..., Answers]:
    """Taken right, with a wrong gradient: `gradient(dout, x, indices)`."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        x, indices = inputs
        return (reference.take_along_axis(x, indices, axis),), (gradient(upstream[0], x, indices).to(x.dtype),)

    return answer


def _mistakes(axis: int) -> dict[str, Callable[..., Answers]]:
    def right(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        return reference.take_along_axis_backward(dout.double(), x.double(), indices, axis)

    def zero(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        return (torch.zeros_like(upstream[0]),), (torch.zeros_like(inputs[0]),)

    def lines_exchanged(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        x, indices = inputs
        taken = reference.take_along_axis(x, indices.flip(0), axis)
        return (taken,), (right(upstream[0], x, indices.flip(0)).to(x.dtype),)

    def without_the_last(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        last = dout.shape[axis] - 1
        return right(dout.narrow(axis, 0, last), x, indices.narrow(axis, 0, last))

    return {
        "zero output": zero,
        "lines exchanged": lines_exchanged,
        "the last entry dropped": _mistaken(axis, without_the_last),
        "the next element": _mistaken(axis, lambda dout, x, i: right(dout, x, i).roll(1, axis)),
    }


def _overwritten(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    return torch.zeros_like(x).scatter(-1, indices.long() % x.shape[-1], dout)


def _added_narrowly(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
    narrow = _narrow_sums(x.dtype)
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

DISTINCT = Subject(
    name="take_along_axis[distinct]",
    function=take_along_axis,
    keywords={"distinct": True},
    inputs=("x", "indices"),
    reference=TAKE.reference,
    reference_backward=TAKE.reference_backward,
    cases=(
        Case("a few of many", _taken((3, 5), (3, 3), distinct=True, index_type=torch.int32)),
        Case("some of many", _taken((2, 60), (2, 40), distinct=True)),
        Case("scattered", _taken((2, 1100), (2, 1050), distinct=True)),
        Case("a router", _taken((4099, 512), (4099, 10), distinct=True), heavy=True),
        Case("long lines", _taken((5, 32768), (5, 30000), distinct=True), heavy=True),
    ),
    mistakes=_mistakes(-1),
    dtypes=(torch.float64, torch.bfloat16),
)

INNER = Subject(
    name="take_along_axis[axis=1]",
    function=take_along_axis,
    keywords={"axis": 1, "out_of_range": "zero"},
    inputs=("x", "indices"),
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
    dtypes=(torch.float64, torch.bfloat16),
)

SUBJECTS = (TAKE, DISTINCT, INNER)

# ------------------------------------------------------------------------------------------- workloads


def _on_device(rows: int, length: int, number: int, distinct: bool) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        own = torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))
        x = torch.randn(rows, length, dtype=dtype, device=device, generator=own)
        if distinct:
            return x, x.topk(number).indices
        return x, torch.randint(length, (rows, number), device=device, generator=own)

    return make


def _torch(x: Tensor, indices: Tensor) -> Tensor:
    return torch.take_along_dim(x, indices, -1)


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
                _torch,
                dtype=torch.float32,
                directions=("backward",) if promised else ("forward", "backward"),
                compile=False,
                deterministic=not promised,
                devices=("cuda",),
            )


WORKLOADS = tuple(_workloads())
