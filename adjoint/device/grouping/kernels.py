"""Groups positions by an integer key on the device: a stable radix sort, and where each group begins.

    grouping = Grouping(setup, ids.dtype, count, groups)     # in a plan's setup: binds kernels, declares scratch memory

    keys, positions = grouping.sort(memory, ids, count, groups)   # in its execution, with memory = setup.memory(...)
    grouping.mark_groups(memory, keys, count, groups)

A key is 31 bits. Digits of `DIGIT` bits are sorted from the lowest up, each pass stable, in three steps:
every block of positions counts its digits; every digit's counts are summed over the blocks; every block
moves its keys to where its digits begin. The order is a pure function of the keys: nothing here depends on
which program runs first, or on how many positions a block has.

Blocks are full: positions past the end carry `_LAST`, a key above every other, and stay at the end. Nothing is
allocated and nobody waits for the device.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from adjoint.core.kernels import Budget, Int32, Kernel, Pointer, kernel
from adjoint.core.launch import Launch, Setup
from adjoint.core.schedules import Schedules
from adjoint.device.grouping import DIGIT, LISTED_PASSES, passes

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))
_SORT = Budget(registers=128, shared_bytes=16384)

_BINS = tl.constexpr(1 << DIGIT)
_LAST = tl.constexpr(0x7FFFFFFF)


@kernel(budget=_SORT, schedule=("BLOCK",))
@triton.jit
def group_count_digits(
    ids: Pointer.ids, keys: Pointer.int32, counts: Pointer.int32, count: Int32, groups: Int32, skipped: Int32,
    shift: Int32,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
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
    digits = tl.histogram((key >> shift) & (_BINS - 1), _BINS)
    tl.store(counts + block * _BINS + tl.arange(0, _BINS), digits)


@kernel(budget=_SORT, schedule=("WIDTH", "CHUNK"))
@triton.jit
def group_sum_counts(
    counts: Pointer.int32, begins: Pointer.int32, totals: Pointer.int32, bins: Int32, rows: Int32, share: Int32,
    cleared: Pointer.int32, clear_count: Int32,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """begins[row, bin] = the sum of counts in the rows before, bin by bin; totals gets the sum of each bin.

    A program has WIDTH bins and `share` rows. It sums the counts before its rows itself: reading them again is
    quicker than waiting for another program. On the way, the programs together fill `cleared` with −1.
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
        terms = tl.load(counts + entries, inside, other=0)
        tl.store(begins + entries, carried[None, :] + tl.cumsum(terms, 0) - terms, inside)
        carried += tl.sum(terms, 0)
    tl.store(totals + bin, carried, (bin < bins) & (first + share >= rows))
    size: tl.constexpr = WIDTH * CHUNK
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    for begin in range(program * size, clear_count, tl.num_programs(0) * tl.num_programs(1) * size):
        index = begin + tl.arange(0, size)
        tl.store(cleared + index, tl.full([size], -1, tl.int32), index < clear_count)


