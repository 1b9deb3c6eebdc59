"""Which kernels serve which taking along an axis, and what they guarantee."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from adjoint.core.errors import register_fault, report
from adjoint.core.guarantee import Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.device.sums import IN_RANGE, copy_guarantee, group_sums_bound, invariant_guarantee, sum_error
from adjoint.ops.indexing.take_along_axis import eager
from adjoint.ops.indexing.take_along_axis.layout import MAX_NUMBER, TOO_MANY_AXES

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

TILE_BITS = 5
TILE = 1 << TILE_BITS
"""The number of entries in a tile, and of tiles in a tile of the next level. It is part of every sum's bits."""

MAX_COMPARED = TILE
"""The most entries of a line that are compared with each other, which is quicker than sorting. No sum has more than a
tile then."""

MAX_ENTRIES = TILE * TILE
"""The most entries of a line that a program sorts. No sum has more than a tile of tiles then, and they fit in
registers."""

MAX_FILLED = 2**16
"""The longest line that the program that writes its sums fills with zeros. Longer lines are filled before."""

MAX_SORTED = 2**23
"""The most entries, or elements, that are sorted at once, unless a single line has more. It bounds the workspace."""

INDEX_OUT_OF_RANGE = register_fault(
    "take_along_axis: indices must be at least minus the length of the axis and less than it, "
    'got {value} at position {position} (counted in order); out_of_range="zero" gives zeros there instead'
)
REPEATED_INDEX = register_fault(
    "take_along_axis: distinct=True promises that no index repeats within a line, but {value} at position {position} "
    "(counted in order) was there before; leave distinct out, and gradients of repeated indices are added"
)
OUT_OF_RANGE = {
    "raise": "zero, reported with position and value: at once on the CPU, by adjoint.check() on a GPU",
    "zero": "zero",
}


def lines_at_once(size: int) -> int:
    """The number of lines that are sorted at once: as many as the workspace allows, but at least one."""
    return max(1, MAX_SORTED // max(1, size))


# ------------------------------------------------------------------------------------------- guarantee


def forward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    return copy_guarantee("element", OUT_OF_RANGE[problem.options[1]])


def backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    (_, axis, distinct), dtype = problem.options, problem.dtypes[0]

    def bound(dout: Tensor, x: Tensor, indices: Tensor) -> Tensor:
        if x.numel() == 0:
            return x
        keys = eager.elements_of(indices, x.shape, axis).reshape(-1)
        counts = keys < x.numel()
        terms = dout.reshape(-1)[counts]
        return group_sums_bound(terms, keys[counts], x.numel(), TILE, dtype).view(x.shape)

    order = f"an element's entries are added in their order within tiles of {TILE}, tiles in a fixed tree"
    promise = "no index repeats within a line: of one that does, one entry counts, and which is not stated"
    return {
        "dx": invariant_guarantee(
            "line",
            sum_error(bound, "dout| over the element's entries", "an entry", dtype),
            dtype,
            domain=promise if distinct else f"{IN_RANGE}; {order}",
            special_values="as IEEE sums that begin with +0: an element never taken is +0, no sum is −0",
            out_of_range="no gradient",
        )
    }


# ------------------------------------------------------------------------------------------ candidates


def _refuse(problem: Problem, most: int = MAX_NUMBER, words: str = "counts up to {} entries of a line") -> str:
    """Why kernels that take up to `most` entries of a line cannot serve a problem; `words` state that limit."""
    is_backward = problem.op == "take_along_axis_backward"
    if is_backward and problem.sizes[1] > most:
        return f"{words.format(most)}, these are {problem.sizes[1]}"
    if TOO_MANY_AXES in problem.layout:
        return "the tensors' strides make more axes than its four; a contiguous copy of the strided one makes fewer"
    length = problem.options[0][problem.options[1]] if is_backward else 0
    return f"counts up to {MAX_NUMBER} elements of a line, these are {length}" if length > MAX_NUMBER else ""


def _refuse_scatter(problem: Problem) -> str:
    if not problem.options[2]:
        return "writes each entry to its element, so none may repeat, and distinct=True does not promise it"
    return _refuse(problem, problem.sizes[1])


def report_repeats(indices: Tensor, length: int, axis: int) -> None:
    """Reports the first index that occurs earlier in its line."""
    if indices.numel():
        report(REPEATED_INDEX, indices, eager.repeats(indices, length, axis))


def _take_eagerly(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    x, indices, axis, out_of_range, _, verify = arguments
    length = x.shape[axis]
    if out_of_range == "raise" and outputs[0].numel():
        report(INDEX_OUT_OF_RANGE, indices, ~eager.is_valid(indices, length))
    if verify:
        report_repeats(indices, length, axis)
    eager.take(x, indices, axis, outputs[0])


def _sum_eagerly(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dout, indices, shape, axis, distinct = arguments
    if distinct:
        eager.scatter(dout, indices, axis, outputs[0])
    else:
        eager.sum_entries(dout, indices, shape, axis, TILE, outputs[0])


def _on_kernels(
    name: str, kernel: str, setup: str, refuse: Callable[[Problem], str], guarantee: Any = backward_guarantee
) -> Candidate:
    """A candidate on kernels. `setup` is "module:function" in their folder."""
    return Candidate(
        name=f"triton.{name}",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=guarantee,
        setup=imported(f"adjoint.ops.indexing.take_along_axis.triton.{setup}"),
        schedules=_SCHEDULES,
    )


_COMPARES = "compares the entries of a line with each other, up to {} of them"
_TAKES = "takes up to {} entries of a line at once"

TAKE = (
    _on_kernels("take", "take_forward", "take:take", _refuse, forward_guarantee),
    in_pytorch("eager.take", forward_guarantee, allocating_outputs(_take_eagerly)),
)
TAKE_BACKWARD = (
    _on_kernels("few", "take_backward_few", "lines:by_comparing", partial(_refuse, most=MAX_COMPARED, words=_COMPARES)),
    _on_kernels("lines", "take_backward_lines", "lines:by_lines", partial(_refuse, most=MAX_ENTRIES, words=_TAKES)),
    _on_kernels("scatter", "take_scatter", "lines:scatter", _refuse_scatter),
    _on_kernels("sorted", "take_backward_sorted", "sorting:by_sorting", _refuse),
    in_pytorch(
        "eager.sorted",
        backward_guarantee,
        allocating_outputs(_sum_eagerly),
        lambda problem: {"tile": TILE},
        waits=lambda problem: not problem.options[2],
    ),
)
