"""Which kernels serve which taking along an axis, and what they guarantee."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import additions, sum_bound
from adjoint.ops.indexing.take_along_axis import eager
from adjoint.ops.indexing.take_along_axis.faults import INDEX_OUT_OF_RANGE, REPEATED_INDEX
from adjoint.ops.indexing.take_along_axis.layout import MAX_NUMBER, TOO_MANY_AXES, output_shape

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

TILE_BITS = 5
TILE = 1 << TILE_BITS
"""Entries of a tile, and tiles of a tile of the next level: part of every sum's bits."""

MAX_COMPARED = TILE
"""Entries of a line that are compared with each other: no sum has more than a tile, and it is quicker than sorting."""

MAX_ENTRIES = TILE * TILE
"""Entries of a line that a program sorts: no sum has more than a tile of tiles, and registers hold them."""

MAX_FILLED = 2**16
"""Elements of a line that the program which writes its sums fills with zeros; longer ones are filled before."""

MAX_SORTED = 2**23
"""Entries, or elements, that are sorted at once, unless a single line has more: it bounds the workspace."""

OUT_OF_RANGE = {
    "raise": "zero, reported with position and value: at once on the CPU, by adjoint.check() on a GPU",
    "zero": "zero",
}


def lines_at_once(size: int) -> int:
    """Lines that are sorted at once: as many as keep the workspace within bounds, but one at least."""
    return max(1, MAX_SORTED // max(1, size))


# ------------------------------------------------------------------------------------------- guarantee


def forward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    axis = problem.options[0]

    def bound(x: Tensor, indices: Tensor) -> Tensor:
        return torch.zeros(output_shape(x.shape, indices.shape, axis), dtype=torch.float64, device=x.device)

    return {
        "out": Guarantee(
            repeatable=True,
            batch_invariant="element",
            device_invariant=True,
            accumulator="none",
            roundings=0,
            error=Derived("0: bytes are copied", bound),
            special_values="copied, payloads of NaN included",
            out_of_range=OUT_OF_RANGE[problem.options[1]],
        )
    }


def backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    shape, axis, distinct = problem.options
    (dtype, _), double = problem.dtypes, problem.dtypes[0] == torch.float64

    def bound(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        elements = torch.arange(x.numel(), device=x.device).view(x.shape)
        keys = elements.narrow(axis, 0, min(1, shape[axis])) + (
            eager.from_the_beginning(indices.long(), shape[axis]) * elements.stride(axis)
        )
        valid = eager.is_valid(indices, shape[axis]).expand(dout.shape)
        flat, terms = keys.expand(dout.shape)[valid], dout[valid]

        def summed(values: Tensor) -> Tensor:
            return values.new_zeros(x.numel()).index_add(0, flat, values).view(x.shape)

        number = summed(torch.ones_like(flat))
        limit = sum_bound(summed(terms), summed(terms.abs()), number, additions(number, TILE), dtype)
        return limit.masked_fill_(number == 0, 0)

    order = f"an element's entries are added in their order within tiles of {TILE}, tiles in a fixed tree"
    promise = "no index repeats within a line: of one that does, one entry counts, and which is not stated"
    return {
        "dx": Guarantee(
            repeatable=True,
            batch_invariant="line",
            device_invariant=True,
            accumulator=str(wide_dtype(dtype)).removeprefix("torch."),
            roundings=1,
            error=Derived(
                "½ ulp + γ·Σ|dout| over the element's entries, γ = n·u / (1 − n·u), "
                f"u = 2^{-53 if double else -24}, n the additions an entry goes through",
                bound,
            ),
            domain=promise if distinct else f"every input; {order}",
            special_values="as IEEE sums that begin with +0: an element never taken is +0, no sum is −0",
            out_of_range="no gradient",
        )
    }


# ------------------------------------------------------------------------------------------ candidates


def _refuse(problem: Problem) -> str:
    """Why no kernel can serve a problem."""
    if TOO_MANY_AXES in problem.layout:
        return "the tensors' strides make more axes than its four; a contiguous copy of the strided one makes fewer"
    if problem.op == "take_along_axis_backward":
        shape, axis, _ = problem.options
        if shape[axis] > MAX_NUMBER:
            return f"counts up to {MAX_NUMBER} elements of a line, these are {shape[axis]}"
    return ""


def _refuse_few(problem: Problem) -> str:
    entries = problem.sizes[1]
    if entries > MAX_COMPARED:
        return f"compares the entries of a line with each other, up to {MAX_COMPARED} of them, these are {entries}"
    return _refuse(problem)


def _refuse_lines(problem: Problem) -> str:
    entries = problem.sizes[1]
    if entries > MAX_ENTRIES:
        return f"takes up to {MAX_ENTRIES} entries of a line at once, these are {entries}"
    return _refuse(problem)


def _refuse_scatter(problem: Problem) -> str:
    if not problem.options[2]:
        return "writes each entry to its element, so none may repeat, and distinct=True does not promise it"
    return _refuse(problem)


def _refuse_sorting(problem: Problem) -> str:
    entries = problem.sizes[1]
    if entries > MAX_NUMBER:
        return f"counts up to {MAX_NUMBER} entries of a line, these are {entries}"
    return _refuse(problem)


def _report_repeats(indices: Tensor, length: int, axis: int) -> None:
    """Reports the first index that its line has before."""
    if indices.numel():
        report(REPEATED_INDEX, indices, eager.repeats(indices, length, axis))


def _take_eagerly(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    x, indices, axis, out_of_range, _, verify = arguments
    length = x.shape[axis]
    if out_of_range == "raise" and outputs[0].numel():
        report(INDEX_OUT_OF_RANGE, indices, ~eager.is_valid(indices, length))
    if verify:
        _report_repeats(indices, length, axis)
    eager.take(x, indices, axis, outputs[0])


def _sum_eagerly(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dout, indices, shape, axis, distinct = arguments
    if distinct:
        eager.scatter(dout, indices, axis, outputs[0])
    else:
        eager.sum_entries(dout, indices, shape, axis, TILE, outputs[0])


def _take(setup: Setup) -> Execute:
    from adjoint.ops.indexing.take_along_axis.triton import take

    execute = take.take(setup)
    if not setup.problem.options[-1]:
        return execute

    def execute_verified(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, indices, axis = arguments[:3]
        _report_repeats(indices, x.shape[axis], axis)
        execute(arguments, outputs, workspace)

    return execute_verified


TAKE = (
    Candidate(
        name="triton.take",
        backend="triton",
        kernel="take_forward",
        revision=1,
        refuse=_refuse,
        guarantee=forward_guarantee,
        setup=_take,
        schedules=_SCHEDULES,
    ),
    in_pytorch("eager.take", forward_guarantee, allocating_outputs(_take_eagerly)),
)


def _backward(name: str, kernel: str, refuse: Callable[[Problem], str], launch: str) -> Candidate:
    """A plan of the adjoint; `launch` names its setup, as "module.function" among the kernels."""
    module, _, function = launch.partition(".")

    def setup(setup: Setup) -> Execute:
        from importlib import import_module

        setup.add_numeric(tile=TILE)
        bind: Callable[[Setup], Execute] = getattr(
            import_module(f"adjoint.ops.indexing.take_along_axis.triton.{module}"), function
        )
        return bind(setup)

    return Candidate(
        name=f"triton.{name}",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=backward_guarantee,
        setup=setup,
        schedules=_SCHEDULES,
    )


TAKE_BACKWARD = (
    _backward("few", "take_backward_few", _refuse_few, "lines.by_comparing"),
    _backward("lines", "take_backward_lines", _refuse_lines, "lines.by_lines"),
    _backward("scatter", "take_scatter", _refuse_scatter, "lines.scatter"),
    _backward("sorted", "take_backward_sorted", _refuse_sorting, "sorting.by_sorting"),
    in_pytorch(
        "eager.sorted",
        backward_guarantee,
        allocating_outputs(_sum_eagerly),
        lambda problem: {"tile": TILE},
        waits=lambda problem: not problem.options[2],
    ),
)
