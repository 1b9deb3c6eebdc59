"""Kernels that group positions by an integer key: a stable radix sort, and where each group begins.

A key is 31 bits. Digits of `DIGIT` bits are sorted from the lowest up, each pass stable, in three steps:
every block of positions counts its digits; every digit's counts are summed over the blocks; every block
moves its keys to where its digits begin. The order is a pure function of the keys: nothing here depends on
which program runs first, or on how many positions a block has.

Blocks are full: positions past the end carry `_LAST`, a key above every other, and stay at the end.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.grouping import DIGIT

_BINS = tl.constexpr(1 << DIGIT)
_LAST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def group_count_digits(ids, keys, counts, count, groups, skipped, shift, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """counts[block, digit] = how many keys of the block have the digit.

    The first pass makes the keys: an id that is out of range, or skipped, gets the key `groups`.
    """
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
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
def group_sum_counts(
    counts, begins, totals, bins, rows, share, cleared, clear_count, WIDTH: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """begins[row, bin] = the sum of counts in the rows before, bin by bin; totals gets the sum of each bin.

    A program has WIDTH bins and `share` rows. It sums what lies before them itself: to read counts again is
    quicker than to wait for another program. On the way, the programs together fill `cleared` with −1.
    """
    bin = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    first = tl.program_id(1) * share
    earlier = tl.zeros([CHUNK, WIDTH], tl.int32)
    for begin in range(0, first, CHUNK):
        row = begin + tl.arange(0, CHUNK)
        earlier += tl.load(counts + row[:, None] * bins + bin[None, :], (bin < bins)[None, :], other=0)
    carried = tl.sum(earlier, 0)
    for begin in range(first, tl.minimum(first + share, rows), CHUNK):
        row = begin + tl.arange(0, CHUNK)
        entries = row[:, None] * bins + bin[None, :]
        inside = (row < rows)[:, None] & (bin < bins)[None, :]
        found = tl.load(counts + entries, inside, other=0)
        tl.store(begins + entries, carried[None, :] + tl.cumsum(found, 0) - found, inside)
        carried += tl.sum(found, 0)
    tl.store(totals + bin, carried, (bin < bins) & (first + share >= rows))
    size: tl.constexpr = WIDTH * CHUNK
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    for begin in range(program * size, clear_count, tl.num_programs(0) * tl.num_programs(1) * size):
        index = begin + tl.arange(0, size)
        tl.store(cleared + index, tl.full([size], -1, tl.int32), index < clear_count)


@triton.jit
def group_move(
    keys, positions, counts, begins, totals, sorted_keys, sorted_positions, shift,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves every key, and its position, to its place in the order of one digit.

    A block is sorted by digit and index first: what has one digit then stands together, in order, and
    follows what the blocks before have of it.
    """
    block = tl.program_id(0)
    local = tl.arange(0, BLOCK)
    bin = tl.arange(0, _BINS)
    digit = (tl.load(keys + block * BLOCK + local) >> shift) & (_BINS - 1)
    ordered = tl.sort(digit * BLOCK + local)
    all_blocks = tl.load(totals + bin)
    this_block = tl.load(counts + block * _BINS + bin)
    begin = tl.load(begins + block * _BINS + bin)
    begin += tl.cumsum(all_blocks) - all_blocks - (tl.cumsum(this_block) - this_block)
    place = tl.gather(begin, ordered // BLOCK, 0) + local
    index = block * BLOCK + ordered % BLOCK
    tl.store(sorted_keys + place, tl.load(keys + index))
    tl.store(sorted_positions + place, index if FIRST else tl.load(positions + index))


@triton.jit
def load_neighbours(sorted_keys, index, groups):
    """The keys at places, whether each is the first of a group, and whether it is the last."""
    key = tl.load(sorted_keys + index)
    valid = key < groups
    head = valid & (key != tl.load(sorted_keys + index - 1, index > 0, other=-1))
    return key, head, valid & (key != tl.load(sorted_keys + index + 1, valid, other=-1))


@triton.jit
def group_mark(sorted_keys, starts, ends, groups, BLOCK: tl.constexpr):
    """For each group that occurs: where it begins and where it ends."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, head, tail = load_neighbours(sorted_keys, index, groups)
    tl.store(ends + key, index + 1, tail)
    tl.store(starts + key, index, head)


@triton.jit
def group_count_heads(sorted_keys, counts, groups, BLOCK: tl.constexpr):
    """counts[block] = how many groups begin in the block."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    _, head, _ = load_neighbours(sorted_keys, index, groups)
    tl.store(counts + block, tl.sum(head.to(tl.int32)))


@triton.jit
def group_list(sorted_keys, begins, starts, ends, listed, segment_of, groups, BLOCK: tl.constexpr):
    """Lists the groups that occur, in order: where each begins and ends, its key, and the group of each place."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    key, head, tail = load_neighbours(sorted_keys, index, groups)
    number = tl.load(begins + block) + tl.cumsum(head.to(tl.int32)) - 1
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
