"""Triton kernels of `embedding_bag` that `kernels` does not have: bags, their forward, and the gradient of weights.

A bag's entries stand at positions `begin` to `end` of the ids: rows of a matrix, or what lies between two
offsets. Offsets that are out of range or out of order are recorded and clipped, so nothing is read out of
bounds.
"""

from dataclasses import replace

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record
from adjoint.ops.embedding.plans import TILE_BITS

SUM, MEAN, MAX = 0, 1, 2
"""Modes, as kernels know them."""

_MEAN = tl.constexpr(MEAN)
_MAX = tl.constexpr(MAX)
_TILE = tl.constexpr(1 << TILE_BITS)
_TILE_2 = tl.constexpr(1 << 2 * TILE_BITS)
_TILE_3 = tl.constexpr(1 << 3 * TILE_BITS)
_TILE_4 = tl.constexpr(1 << 4 * TILE_BITS)
_TILE_5 = tl.constexpr(1 << 5 * TILE_BITS)


@triton.jit
def quotient(dividend, divisor, DOUBLE: tl.constexpr):
    """Division rounded to nearest: the operator alone is an approximation in float32."""
    if DOUBLE:
        return dividend / divisor
    else:
        return tl.div_rn(dividend, divisor)


@triton.jit
def load_offset(offsets, bag, offset_count, count):
    """offsets[bag], kept between 0 and count; count past the end of the list."""
    offset = tl.load(offsets + bag, bag < offset_count, other=2147483647).to(tl.int64)
    return tl.minimum(tl.maximum(offset, 0), count).to(tl.int32)


@triton.jit
def load_entry(ids, place, inside, rows, skipped):
    """Ids at given places: row, and whether it exists and counts."""
    row = tl.load(ids + place, inside, other=0)
    valid = inside & (row >= 0) & (row < rows)
    return row, valid, valid & (row != skipped)


