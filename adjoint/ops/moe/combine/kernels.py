"""Triton kernels of combine's backward; forward, it is the sum that it shares with dispatch.

moe_scatter   one token's row to the rows of its entries, as it is or times each entry's weight
moe_dots      one number for each entry: its token's gradient times its row
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check
from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.ops.moe.combine.plans import DOT_WIDTH, NEED_ROWS, NEED_WEIGHTS, ROW_OUT_OF_RANGE
from adjoint.ops.moe.kernels import row_start
from adjoint.ops.moe.token_rows.kernels import MOVE, RowKernel, RowSum, TiledKernel, add_copies, token_rows


@kernel(budget=MOVE, schedule=("ROWS", "BLOCK"))
@triton.jit
def moe_scatter(
    source: PointerIf16.element, weights: Pointer.weight, inverse: Pointer.int32, offsets: Pointer.int32,
    out: PointerIf16.element, tokens: Int32, slots: Int32, experts: Int32, columns: Int32If16,
    inner: Int32, outer: Int64, step: Int64If16, column_stride: Int64,
    WEIGHTED: tl.constexpr, DOUBLE: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[inverse[t, j], :] = source[t, :], or weights[t, j] times it."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = (column < columns)[None, :]
    start = row_start(token, inner, outer, step, STRIDED)
    distance = column * column_stride if STRIDED else column
    value = tl.load(source + start[:, None] + distance[None, :], (token < tokens)[:, None] & in_row, other=0)
    if WEIGHTED:
        value = value.to(tl.float64 if DOUBLE else tl.float32)
    last = tl.load(offsets + experts)
    zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
    for slot in range(0, slots):
        entry = token * slots + slot
        row = tl.load(inverse + entry, token < tokens, other=-1)
        among = (row >= 0) & (row < tokens * slots)
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        result = value
        if WEIGHTED:
            result = value * tl.load(weights + entry, token < tokens, other=0).to(value.dtype)[:, None]
        # Nothing here reads it again: the cache is for what is still to be read.
        valid = (among & (row < last))[:, None] & in_row
        tl.store(target, result.to(out.dtype.element_ty), valid, eviction_policy="evict_first")
        tl.store(target, zeros, (among & (row >= last))[:, None] & in_row)


@triton.jit
def sum_neighbours(values):
    """The sum of each row of [rows, 2ⁿ] values, n ≤ 8: of neighbours, of neighbouring sums, and so on.

    Two at a time: a sum of more has the order that the layout of threads gives it, which follows the alignment.
    """
    for _ in tl.static_range(8):
        if values.shape[1] > 1:
            values = tl.sum(tl.reshape(values, (values.shape[0], values.shape[1] // 2, 2)), 2)
    return tl.reshape(values, (values.shape[0],))


@kernel(budget=Budget(registers=255, shared_bytes=16384), numeric={"dot_width": "WIDTH"}, schedule=("ROWS",))
@triton.jit
def moe_dots(
    gradient: PointerIf16.element, rows: PointerIf16.element, inverse: Pointer.int32, offsets: Pointer.int32,
    out: PointerIf16.weight, tokens: Int32, slots: Int32, experts: Int32, columns: Int32If16,
    inner: Int32, outer: Int64, step: Int64If16, column_stride: Int64, row_stride: Int64If16,
    row_column_stride: Int64,
    DOUBLE: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[t, j] = gradient[t, :] · rows[inverse[t, j], :]: columns a width apart in their order, then neighbours."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tokens * slots
    row = tl.load(inverse + entry, entry < count, other=-1)
    counts = (row >= 0) & (row < tl.minimum(tl.load(offsets + experts), count))
    token = tl.where(counts, entry // slots, 0)
    left_start = row_start(token, inner, outer, step, STRIDED)
    right_start = row.to(tl.int64) * row_stride
    total = tl.zeros([ROWS, WIDTH], tl.float64 if DOUBLE else tl.float32)
    for first in range(0, columns, WIDTH):
        column = first + tl.arange(0, WIDTH)
        mask = counts[:, None] & (column < columns)[None, :]
        left_step = column * column_stride if STRIDED else column
        right_step = column * row_column_stride if STRIDED else column
        left = tl.load(gradient + left_start[:, None] + left_step[None, :], mask, other=0)
        right = tl.load(rows + right_start[:, None] + right_step[None, :], mask, other=0)
        total += left.to(total.dtype) * right.to(total.dtype)
    tl.store(out + entry, sum_neighbours(total).to(out.dtype.element_ty), entry < count)


# ------------------------------------------------------------------------------------------------ launches


def _weight(setup: Setup) -> torch.dtype | None:
    """The dtype of the weights; None where there are none."""
    return setup.problem.dtypes[1] if len(setup.problem.dtypes) > 1 else None


def combine(setup: Setup) -> Execute:
    """Each token's sum of its rows."""
    row_sum, on_cpu = RowSum(setup, _weight(setup), ROW_OUT_OF_RANGE), setup.device.type == "cpu"
    add_copies(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        memory, (rows, weights, inverse, offsets) = setup.memory(workspace), arguments
        weights, inverse = memory.contiguous("weights", weights), memory.contiguous("inverse", inverse)
        row_sum.launch(rows, weights, inverse, memory.contiguous("offsets", offsets), *outputs)
        if on_cpu:
            check()

    return execute


def combine_backward(setup: Setup) -> Execute:
    """The gradients of rows and weights, as far as they are needed."""
    tokens, slots, experts, columns = setup.problem.sizes
    element, weight = setup.problem.dtypes[0], _weight(setup)
    (need,) = setup.problem.options
    facts: dict[str, Any] = {"element": element, "weight": weight or torch.float32, "DOUBLE": element == torch.float64}
    if need & NEED_ROWS:
        scatter = TiledKernel(setup, moe_scatter, "scatter", tokens, WEIGHTED=weight is not None, **facts)
    if need & NEED_WEIGHTS:
        entries = setup.schedule["dots_entries"]
        warps = min(setup.schedule["dots_warps"], max(1, DOT_WIDTH * entries // 256))  # none without work
        dots = RowKernel(setup, moe_dots, ROWS=entries, WIDTH=DOT_WIDTH, num_warps=warps, **facts)
        dots_grid = (-(-tokens * slots // entries),)
    add_copies(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        memory, (dy, rows, weights, inverse, offsets, _) = setup.memory(workspace), arguments
        inverse, offsets = memory.contiguous("inverse", inverse), memory.contiguous("offsets", offsets)
        dy, inner, outer, step = token_rows(memory.contiguous("dy", dy))
        column_stride, (drows, dweights) = dy.stride(-1), outputs
        if need & NEED_ROWS:
            weights = inverse if weights is None else memory.contiguous("weights", weights)
            scatter.choose(outer, step, column_stride == 1, dy, drows).launch(
                scatter.grid, source=dy, weights=weights, inverse=inverse, offsets=offsets, out=drows, tokens=tokens,
                slots=slots, experts=experts, columns=columns, inner=inner, outer=outer, step=step,
                column_stride=column_stride,
            )  # fmt: skip
        if need & NEED_WEIGHTS:
            row_stride, row_column_stride = rows.stride()
            is_adjacent = column_stride == row_column_stride == 1
            dots.choose(outer, step | row_stride, is_adjacent, dy, rows, dweights).launch(
                dots_grid, gradient=dy, rows=rows, inverse=inverse, offsets=offsets, out=dweights, tokens=tokens,
                slots=slots, experts=experts, columns=columns, inner=inner, outer=outer, step=step,
                column_stride=column_stride, row_stride=row_stride, row_column_stride=row_column_stride,
            )  # fmt: skip

    return execute
