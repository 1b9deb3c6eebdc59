"""Triton kernels of dispatch; its backward is the sum that it shares with combine.

moe_gather    rows from the rows of their tokens, in an order that finds these in the cache
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check
from adjoint.core.kernels import Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.ops.moe.dispatch.plans import EXPERT_OUT_OF_RANGE
from adjoint.ops.moe.kernels import row_start
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout.kernels import LayoutSort
from adjoint.ops.moe.token_rows.kernels import MOVE, RowSum, TiledKernel, add_copies, token_rows


@kernel(budget=MOVE, schedule=("ROWS", "BLOCK"))
@triton.jit
def moe_gather(
    source: PointerIf16.element, order: Pointer.int64, out: PointerIf16.element, tokens: Int32, slots: Int32,
    columns: Int32If16, inner: Int32, outer: Int64, step: Int64If16, column_stride: Int64,
    STRIDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row, :] = source[token, :] for the rows and entries of `order`; zeros for an entry without an expert.

    Tokens near each other have rows all over `out`. In the order of tokens, writes would be scattered; in the order of
    rows, a token would be read from memory once for every slot. So rows are filled chunk by chunk of tokens: those of a
    chunk and an expert are adjacent, and the tokens stay in the cache until the last of their rows is written.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tokens * slots
    both = tl.load(order + place, place < count, other=0)
    row = both >> 32
    entry = both.to(tl.int32)  # the lower half
    inside = (place < count)[:, None] & (column < columns)[None, :]
    start = row_start(entry // slots, inner, outer, step, STRIDED)
    distance = column * column_stride if STRIDED else column
    valid = inside & (entry < count)[:, None]
    value = tl.load(source + start[:, None] + distance[None, :], valid, other=0, eviction_policy="evict_last")
    tl.store(out + row[:, None] * columns + column[None, :], value, inside, eviction_policy="evict_first")


def dispatch(setup: Setup) -> Execute:
    """The rows and their layout."""
    tokens, slots, experts, columns = setup.problem.sizes
    element, index = setup.problem.dtypes
    sort = LayoutSort(setup, index, tokens * slots, experts, EXPERT_OUT_OF_RANGE, ordered=True)
    gather = TiledKernel(setup, moe_gather, "gather", tokens * slots, element=element)
    add_copies(setup)
    # As many bytes of tokens as the cache keeps until all of their rows are filled.
    chunk = max(1, setup.schedule["gather_chunk"] * 2 // element.itemsize // sort.span)
    on_cpu = setup.device.type == "cpu"

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        memory = setup.memory(workspace)
        rows, *layout = outputs
        sort.write(memory, memory.contiguous("indices", arguments[1]), Layout(*layout), chunk)
        x, inner, outer, step = token_rows(memory.contiguous("x", arguments[0]))
        column_stride = x.stride(-1)
        gather.choose(outer, step, column_stride == 1, x, rows).launch(
            gather.grid, source=x, order=memory["order"], out=rows, tokens=tokens, slots=slots, columns=columns,
            inner=inner, outer=outer, step=step, column_stride=column_stride,
        )  # fmt: skip
        if on_cpu:
            check()

    return execute


def dispatch_backward(setup: Setup) -> Execute:
    """The gradient of the tokens."""
    row_sum = RowSum(setup, None, None)
    add_copies(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        memory, (drows, inverse, offsets) = setup.memory(workspace), arguments
        inverse, offsets = memory.contiguous("inverse", inverse), memory.contiguous("offsets", offsets)
        row_sum.launch(drows, None, inverse, offsets, *outputs)

    return execute
