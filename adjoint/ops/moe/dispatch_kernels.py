"""Triton kernels of dispatch and combine, both directions.

    moe_gather    rows from the rows of their tokens, in an order that finds these in the cache
    moe_scatter   one token's row to the rows of its entries, as it is or times each entry's weight
    moe_sum       one token's row from the rows of its entries, one after the other
    moe_dots      one number for each entry: its token's gradient times its row

Entry token·slots + slot has the row inverse[entry]. Rows past the last offset belong to no expert: they are
written as zeros and count for nothing.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record
from adjoint.ops.moe.dispatch_plans import DOT_WIDTH

_WIDTH = tl.constexpr(DOT_WIDTH)


@triton.jit
def token_start(token, inner, outer_stride, inner_stride, SPLIT: tl.constexpr):
    """Where the row of each token begins."""
    if SPLIT:
        return (token // inner).to(tl.int64) * outer_stride + (token % inner).to(tl.int64) * inner_stride
    return token.to(tl.int64) * inner_stride


@triton.jit
def moe_gather(
    source, order, out, tokens, slots, columns, inner, outer_stride, inner_stride, column_stride,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row, :] = source[token, :] for the rows and entries of `order`; zeros for an entry without an expert.

    Tokens near each other have rows all over `out`, and memory likes neither to be written that way nor to be read
    once for every slot. So rows are filled chunk by chunk of tokens: those of a chunk and an expert are adjacent, and
    the tokens stay in the cache until the last of their rows is written.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tokens * slots
    both = tl.load(order + place, place < count, other=0)
    row = both >> 32
    entry = both.to(tl.int32)  # the lower half
    inside = (place < count)[:, None] & (column < columns)[None, :]
    start = token_start(entry // slots, inner, outer_stride, inner_stride, SPLIT)
    step = column if UNIT else column * column_stride
    known = inside & (entry < count)[:, None]
    value = tl.load(source + start[:, None] + step[None, :], known, other=0, eviction_policy="evict_last")
    tl.store(out + row[:, None] * columns + column[None, :], value, inside, eviction_policy="evict_first")


@triton.jit
def moe_scatter(
    source, weights, inverse, offsets, out, tokens, slots, experts, columns,
    inner, outer_stride, inner_stride, column_stride,
    SCALED: tl.constexpr, DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[inverse[t, j], :] = source[t, :], or weights[t, j] times it."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = (column < columns)[None, :]
    start = token_start(token, inner, outer_stride, inner_stride, SPLIT)
    step = column if UNIT else column * column_stride
    value = tl.load(source + start[:, None] + step[None, :], (token < tokens)[:, None] & in_row, other=0)
    if SCALED:
        value = value.to(tl.float64 if DOUBLE else tl.float32)
    last = tl.load(offsets + experts)
    zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
    for slot in range(0, slots):
        entry = token * slots + slot
        row = tl.load(inverse + entry, token < tokens, other=-1)
        among = (row >= 0) & (row < tokens * slots)
        target = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        result = value
        if SCALED:
            result = value * tl.load(weights + entry, token < tokens, other=0).to(value.dtype)[:, None]
        # Nobody here reads it again: what the cache should keep is what is still to be read.
        known = (among & (row < last))[:, None] & in_row
        tl.store(target, result.to(out.dtype.element_ty), known, eviction_policy="evict_first")
        tl.store(target, zeros, (among & (row >= last))[:, None] & in_row)


@triton.jit
def moe_sum(
    rows, weights, inverse, offsets, status_word, fault, out, tokens, slots, experts, columns,
    row_stride, column_stride,
    SCALED: tl.constexpr, RAISE: tl.constexpr, DOUBLE: tl.constexpr, UNIT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, :] = Σ over j of rows[inverse[t, j], :], or of weights[t, j] times it, in the order of j."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = (column < columns)[None, :]
    step = column if UNIT else column * column_stride
    last = tl.minimum(tl.load(offsets + experts), tokens * slots)
    total = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
    for slot in range(0, slots):
        entry = token * slots + slot
        row = tl.load(inverse + entry, token < tokens, other=-1)
        if RAISE:
            faulty = (token < tokens) & ((row < 0) | (row >= tokens * slots)) & (tl.program_id(1) == 0)
            record(status_word, fault, entry, row, faulty)
        counts = (row >= 0) & (row < last)
        start = row.to(tl.int64) * row_stride
        term = tl.load(rows + start[:, None] + step[None, :], counts[:, None] & in_row, other=0).to(total.dtype)
        if SCALED:
            term = term * tl.load(weights + entry, counts, other=0).to(total.dtype)[:, None]
        total += term
    target = out + token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), (token < tokens)[:, None] & in_row)


@triton.jit
def add_neighbours(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, WIDTH / 2]: two neighbours each, so that no layout of threads has a say in the order."""
    return tl.sum(tl.reshape(values, [ROWS, WIDTH // 2, 2]), 2)


@triton.jit
def moe_dots(
    gradient, rows, inverse, offsets, out, tokens, slots, experts, columns,
    inner, outer_stride, inner_stride, column_stride, row_stride, row_column_stride,
    DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[t, j] = gradient[t, :] · rows[inverse[t, j], :]: columns a width apart in their order, then neighbours."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    count = tokens * slots
    row = tl.load(inverse + entry, entry < count, other=-1)
    counts = (row >= 0) & (row < tl.minimum(tl.load(offsets + experts), count))
    token = tl.where(counts, entry // slots, 0)
    left_start = token_start(token, inner, outer_stride, inner_stride, SPLIT)
    right_start = row.to(tl.int64) * row_stride
    total = tl.zeros([ROWS, _WIDTH], tl.float64 if DOUBLE else tl.float32)
    for first in range(0, columns, _WIDTH):
        column = first + tl.arange(0, _WIDTH)
        mask = counts[:, None] & (column < columns)[None, :]
        left_step = column if UNIT else column * column_stride
        right_step = column if UNIT else column * row_column_stride
        left = tl.load(gradient + left_start[:, None] + left_step[None, :], mask, other=0)
        right = tl.load(rows + right_start[:, None] + right_step[None, :], mask, other=0)
        total += left.to(total.dtype) * right.to(total.dtype)
    total = add_neighbours(total, ROWS, _WIDTH)
    total = add_neighbours(total, ROWS, _WIDTH // 2)
    total = add_neighbours(total, ROWS, _WIDTH // 4)
    total = add_neighbours(total, ROWS, _WIDTH // 8)
    total = add_neighbours(total, ROWS, _WIDTH // 16)
    total = add_neighbours(total, ROWS, _WIDTH // 32)
    total = add_neighbours(total, ROWS, _WIDTH // 64)
    total = add_neighbours(total, ROWS, _WIDTH // 128)  # the width is 256: one is left
    tl.store(out + entry, tl.reshape(total, [ROWS]).to(out.dtype.element_ty), entry < count)


_MOVE = Budget(registers=128)
_SUM = Budget(registers=255, shared_bytes=16384)

KERNELS = (
    kernels.register(moe_gather, budget=_MOVE),
    kernels.register(moe_scatter, budget=_MOVE),
    kernels.register(moe_sum, budget=_MOVE),
    kernels.register(moe_dots, budget=_SUM),
)