@triton.jit
def embedding_bag_forward(
    ids, weight, offsets, per_sample_weights, out, winners, counted, status_word, id_fault, offset_fault,
    bags, offset_count, width, count, rows, skipped, columns, row_stride, column_stride,
    OFFSETS: tl.constexpr, MODE: tl.constexpr, SCALED: tl.constexpr, RAISE: tl.constexpr,
    DOUBLE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum, mean or maximum of the rows of each bag; sums in tiles and tiles of tiles, as everywhere here."""
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = bag < bags
    reports = present & (tl.program_id(1) == 0)
    if OFFSETS:
        begin = load_offset(offsets, bag, offset_count, count)
        end = load_offset(offsets, bag + 1, offset_count, count)
        if RAISE:
            given = tl.load(offsets + bag, bag < offset_count, other=0).to(tl.int64)
            following = tl.load(offsets + bag + 1, present & (bag + 1 < offset_count), other=count).to(tl.int64)
            record(status_word, offset_fault, bag, given, (tl.program_id(1) == 0) & (bag == 0) & (given != 0))
            wrong = (following < given) | (following > count)
            record(status_word, offset_fault, bag + 1, following, reports & wrong)
    else:
        begin = bag * width
        end = begin + width
    length = tl.where(present, tl.maximum(end - begin, 0), 0)
    longest = tl.max(length)
    step = column if UNIT else column * column_stride
    in_row = (column < columns)[None, :]
    used = tl.zeros([ROWS], tl.int32)

    if MODE == _MAX:
        best = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
        winner = tl.full([ROWS, BLOCK], -1, tl.int32)
        for entry in range(0, longest):
            place = begin + entry
            row, valid, counts = load_entry(ids, place, entry < length, rows, skipped)
            if RAISE:
                record(status_word, id_fault, place, row, reports & (entry < length) & (valid == 0))
            start = tl.where(counts, row, 0).to(tl.int64) * row_stride
            value = tl.load(weight + start[:, None] + step[None, :], counts[:, None] & in_row, other=0).to(best.dtype)
            better = (winner < 0) | (value > best) | ((value != value) & (best == best))
            better = better & counts[:, None]
            best = tl.where(better, value, best)
            winner = tl.where(better, place[:, None], winner)
        total = best
        mask = present[:, None] & in_row
        tl.store(winners + bag.to(tl.int64)[:, None] * columns + column[None, :], winner, mask)
    else:
        nothing = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
        level_1, level_2, level_3, level_4, total = nothing, nothing, nothing, nothing, nothing
        for first in range(0, longest, _TILE):
            tile = nothing
            for entry in range(first, tl.minimum(first + _TILE, longest)):
                place = begin + entry
                row, valid, counts = load_entry(ids, place, entry < length, rows, skipped)
                if RAISE:
                    record(status_word, id_fault, place, row, reports & (entry < length) & (valid == 0))
                start = tl.where(counts, row, 0).to(tl.int64) * row_stride
                term = tl.load(weight + start[:, None] + step[None, :], counts[:, None] & in_row, other=0)
                term = term.to(total.dtype)
                if SCALED:
                    factor = tl.load(per_sample_weights + place, counts, other=0).to(total.dtype)
                    term = term * factor[:, None]
                tile += term
                used += counts.to(tl.int32)
            level_1 += tile
            after = first + _TILE
            if after % _TILE_2 == 0:
                level_2 += level_1
                level_1 = nothing
                if after % _TILE_3 == 0:
                    level_3 += level_2
                    level_2 = nothing
                    if after % _TILE_4 == 0:
                        level_4 += level_3
                        level_3 = nothing
                        if after % _TILE_5 == 0:
                            total += level_4
                            level_4 = nothing
        total += level_4 + (level_3 + (level_2 + level_1))
        if MODE == _MEAN:
            divisor = tl.maximum(used, 1).to(total.dtype)
            total = quotient(total, tl.broadcast_to(divisor[:, None], [ROWS, BLOCK]), DOUBLE)
            tl.store(counted + bag, used, reports)
    target = out + bag.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), present[:, None] & in_row)


@triton.jit
def embedding_bag_entries(
    ids, offsets, per_sample_weights, counted, keys, bag_of, factors,
    bags, offset_count, width, count, rows, skipped, steps,
    OFFSETS: tl.constexpr, MODE: tl.constexpr, SCALED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each entry: its bag, its key for grouping (`rows` when it adds nothing), and its factor."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    if OFFSETS:
        low = tl.zeros([BLOCK], tl.int32)  # how many offsets are known to be at most the entry's position
        high = low + offset_count
        for _ in range(steps):
            middle = (low + high) >> 1
            before = load_offset(offsets, middle, offset_count, count) <= entry
            before = before & (middle < high)
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        bag = low - 1
    else:
        bag = entry // width
    row, _, counts = load_entry(ids, entry, inside & (bag >= 0) & (bag < bags), rows, skipped)
    tl.store(keys + entry, tl.where(counts, row, rows).to(tl.int32), inside)
    bag = tl.minimum(tl.maximum(bag, 0), tl.maximum(bags - 1, 0))
    tl.store(bag_of + entry, bag, inside)
    if MODE == _MEAN:
        among = tl.load(counted + bag, counts, other=1).to(tl.float64 if DOUBLE else tl.float32)
        tl.store(factors + entry, quotient(tl.full([BLOCK], 1, among.dtype), among, DOUBLE), inside)
    if SCALED:
        factor = tl.load(per_sample_weights + entry, inside, other=0)
        tl.store(factors + entry, factor.to(tl.float64 if DOUBLE else tl.float32), inside)


@triton.jit
def halve(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, WIDTH / 2]: the first half plus the second, whatever the layout of threads."""
    first, second = tl.split(tl.permute(tl.reshape(values, [ROWS, 2, WIDTH // 2]), [0, 2, 1]))
    return first + second


@triton.jit
def embedding_bag_weights(
    gradient, weight, bag_of, keys, out, count, rows, columns,
    gradient_row_stride, gradient_column_stride, row_stride, column_stride,
    DOUBLE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n] = gradient[bag of n] · weight[ids[n]]: blocks of columns one after the other, then by halves."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = entry < count
    row = tl.load(keys + entry, inside, other=0)
    counts = inside & (row < rows)
    bag = tl.load(bag_of + entry, counts, other=0).to(tl.int64)
    row = tl.where(counts, row, 0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = counts[:, None] & (column < columns)[None, :]
        step = column if UNIT else column * column_stride
        gradient_step = column if UNIT else column * gradient_column_stride
        left = tl.load(gradient + (bag * gradient_row_stride)[:, None] + gradient_step[None, :], mask, other=0)
        right = tl.load(weight + (row * row_stride)[:, None] + step[None, :], mask, other=0)
        total += left.to(total.dtype) * right.to(total.dtype)
    total = halve(total, ROWS, BLOCK)
    total = halve(total, ROWS, BLOCK // 2)
    total = halve(total, ROWS, BLOCK // 4)
    total = halve(total, ROWS, BLOCK // 8)
    total = halve(total, ROWS, BLOCK // 16)
    total = halve(total, ROWS, BLOCK // 32)
    total = halve(total, ROWS, BLOCK // 64)  # BLOCK is 128: one is left
    tl.store(out + entry, tl.reshape(total, [ROWS]).to(out.dtype.element_ty), inside)


_BAGS = Budget(registers=255, shared_bytes=65536)

KERNELS = (
    kernels.register(embedding_bag_forward, budget=replace(_BAGS, spilled_elsewhere=16)),
    kernels.register(embedding_bag_entries, budget=_BAGS),
    kernels.register(embedding_bag_weights, budget=_BAGS),
)
