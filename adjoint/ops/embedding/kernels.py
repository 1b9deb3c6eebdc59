"""Triton kernels of the embedding family.

Sums over groups of tokens, in an order fixed by the group alone: a group's tokens stand in order at places
`starts[g]` to `ends[g]`; tiles of TILE tokens are summed one token after the other; TILE tiles make a
tile of the next level, and so on. A group longer than a tile is summed in pieces by many programs, which
leave partial sums in slots. The tile of a level with bits b that begins at place p has the slot

    2·(p >> b) + (p is the beginning of its group)

of that level: of all tiles that begin in a window of 2^b places, at most one is the first of its group and
at most one is not, so slots need no counting. What a level must sum is found from the slot in turn.
"""

from dataclasses import replace

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record
from adjoint.ops.embedding.plans import TILE_BITS

LEVELS = 5
"""Levels of partial sums: groups of up to 2^30 tokens."""

_TILE = tl.constexpr(1 << TILE_BITS)
_BITS = tl.constexpr(TILE_BITS)
_BITS_2 = tl.constexpr(2 * TILE_BITS)
_BITS_3 = tl.constexpr(3 * TILE_BITS)
_BITS_4 = tl.constexpr(4 * TILE_BITS)
_BITS_5 = tl.constexpr(5 * TILE_BITS)


# ------------------------------------------------------------------------------------------- lookup


@triton.jit
def embedding_gather(
    ids, weight, out, status_word, fault, count, rows, columns, row_stride, column_stride,
    RAISE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, :] = weight[ids[n], :], and zeros where an id is out of range."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    row = tl.load(ids + token, inside, other=0)
    valid = (row >= 0) & (row < rows)
    if RAISE:
        record(status_word, fault, token, row, inside & (valid == 0) & (tl.program_id(1) == 0))
    start = tl.where(valid, row, 0).to(tl.int64) * row_stride
    step = column if UNIT else column * column_stride
    in_row = (column < columns)[None, :]
    value = tl.load(weight + start[:, None] + step[None, :], (inside & valid)[:, None] & in_row, other=0)
    tl.store(out + token[:, None] * columns + column[None, :], value, inside[:, None] & in_row)


# -------------------------------------------------------------------------------------- sums of tokens