@kernel(budget=_SORT, schedule=("BLOCK",))
@triton.jit
def group_move(
    keys: Pointer.int32, positions: Pointer.int32, counts: Pointer.int32, begins: Pointer.int32,
    totals: Pointer.int32, sorted_keys: Pointer.int32, sorted_positions: Pointer.int32, shift: Int32,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves every key, and its position, to its place in the order of one digit.

    A block is sorted by digit and index first: keys with the same digit then stand together, in order, behind
    those of the blocks before.
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


@kernel(budget=_SORT, schedule=("BLOCK",))
@triton.jit
def group_mark(
    sorted_keys: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32, groups: Int32, BLOCK: tl.constexpr
):  # fmt: skip
    """For each group that occurs: where it begins and where it ends."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key, head, tail = load_neighbours(sorted_keys, index, groups)
    tl.store(ends + key, index + 1, tail)
    tl.store(starts + key, index, head)


@kernel(budget=_SORT, schedule=("BLOCK",))
@triton.jit
def group_count_heads(
    sorted_keys: Pointer.int32, counts: Pointer.int32, groups: Int32, BLOCK: tl.constexpr
):  # fmt: skip
    """counts[block] = how many groups begin in the block."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    _, head, _ = load_neighbours(sorted_keys, index, groups)
    tl.store(counts + block, tl.sum(head.to(tl.int32)))


@kernel(budget=_SORT, schedule=("BLOCK",))
@triton.jit
def group_list(
    sorted_keys: Pointer.int32, begins: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    group_keys: Pointer.int32, segment_of: Pointer.int32, groups: Int32, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lists the groups that occur, in order: where each begins and ends, its key, and the group of each place."""
    block = tl.program_id(0)
    index = block * BLOCK + tl.arange(0, BLOCK)
    key, head, tail = load_neighbours(sorted_keys, index, groups)
    number = tl.load(begins + block) + tl.cumsum(head.to(tl.int32)) - 1
    tl.store(starts + number, index, head)
    tl.store(ends + number, index + 1, tail)
    tl.store(group_keys + number, key, head)
    tl.store(segment_of + index, tl.where(key < groups, number, _LAST))


# ------------------------------------------------------------------------------------------------ launches


def _schedule(setup: Setup, entry: str) -> dict[str, int]:
    """Schedule parameters that all GPUs share; the interpreter takes the least time for few programs."""
    return _SCHEDULES.named(entry, "interpreter" if setup.interpreted else "default")


class CountSums:
    """Sums rows of counts, bin by bin."""

    def __init__(self, setup: Setup) -> None:
        schedule = _schedule(setup, "group_sum_counts")
        self.width, self.chunk, self.shares = schedule["width"], schedule["chunk"], schedule["shares"]
        self.kernel = setup.kernel(
            group_sum_counts, WIDTH=self.width, CHUNK=self.chunk, num_warps=schedule["num_warps"]
        )

    def launch(
        self, counts: Any, begins: Any, totals: Any, bins: int, rows: int, cleared: Any = None, clear_count: int = 0
    ) -> None:
        """begins[row, bin] = the sum of counts [rows, bins] in the rows before; totals gets the sum of each bin.

        On the way, the first `clear_count` places of `cleared` become −1.
        """
        chunks = -(-rows // self.chunk)
        share = -(-chunks // self.shares)  # chunks of a program
        self.kernel.launch(
            (-(-bins // self.width), -(-chunks // share)), counts=counts, begins=begins, totals=totals, bins=bins,
            rows=rows, share=share * self.chunk, cleared=totals if cleared is None else cleared,
            clear_count=clear_count,
        )  # fmt: skip


class Grouping:
    """Groups positions by their ids, in scratch memory that it adds to the plan's workspace.

    After `sort` comes `mark_groups`, or with `listed` `list_groups`. Sorted keys and positions have room for at least
    one place past the end, whose key is above every other.

    Args:
        setup: binds the kernels; the workspace gets the regions "keys_a", "keys_b", "positions_a", "positions_b",
            "counts", "begins", "totals", "starts" and "ends", with `listed` also "group_keys", "segment_of" and
            "group_count".
        ids: the dtype of the ids.
        count: the most ids of a sort.
        groups: the most groups.
        listed: whether the groups that occur are listed, instead of all being marked.
    """

    def __init__(self, setup: Setup, ids: torch.dtype, count: int, groups: int, *, listed: bool = False) -> None:
        schedule = _schedule(setup, "grouping")
        blocks = schedule["small_block"], schedule["block"]
        # Few positions are divided into small blocks, so that every processor has some; large ones cost less each.
        self.block = blocks[count > schedule["small_count"]]
        self.listed = listed

        def bind(kernel: Kernel, **settings: Any) -> Launch:
            """The kernel for the block of this sort; the other one is bound for sorts of other sizes."""
            launches = [setup.kernel(kernel, BLOCK=b, num_warps=schedule["num_warps"], **settings) for b in blocks]
            return launches[blocks.index(self.block)]

        self._count_digits = {first: bind(group_count_digits, ids=ids, FIRST=first) for first in (True, False)}
        self._move = {first: bind(group_move, FIRST=first) for first in (True, False)}
        self._sums = CountSums(setup)
        number = self._blocks(count)
        room = torch.int32, number * self.block
        digits = torch.int32, number << DIGIT
        setup.scratch(keys_a=room, keys_b=room, positions_a=room, positions_b=room)
        setup.scratch(counts=digits, begins=digits, totals=(torch.int32, 1 << DIGIT))
        if listed:
            self._count_heads, self._list = bind(group_count_heads), bind(group_list)
            setup.scratch(starts=room, ends=room, group_keys=room, segment_of=room, group_count=(torch.int32, 1))
        else:
            self._mark = bind(group_mark)
            setup.scratch(starts=(torch.int32, max(1, groups)), ends=(torch.int32, max(1, groups)))

    def _blocks(self, count: int) -> int:
        """Blocks of positions; the last one has room for at least one place past the end."""
        return count // self.block + 1

    def sort(self, memory: Mapping[str, Any], ids: Any, count: int, groups: int, skipped: int = -1) -> tuple[Any, Any]:
        """Sorts ids, stably; gives the sorted keys and the position each had. Both live in `memory`.

        An id below 0, at least `groups`, or equal to `skipped` has the key `groups`. Where groups are listed, at least
        `LISTED_PASSES` passes are made, so that listing takes as long for a large table as for a small one.
        """
        grid = (self._blocks(count),)
        source, target = (memory["keys_b"], memory["positions_b"]), (memory["keys_a"], memory["positions_a"])
        counts, begins, totals = memory["counts"], memory["begins"], memory["totals"]
        for index in range(max(passes(groups), LISTED_PASSES) if self.listed else passes(groups)):
            (keys, positions), (sorted_keys, sorted_positions) = source, target
            first, shift = index == 0, index * DIGIT
            self._count_digits[first].launch(
                grid, ids=ids, keys=keys, counts=counts, count=count, groups=groups, skipped=skipped, shift=shift
            )
            cleared, clear_count = (memory["starts"], groups) if first and not self.listed else (None, 0)
            self._sums.launch(counts, begins, totals, 1 << DIGIT, grid[0], cleared, clear_count)
            self._move[first].launch(
                grid, keys=keys, positions=positions, counts=counts, begins=begins, totals=totals,
                sorted_keys=sorted_keys, sorted_positions=sorted_positions, shift=shift,
            )  # fmt: skip
            source, target = target, source
        return source

    def mark_groups(self, memory: Mapping[str, Any], keys: Any, count: int, groups: int) -> None:
        """Group g has the places from memory["starts"][g] to memory["ends"][g]; an empty one starts at −1."""
        self._mark.launch(
            (self._blocks(count),), sorted_keys=keys, starts=memory["starts"], ends=memory["ends"], groups=groups
        )

    def list_groups(self, memory: Mapping[str, Any], keys: Any, count: int, groups: int) -> None:
        """Lists the groups that occur in memory: "starts", "ends", "group_keys", "segment_of" and "group_count"."""
        grid, counts, begins = (self._blocks(count),), memory["counts"], memory["begins"]
        self._count_heads.launch(grid, sorted_keys=keys, counts=counts, groups=groups)
        self._sums.launch(counts, begins, memory["group_count"], 1, grid[0])
        self._list.launch(
            grid, sorted_keys=keys, begins=begins, starts=memory["starts"], ends=memory["ends"],
            group_keys=memory["group_keys"], segment_of=memory["segment_of"], groups=groups,
        )  # fmt: skip
