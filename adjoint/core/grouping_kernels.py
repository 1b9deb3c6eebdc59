"""Kernels that group positions by an integer key: a stable radix sort, and where each group begins.

A key is 31 bits. Digits of `DIGIT` bits are sorted from the lowest up, each pass stable, in three steps:
every block of positions counts its digits; every digit's counts are summed over the blocks; every block
moves its keys to where its digits begin. Ranks inside a block come from comparisons, so the order is a
pure function of the keys: nothing here depends on which program runs first.

Blocks are full: positions past the end carry `_LAST`, a key above every other, and stay at the end.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.grouping import BLOCK, DIGIT
from adjoint.core.kernels import Budget

_BINS = tl.constexpr(1 << DIGIT)
_BLOCK = tl.constexpr(BLOCK)
_LAST = tl.constexpr(0x7FFFFFFF)
_LANES = tl.constexpr(32)  # keys one comparison of a block takes


@triton.jit
def group_count_digits(ids, keys, counts, count, groups, skipped, shift, FIRST: tl.constexpr):
    """counts[block, digit] = how many keys of the block have the digit.

    The first pass makes the keys: an id that is out of range, or skipped, gets the key `groups`.
    """
    block = tl.program_id(0)
    index = block * _BLOCK + tl.arange(0, _BLOCK)
    if FIRST:
        inside = index < count
        value = tl.load(ids + index, inside, other=0)
        valid = (value >= 0) & (value < groups) & (value != skipped)
        key = tl.where(inside, tl.where(valid, value, groups).to(tl.int32), _LAST)
        tl.store(keys + index, key)
    else:
        key = tl.load(keys + index)
    found = tl.histogram((key >> shift) & (_BINS - 1), _BINS)
    tl.store(counts + block * _BINS + tl.arange(0, _BINS), found)


@triton.jit
def group_sum_counts(counts, totals, bins, blocks, cleared, clear_count, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Each count becomes the sum of those of the blocks before, bin by bin; totals gets the sum of each bin.

    On the way, the programs together fill `cleared` with −1.
    """
    bin = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    carried = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, blocks, CHUNK):
        block = begin + tl.arange(0, CHUNK)
        entries = counts + block[:, None] * bins + bin[None, :]
        inside = (block < blocks)[:, None] & (bin < bins)[None, :]
        found = tl.load(entries, inside, other=0)
        tl.store(entries, carried[None, :] + tl.cumsum(found, 0) - found, inside)
        carried += tl.sum(found, 0)
    tl.store(totals + bin, carried, bin < bins)
    size: tl.constexpr = WIDTH * CHUNK
    for begin in range(tl.program_id(0) * size, clear_count, tl.num_programs(0) * size):
        index = begin + tl.arange(0, size)
        tl.store(cleared + index, tl.full([size], -1, tl.int32), index < clear_count)


@triton.jit
def group_move(
    keys, positions, counts, totals, sorted_keys, sorted_positions, shift, FIRST: tl.constexpr
):  # fmt: skip
    """Moves every key, and its position, to its place in the order of one digit."""
    block = tl.program_id(0)
    local = tl.arange(0, _BLOCK)
    index = block * _BLOCK + local
    key = tl.load(keys + index)
    digit = (key >> shift) & (_BINS - 1)
    rank = tl.zeros([_BLOCK], tl.int32)
    for begin in range(0, _BLOCK, _LANES):
        # A column: every thread loads all of it, and no thread has to ask another.
        other = begin + tl.arange(0, _LANES)[:, None]
        other_digit = (tl.load(keys + block * _BLOCK + other) >> shift) & (_BINS - 1)
        rank += tl.sum(((other_digit == digit[None, :]) & (other < local[None, :])).to(tl.int32), 0)
    found = tl.load(totals + tl.arange(0, _BINS))
    begins = tl.cumsum(found) - found
    place = tl.gather(begins, digit, 0) + tl.load(counts + block * _BINS + digit) + rank
    tl.store(sorted_keys + place, key)
    tl.store(sorted_positions + place, index if FIRST else tl.load(positions + index))


@triton.jit
def load_neighbours(sorted_keys, index, groups):
    """The keys at places, whether each is the first of a group, and whether it is the last."""
    key = tl.load(sorted_keys + index)
    valid = key < groups
    head = valid & (key != tl.load(sorted_keys + index - 1, index > 0, other=-1))
    return key, head, valid & (key != tl.load(sorted_keys + index + 1, valid, other=-1))


@triton.jit
def group_mark(sorted_keys, starts, ends, groups):
    """For each group that occurs: where it begins and where it ends."""
    index = tl.program_id(0) * _BLOCK + tl.arange(0, _BLOCK)
    key, head, tail = load_neighbours(sorted_keys, index, groups)
    tl.store(ends + key, index + 1, tail)
    tl.store(starts + key, index, head)


@triton.jit
def group_count_heads(sorted_keys, counts, groups):
    """counts[block] = how many groups begin in the block."""
    block = tl.program_id(0)
    index = block * _BLOCK + tl.arange(0, _BLOCK)
    _, head, _ = load_neighbours(sorted_keys, index, groups)
    tl.store(counts + block, tl.sum(head.to(tl.int32)))


@triton.jit
def group_list(sorted_keys, counts, starts, ends, listed, segment_of, groups):
    """Lists the groups that occur, in order: where each begins and ends, its key, and the group of each place."""
    block = tl.program_id(0)
    index = block * _BLOCK + tl.arange(0, _BLOCK)
    key, head, tail = load_neighbours(sorted_keys, index, groups)
    number = tl.load(counts + block) + tl.cumsum(head.to(tl.int32)) - 1
    tl.store(starts + number, index, head)
    tl.store(ends + number, index + 1, tail)
    tl.store(listed + number, key, head)
    tl.store(segment_of + index, tl.where(key < groups, number, _LAST))


_SORT = Budget(registers=128, shared_bytes=16384)

KERNELS = (
    kernels.register(group_count_digits, budget=_SORT),
    kernels.register(group_sum_counts, budget=_SORT),
    kernels.register(group_move, budget=_SORT),
    kernels.register(group_mark, budget=_SORT),
    kernels.register(group_count_heads, budget=_SORT),
    kernels.register(group_list, budget=_SORT),
)