@triton.jit
def load_term(
    gradient, bag_of, factors, winners, position, inside, column, columns,
    inner, outer_stride, inner_stride, column_stride,
    DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BAGGED: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """What the tokens at given positions add to their groups, widened; 0 outside.

    The token at position n adds row n of the gradient; in a bag, the row of its bag, times the token's
    factor, or only the columns the token has won.
    """
    row = position
    if BAGGED:
        row = tl.load(bag_of + position, inside, other=0)
    if SPLIT:
        start = (row // inner).to(tl.int64) * outer_stride + (row % inner).to(tl.int64) * inner_stride
    else:
        start = row.to(tl.int64) * inner_stride
    step = column if UNIT else column * column_stride
    mask = inside[:, None] & (column < columns)[None, :]
    term = tl.load(gradient + start[:, None] + step[None, :], mask, other=0)
    term = term.to(tl.float64 if DOUBLE else tl.float32)
    if SCALED:
        term = term * tl.load(factors + position, inside, other=0)[:, None]
    if CHOSEN:
        winner = tl.load(winners + row.to(tl.int64)[:, None] * columns + column[None, :], mask, other=-1)
        term = tl.where(winner == position[:, None], term, 0)
    return term


@triton.jit
def find_tile(segment_of, starts, ends, slot, count, segments, bits, width):
    """The places of the tile that has a slot, from its first to its last; none when no tile has it."""
    window = (slot >> 1) << bits
    first = (slot & 1) == 1
    place = tl.where(first, tl.minimum(window + width, count) - 1, window)
    segment = tl.load(segment_of + place)
    known = segment < segments
    start = tl.load(starts + segment, known, other=0)
    end = tl.load(ends + segment, known, other=0)
    following = start + (((window - start + width - 1) >> bits) << bits)
    begin = tl.where(first, start, following)
    exists = known & (end - start > width) & (begin < end) & tl.where(first, start >= window, start < window)
    return start, begin, tl.where(exists, tl.minimum(begin + width, end), begin)


@triton.jit
def embedding_sum_tiles(
    gradient, positions, bag_of, factors, winners, segment_of, starts, ends, partials, count, segments, columns,
    inner, outer_stride, inner_stride, column_stride,
    DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BAGGED: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first level: tiles of tokens, of groups that have more than one."""
    slot = tl.program_id(0)
    _, begin, end = find_tile(segment_of, starts, ends, slot, count, segments, _BITS, _TILE)
    if begin < end:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros([1, BLOCK], tl.float64 if DOUBLE else tl.float32)
        for first in range(begin, end, UNROLL):
            for step in tl.static_range(UNROLL):
                place = first + step + tl.zeros([1], tl.int32)
                position = tl.load(positions + place, place < end, other=0)
                total += load_term(
                    gradient, bag_of, factors, winners, position, place < end, column, columns,
                    inner, outer_stride, inner_stride, column_stride,
                    DOUBLE, SPLIT, UNIT, BAGGED, SCALED, CHOSEN,
                )  # fmt: skip
        target = partials + slot.to(tl.int64) * columns + column[None, :]
        tl.store(target, total, (column < columns)[None, :])


@triton.jit
def embedding_sum_partials(
    partials, segment_of, starts, ends, count, segments, columns, bits, source, target,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A further level: tiles of the level below. Its slots begin at `target`, those of the level below at `source`."""
    slot = tl.program_id(0)
    start, begin, end = find_tile(segment_of, starts, ends, slot, count, segments, bits, 1 << bits)
    if begin < end:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        in_row = column < columns
        total = tl.zeros([BLOCK], partials.dtype.element_ty)
        below = bits - _BITS
        number = (end - begin + (1 << below) - 1) >> below
        for first in range(0, number, UNROLL):
            for step in tl.static_range(UNROLL):
                place = begin + ((first + step) << below)
                part = source + 2 * (place >> below) + (place == start).to(tl.int32)
                total += tl.load(
                    partials + part.to(tl.int64) * columns + column, in_row & (first + step < number), other=0
                )
        tl.store(partials + (target + slot).to(tl.int64) * columns + column, total, in_row)


@triton.jit
def embedding_write_groups(
    gradient, positions, bag_of, factors, winners, segment_of, ends, listed, partials, out,
    count, segments, columns, tile, level_2, level_3, level_4, level_5,
    inner, outer_stride, inner_stride, column_stride, out_row_stride, out_column_stride,
    DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BAGGED: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr, INTO: tl.constexpr,
    UNROLL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of groups that occur, each by the programs of its first place.

    Groups up to `tile` tokens are summed here; longer ones have partial sums at the highest level that has
    more than one for them. INTO a buffer, sums are added to its rows.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    segment = tl.load(segment_of + place, place < count, other=2147483647)
    before = tl.load(segment_of + place - 1, (place > 0) & (place < count), other=-1)
    present = (segment < segments) & (segment != before)
    position = tl.load(positions + place, place < count, other=0)
    if tl.max(present.to(tl.int32)) > 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        length = tl.load(ends + segment, present, other=0) - place
        # The first token's term is on its way before the length is known: most groups have no other.
        total = load_term(
            gradient, bag_of, factors, winners, position, present, column, columns,
            inner, outer_stride, inner_stride, column_stride, DOUBLE, SPLIT, UNIT, BAGGED, SCALED, CHOSEN,
        )  # fmt: skip
        total = tl.where((length <= tile)[:, None], total, 0.0) + 0.0
        short = tl.where(present & (length <= tile), length, 0)
        for first in range(1, tl.max(short), UNROLL):
            for step in tl.static_range(UNROLL):
                position = tl.load(positions + place + first + step, first + step < short, other=0)
                total += load_term(
                    gradient, bag_of, factors, winners, position, first + step < short, column, columns,
                    inner, outer_stride, inner_stride, column_stride, DOUBLE, SPLIT, UNIT, BAGGED, SCALED, CHOSEN,
                )  # fmt: skip

        in_row = (column < columns)[None, :]
        tiles = (length - 1) >> _BITS  # less one: a tile holds up to 32 of the level below
        bits = tl.where(tiles >> _BITS == 0, _BITS, _BITS_2)
        bits = tl.where(tiles >> _BITS_2 == 0, bits, _BITS_3)
        bits = tl.where(tiles >> _BITS_3 == 0, bits, _BITS_4)
        bits = tl.where(tiles >> _BITS_4 == 0, bits, _BITS_5)
        level = tl.where(bits == _BITS, 0, level_2)
        level = tl.where(bits <= _BITS_2, level, level_3)
        level = tl.where(bits <= _BITS_3, level, level_4)
        level = tl.where(bits <= _BITS_4, level, level_5)
        number = tl.where(present & (length > tile), (length + (1 << bits) - 1) >> bits, 0)
        for first in range(0, tl.max(number), UNROLL):
            for step in tl.static_range(UNROLL):
                begin = place + ((first + step) << bits)
                part = level + 2 * (begin >> bits) + (begin == place).to(tl.int32)
                total += tl.load(
                    partials + part.to(tl.int64)[:, None] * columns + column[None, :],
                    (first + step < number)[:, None] & in_row,
                    other=0,
                )

        row = segment
        if INTO:
            row = tl.load(listed + segment, present, other=0)
        step = column if UNIT else column * out_column_stride
        target = out + row.to(tl.int64)[:, None] * out_row_stride + step[None, :]
        mask = present[:, None] & in_row
        if INTO:
            if DOUBLE or out.dtype.element_ty == tl.float64:
                total = tl.load(target, mask, other=0).to(tl.float64) + total.to(tl.float64)
            else:
                total = tl.load(target, mask, other=0).to(tl.float32) + total
        tl.store(target, total.to(out.dtype.element_ty), mask)


@triton.jit
def embedding_write_zeros(
    starts, out, rows, columns, out_row_stride, out_column_stride,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows no token refers to: nearly all of a large table. Only writing, they take no turns with reads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    empty = tl.load(starts + row, row < rows, other=0) < 0
    step = column if UNIT else column * out_column_stride
    target = out + row.to(tl.int64)[:, None] * out_row_stride + step[None, :]
    zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
    tl.store(target, zeros, empty[:, None] & (column < columns)[None, :])


_COPY = Budget(registers=128)
_SUM = Budget(registers=255, shared_bytes=8192)

KERNELS = (
    kernels.register(embedding_gather, budget=_COPY),
    kernels.register(embedding_sum_tiles, budget=_SUM),
    kernels.register(embedding_sum_partials, budget=_SUM),
    kernels.register(embedding_write_groups, budget=replace(_SUM, spilled_elsewhere=16)),
    kernels.register(embedding_write_zeros, budget=_COPY),
)
