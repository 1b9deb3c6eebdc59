"""Products over rows, summed into tokens: y from the hidden values, and dx from their gradients."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Pointer, PointerIf16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.moe.experts.triton.products import tile_of_program
from adjoint.ops.moe.experts.triton.tiles import PRODUCT, Tiles, bind_over_rows
from adjoint.ops.moe.layout import Layout


@kernel(budget=PRODUCT, numeric=("DEPTH",), schedule=("WIDTH", "ROWS", "COLUMNS", "GROUP"))
@triton.jit
def moe_experts_product(
    rows: PointerIf16.element, weight: PointerIf16.element, tile_expert: Pointer.int32, tile_begin: Pointer.int32,
    tile_end: Pointer.int32, out: PointerIf16.element, chunk: Int32,
    K: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[row, c] = Σ_k rows[row, k] · weight[e][k, chunk·WIDTH + c], for WIDTH columns of N.

    BY_COLUMN, the weight of an expert is [N, K] and read transposed; else it is [K, N].
    """
    tile, column_tile = tile_of_program(tl.cdiv(WIDTH, COLUMNS), GROUP)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    end = tl.load(tile_end + tile)
    row = begin + tl.arange(0, ROWS)
    place = tl.minimum(row, end - 1).to(tl.int64)
    inner = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    column = chunk * WIDTH + inner
    depth = tl.arange(0, DEPTH)
    left = rows + place[:, None] * K + depth[None, :]
    right = weight + expert.to(tl.int64) * (K * N)
    if BY_COLUMN:
        right += (tl.minimum(column, N - 1) * K)[None, :] + depth[:, None]
    else:
        right += column[None, :] + (depth * N)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            a = tl.load(left)
        else:
            a = tl.load(left, (depth < K - start)[None, :], other=0)
        if BY_COLUMN:
            if K % DEPTH == 0:
                b = tl.load(right)
            else:
                b = tl.load(right, (depth < K - start)[:, None], other=0)
            right += DEPTH
        else:
            if K % DEPTH == 0 and WIDTH % COLUMNS == 0 and N % WIDTH == 0:
                b = tl.load(right)
            else:
                b = tl.load(right, (depth < K - start)[:, None] & (column < N)[None, :], other=0)
            right += DEPTH * N
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
        left += DEPTH
    mask = (row < end)[:, None] & ((inner < WIDTH) & (column < N))[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + inner[None, :], total.to(out.dtype.element_ty), mask)


