"""The forward of taking along an axis: a kernel, and what launches it."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Budget, Int, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.device.faults import record
from adjoint.ops.indexing.take_along_axis.faults import INDEX_OUT_OF_RANGE
from adjoint.ops.indexing.take_along_axis.layout import LARGE, elements_of
from adjoint.ops.indexing.take_along_axis.triton.offsets import bind_for_axes, from_the_beginning, offset_of

COPY = Budget(registers=192)  # with many axes; with few, a sixth of it


@kernel(budget=COPY, schedule=("BLOCK",))
@triton.jit
def take_forward(
    x: Pointer.element, indices: Pointer.index, out: Pointer.element, status_word: Pointer.int64, fault: Int32,
    count: Int.number, length: Int32, axis_step: Int64, size_1: Int.number, size_2: Int.number, size_3: Int.number,
    x_step_0: Int64, x_step_1: Int64, x_step_2: Int64, x_step_3: Int64,
    index_step_0: Int64, index_step_1: Int64, index_step_2: Int64, index_step_3: Int64,
    number_step_0: Int64, number_step_1: Int64, number_step_2: Int64, number_step_3: Int64,
    RAISE: tl.constexpr, MANY: tl.constexpr, PLAIN: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = the elements of x at the indices, and 0 where an index is out of range."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LARGE:
        flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count
    place = flat
    if not PLAIN:
        place = offset_of(
            flat, size_1, size_2, size_3, index_step_0, index_step_1, index_step_2, index_step_3, False, MANY
        )  # fmt: skip
    index = tl.load(indices + place, inside, other=0)
    element = from_the_beginning(index, length)
    valid = (element >= 0) & (element < length)
    if RAISE:
        number = flat
        if not PLAIN:
            number = offset_of(
                flat, size_1, size_2, size_3, number_step_0, number_step_1, number_step_2, number_step_3, False, MANY
            )  # fmt: skip
        record(status_word, fault, number, index, inside & (valid == 0))
    line = offset_of(flat, size_1, size_2, size_3, x_step_0, x_step_1, x_step_2, x_step_3, False, MANY)
    value = tl.load(x + line + tl.where(valid, element, 0) * axis_step, inside & valid, other=0)
    tl.store(out + flat, value, inside)


def take(setup: Setup) -> Execute:
    """out = the elements of x at the indices."""
    problem, device, block = setup.problem, setup.device, setup.schedule["take_block"]
    (element, index), large = problem.dtypes, LARGE in problem.layout

    def bind(many: bool) -> dict[bool, Launch]:
        return {
            plain: setup.kernel(
                take_forward, element=element, index=index, number=torch.int64 if large else torch.int32,
                RAISE=problem.options[1] == "raise", MANY=many, PLAIN=plain, LARGE=large, BLOCK=block,
                num_warps=setup.schedule["take_warps"],
            )
            for plain in (True, False)
        }  # fmt: skip

    by_indices = bind_for_axes(setup, bind)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, indices, axis = arguments[:3]
        (out,) = outputs
        count = out.numel()
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
