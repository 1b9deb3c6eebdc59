"""Where elements lie, and which element an index means; and the forward of taking along an axis."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Budget, Int, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.device.faults import record
from adjoint.ops.indexing.take_along_axis.layout import LARGE, MANY_AXES, elements_of
from adjoint.ops.indexing.take_along_axis.plans import INDEX_OUT_OF_RANGE, report_repeats

COPY = Budget(registers=192)  # with many axes; with few, a sixth of it


@triton.jit
def offset_of(number, sizes, steps, ONE: tl.constexpr, MANY: tl.constexpr):
    """Where the element with a number lies, along MANY axes, or ONE, or else two.

    Sizes are those of all axes but the outermost. Steps are 64 bits wide, and so is what is multiplied by them.
    """
    size_1, size_2, size_3 = sizes
    step_0, step_1, step_2, step_3 = steps
    if MANY:
        rest = number // size_3
        offset = (number % size_3) * step_3
        offset += (rest % size_2) * step_2
        rest = rest // size_2
        return offset + (rest % size_1) * step_1 + (rest // size_1) * step_0
    elif ONE:
        return number * step_3
    else:
        rest = number // size_3
        offset = (number % size_3) * step_3
        return offset + rest * step_2


@triton.jit
def place_of(line, entry, line_sizes, line_steps, entry_sizes, entry_steps, ONE: tl.constexpr, MANY: tl.constexpr):
    """Where an entry of a line lies."""
    return offset_of(line, line_sizes, line_steps, ONE, MANY) + offset_of(entry, entry_sizes, entry_steps, True, MANY)


@triton.jit
def from_the_beginning(index, length):
    """An index below 0 counts from the end."""
    return tl.where(index < 0, index + length, index)


@kernel(budget=COPY, schedule=("BLOCK",))
@triton.jit
def take_forward(
    x: Pointer.element, indices: Pointer.index, out: Pointer.element, status_word: Pointer.int64, fault: Int32,
    count: Int.number, length: Int32, axis_step: Int64, sizes: Int.number * 3, x_steps: Int64 * 4,
    index_steps: Int64 * 4, number_steps: Int64 * 4,
    RAISE: tl.constexpr, MANY: tl.constexpr, PLAIN: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = the elements of x at the indices, and 0 where an index is out of range."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LARGE:
        flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count
    place = flat if PLAIN else offset_of(flat, sizes, index_steps, False, MANY)
    index = tl.load(indices + place, inside, other=0)
    element = from_the_beginning(index, length)
    valid = (element >= 0) & (element < length)
    if RAISE:
        number = flat if PLAIN else offset_of(flat, sizes, number_steps, False, MANY)
        record(status_word, fault, number, index, inside & (valid == 0))
    line = offset_of(flat, sizes, x_steps, False, MANY)
    value = tl.load(x + line + tl.where(valid, element, 0) * axis_step, inside & valid, other=0)
    tl.store(out + flat, value, inside)


Bound = TypeVar("Bound")


def bind_for_axes(setup: Setup, bind: Callable[[bool], Bound]) -> Bound:
    """Binds kernels with `bind(many)`, whether a layout has many axes or few.

    Where it has many, those for few are bound besides: a batch of one has fewer, and must not compile anew.
    """
    few = bind(False)
    return bind(True) if MANY_AXES in setup.problem.layout else few


def take(setup: Setup) -> Execute:
    """out = the elements of x at the indices."""
    problem, device, block = setup.problem, setup.device, setup.schedule["take_block"]
    (element, index), large = problem.dtypes, LARGE in problem.layout
    *_, raises, _, verify = problem.options

    def bind(many: bool) -> dict[bool, Launch]:
        return {
            plain: setup.kernel(
                take_forward, element=element, index=index, number=torch.int64 if large else torch.int32,
                RAISE=raises == "raise", MANY=many, PLAIN=plain, LARGE=large, BLOCK=block,
                num_warps=setup.schedule["take_warps"],
            )
            for plain in (True, False)
        }  # fmt: skip

    by_indices = bind_for_axes(setup, bind)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, indices, axis = arguments[:3]
        (out,) = outputs
        count = out.numel()
        if verify:
            report_repeats(indices, x.shape[axis], axis)
        if count == 0:
            return
        places = elements_of(x, indices, axis)
        by_indices[places.plain].launch(
            (-(-count // block),), x=x, indices=indices, out=out, status_word=status_word(device),
            fault=INDEX_OUT_OF_RANGE.row, count=count, length=x.shape[axis], axis_step=x.stride(axis),
            **places.numbers,
        )  # fmt: skip
        if device.type == "cpu":
            check()

    return execute