@kernel(budget=Budget(registers=128), schedule=("WIDTH", "TOKENS", "BLOCK", "UNROLL"))
@triton.jit
def moe_experts_sum_slots(
    rows: PointerIf16.element, inverse: Pointer.int32, weights: Pointer.weight, offsets: Pointer.int32,
    out: PointerIf16.element, count: Int32, experts: Int32, chunk: Int32, token_stride: Int64, slot_stride: Int64,
    SLOTS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[t, chunk·WIDTH + c] = Σ_j w[t, j] · rows[inverse[t, j], c] for WIDTH columns, slot after slot.

    An entry whose expert is out of range has a row past the last expert's, which nobody has written: it adds nothing.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = chunk * WIDTH + inner
    inside = token < count
    in_row = (inner < WIDTH) & (column < N)
    valid_rows = tl.load(offsets + experts)
    total = tl.zeros([TOKENS, BLOCK], tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for first in range(0, SLOTS, UNROLL):
        for step in tl.static_range(UNROLL):  # loads of several rows are on their way at once
            slot = first + step
            present = inside & (slot < SLOTS)
            row = tl.load(inverse + token * SLOTS + slot, present, other=0)
            valid = present & (row < valid_rows)
            mask = valid[:, None] & in_row[None, :]
            term = tl.load(rows + row.to(tl.int64)[:, None] * WIDTH + inner[None, :], mask, other=0).to(total.dtype)
            if WEIGHTED:
                weight = tl.load(weights + token * token_stride + slot * slot_stride, valid, other=0)
                term = weight.to(total.dtype)[:, None] * term
            total += term
    mask = inside[:, None] & in_row[None, :]
    tl.store(out + token[:, None] * N + column[None, :], total.to(out.dtype.element_ty), mask)


# ------------------------------------------------------------------------------------------------ launches


SUM_COLUMNS = 512
"""Columns of a token that one program sums."""


def chunk_width(setup: Setup) -> int:
    """Columns of rows that are in memory at once."""
    return min(setup.schedule["chunk"], -(-setup.problem.sizes[1] // 16) * 16)


class SlotSums:
    """out[t] = Σ over slots of rows, some columns at a time, which share the memory of a product.

    Rows are D columns wide and have a line for each row: more than anything else. Which columns share a launch changes
    no bit. Rows are multiplied by their routing weights where they are `weighted`.

    Attributes:
        width, chunks: columns of a launch, and launches.
    """

    def __init__(self, setup: Setup, weighted: bool, width: int) -> None:
        self._tokens, hidden, self._experts, _, slots = setup.problem.sizes
        element, weight = setup.problem.dtypes[0], setup.problem.dtypes[-1]
        self.width, self.chunks = width, -(-hidden // width)
        block, tokens = min(1 << (width - 1).bit_length(), SUM_COLUMNS), setup.schedule["sum_tokens"]
        unroll, warps = setup.schedule["sum_unroll"], max(1, min(setup.schedule["sum_warps"], block // 256))
        self._sums = {
            aligned: setup.kernel(
                moe_experts_sum_slots, element=element, weight=weight, aligned=aligned, SLOTS=slots, N=hidden,
                WIDTH=width, WEIGHTED=weighted, TOKENS=tokens, BLOCK=block,
                UNROLL=unroll if aligned else max(1, unroll // 2),  # narrow loads are many, and registers few
                num_warps=warps,
            )
            for aligned in (True, False)
        }  # fmt: skip
        self._grid = (-(-self._tokens // tokens), -(-width // block))

    def launch(self, aligned: bool, chunk: int, rows: Any, weights: Tensor, layout: Layout, out: Tensor) -> None:
        """Sums the columns of a chunk."""
        token_stride, slot_stride = weights.stride()
        self._sums[aligned].launch(
            self._grid, rows=rows, inverse=layout.inverse, weights=weights, offsets=layout.offsets, out=out,
            count=self._tokens, experts=self._experts, chunk=chunk, token_stride=token_stride, slot_stride=slot_stride,
        )  # fmt: skip


class TokenSums:
    """A product over rows, summed into tokens.

    The weight of an expert is [D, terms] `by_column`, else the other way round; rows are multiplied by their routing
    weights where they are `weighted`.
    """

    def __init__(self, setup: Setup, part: str, terms: int, by_column: bool, weighted: bool) -> None:
        hidden = setup.problem.sizes[1]
        width = chunk_width(setup)
        self.products = bind_over_rows(
            setup, moe_experts_product, part, width, K=terms, N=hidden, WIDTH=width, BY_COLUMN=by_column
        )
        self._sums = SlotSums(setup, weighted, width)
        self.width = self._sums.width

    def launch(
        self, aligned: bool, rows: Any, weight: Tensor, tiles: Tiles, scratch: Any, weights: Tensor, layout: Layout,
        out: Tensor,
    ) -> None:  # fmt: skip
        """Sums the rows times an expert's weight; `scratch` has room for `width` columns of every row."""
        for chunk in range(self._sums.chunks):
            self.products[aligned].launch(
                rows=rows, weight=weight, tile_expert=tiles.expert, tile_begin=tiles.begin, tile_end=tiles.end,
                out=scratch, chunk=chunk,
            )  # fmt: skip
            self._sums.launch(aligned, chunk, scratch, weights, layout, out)
