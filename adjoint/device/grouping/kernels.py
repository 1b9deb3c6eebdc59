"""Groups positions by an integer key on the device: a stable radix sort, and where each group begins.

    grouping = Grouping(setup, ids.dtype, count, groups)     # in a plan's setup: binds kernels, declares scratch memory

    grouping.begin(memory, ids, count, groups)                    # in its execution, with memory = setup.memory(...)
    keys, positions = grouping.finish(memory, count, groups)
    grouping.mark_groups(memory, keys, count, groups)

A key is 31 bits. Digits of `DIGIT` bits are sorted from the lowest up, each pass stable: every block of positions has
counted its digits, and moves its keys to where its digits begin, behind those of the blocks before. Of few blocks,
each adds the counts of all others up itself; of many, a launch does. A key that is moved counts for the block it
comes to, in the next pass, by an atomic addition of whole numbers: their sum knows no order. So the order of keys is a
pure function of them: nothing here depends on which program runs first, or on how many positions a block has.

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

_DIGIT = tl.constexpr(DIGIT)
_BINS = tl.constexpr(1 << DIGIT)
_LAST = tl.constexpr(0x7FFFFFFF)


@kernel(budget=_SORT, schedule=("BLOCK",))
@triton.jit
def group_make_keys(
    ids: Pointer.ids, keys: Pointer.int32, counts: Pointer.int32, cleared: Pointer.int32, occurs: Pointer.int32,
    count: Int32, groups: Int32, skipped: Int32, blocks: Int32,
    FLAGGED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keys, counts[block, digit] = how many keys of the block have the lowest digit, and zeros in `cleared`.

    An id that is out of range, or skipped, gets the key `groups`. FLAGGED, `occurs` is 0 for every group; there may be
    more programs than blocks, for that alone.
    """
    block = tl.program_id(0)
    local = tl.arange(0, BLOCK)
    if FLAGGED:
        for first in range(block.to(tl.int64) * BLOCK, groups, tl.num_programs(0) * BLOCK):
            tl.store(occurs + first + local, tl.zeros([BLOCK], tl.int32), first + local < groups)
    if block < blocks:
        bin = tl.arange(0, _BINS)
        index = block * BLOCK + local
        inside = index < count
        value = tl.load(ids + index, inside, other=0)
        valid = (value >= 0) & (value < groups) & (value != skipped)
        key = tl.where(inside, tl.where(valid, value, groups).to(tl.int32), _LAST)
        tl.store(keys + index, key)
        tl.store(counts + block * _BINS + bin, tl.histogram(key & (_BINS - 1), _BINS))
        tl.store(cleared + block * _BINS + bin, tl.zeros([_BINS], tl.int32))


@kernel(budget=_SORT, schedule=("WIDTH", "CHUNK"))
@triton.jit
def group_sum_counts(
    counts: Pointer.int32, begins: Pointer.int32, totals: Pointer.int32, bins: Int32, rows: Int32, share: Int32,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """begins[row, bin] = the sum of counts in the rows before, bin by bin; totals gets the sum of each bin.

    A program has WIDTH bins and `share` rows. It sums the counts before its rows itself: reading them again is
    quicker than waiting for another program.
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


@triton.jit
def sum_blocks(counts, block, blocks, CHUNK: tl.constexpr):
    """The counts of the blocks before one, and of all blocks, bin by bin."""
    before = tl.zeros([_BINS], tl.int32)
    total = tl.zeros([_BINS], tl.int32)
    for first in range(0, blocks, CHUNK):
        row = first + tl.arange(0, CHUNK)[:, None]
        terms = tl.load(counts + row * _BINS + tl.arange(0, _BINS)[None, :], row < blocks, other=0)
        total += tl.sum(terms, 0)
        before += tl.sum(tl.where(row < block, terms, 0), 0)
    return before, total


@kernel(budget=_SORT, schedule=("FEW", "CHUNK", "BLOCK"))
@triton.jit
def group_move(
    keys: Pointer.int32, positions: Pointer.int32, counts: Pointer.int32, begins: Pointer.int32,
    totals: Pointer.int32, next_counts: Pointer.int32, cleared: Pointer.int32, occurs: Pointer.int32,
    sorted_keys: Pointer.int32, sorted_positions: Pointer.int32, groups: Int32, shift: Int32, is_last: Int32,
    FIRST: tl.constexpr, FLAGGED: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Moves every key, and its position, to its place in the order of one digit; counts its next digit there.

    A block is sorted by digit and index first: keys with the same digit then stand together, in order, behind
    those of the blocks before. FEW, a block sums the counts of all others itself. Unless this pass is the last, the
    counts of the next are added up in `next_counts`, which are zeros before; those of the one after are `cleared`.
    FLAGGED, `occurs` becomes 1 for every group that does.
    """
    block = tl.program_id(0)
    local = tl.arange(0, BLOCK)
    bin = tl.arange(0, _BINS)
    digit = (tl.load(keys + block * BLOCK + local) >> shift) & (_BINS - 1)
    ordered = tl.sort(digit * BLOCK + local)
    this_block = tl.load(counts + block * _BINS + bin)
    if FEW:
        begin, all_blocks = sum_blocks(counts, block, tl.num_programs(0), CHUNK)
    else:
        begin = tl.load(begins + block * _BINS + bin)
        all_blocks = tl.load(totals + bin)
    begin += tl.cumsum(all_blocks) - all_blocks - (tl.cumsum(this_block) - this_block)
    place = tl.gather(begin, ordered // BLOCK, 0) + local
    index = block * BLOCK + ordered % BLOCK
    key = tl.load(keys + index)
    tl.store(sorted_keys + place, key)
    tl.store(sorted_positions + place, index if FIRST else tl.load(positions + index))
    if FLAGGED:
        tl.store(occurs + key, tl.full([BLOCK], 1, tl.int32), key < groups)
    if is_last == 0:
        next_digit = (key >> (shift + _DIGIT)) & (_BINS - 1)
        one = tl.full([BLOCK], 1, tl.int32)
        tl.atomic_add(next_counts + place // BLOCK * _BINS + next_digit, one, sem="relaxed")
        tl.store(cleared + block * _BINS + bin, tl.zeros([_BINS], tl.int32))


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

    def launch(self, counts: Any, begins: Any, totals: Any, bins: int, rows: int) -> None:
        """begins[row, bin] = the sum of counts [rows, bins] in the rows before; totals gets the sum of each bin."""
        chunks = -(-rows // self.chunk)
        share = -(-chunks // self.shares)  # chunks of a program
        self.kernel.launch(
            (-(-bins // self.width), -(-chunks // share)), counts=counts, begins=begins, totals=totals, bins=bins,
            rows=rows, share=share * self.chunk,
        )  # fmt: skip


class Grouping:
    """Groups positions by their ids, in scratch memory that it adds to the plan's workspace.

    After `begin` and `finish` comes `mark_groups`, or with `listed` `list_groups`. Sorted keys and positions have room
    for at least one place past the end, whose key is above every other.

    Args:
        setup: binds the kernels; the workspace gets the regions "keys_a", "keys_b", "positions_a", "positions_b",
            "counts_a", "counts_b", "counts_c", "begins", "totals", "starts" and "ends", with `flagged` also "occurs",
            with `listed` also "group_keys", "segment_of" and "group_count".
        ids: the dtype of the ids.
        count: the most ids of a sort.
        groups: the most groups.
        listed: whether the groups that occur are listed, instead of all being marked.
        flagged: whether `begin` says in "occurs" which groups do, 1, and which do not, 0.
    """

    def __init__(
        self, setup: Setup, ids: torch.dtype, count: int, groups: int, *, listed: bool = False, flagged: bool = False
    ) -> None:
        schedule = _schedule(setup, "grouping")
        warps: dict[str, Any] = {"num_warps": schedule["num_warps"]}
        blocks = schedule["small_block"], schedule["block"]
        # Few positions are divided into small blocks, so that more processors have some; large ones cost less each.
        self.block = blocks[count > schedule["small_count"]]
        self.few = count <= schedule["few_count"]
        self.listed, self.flagged, self.clearing_programs = listed, flagged, schedule["clearing_programs"]

        def bind(kernel: Kernel, **settings: Any) -> Launch:
            """The kernel for the block of this sort; the other one is bound for sorts of other sizes."""
            launches = [setup.kernel(kernel, BLOCK=block, **settings, **warps) for block in blocks]
            return launches[blocks.index(self.block)]

        def bind_move(first: bool) -> Launch:
            settings = {"FIRST": first, "FLAGGED": first and flagged, "CHUNK": schedule["chunk"], **warps}
            many = setup.kernel(group_move, FEW=False, BLOCK=blocks[1], **settings)
            few = [setup.kernel(group_move, FEW=True, BLOCK=block, **settings) for block in blocks]
            return few[blocks.index(self.block)] if self.few else many

        self._make_keys = bind(group_make_keys, ids=ids, FLAGGED=flagged)
        self._move = {first: bind_move(first) for first in (True, False)}
        self._sums = CountSums(setup)
        number = self._blocks(count)
        room = torch.int32, number * self.block
        digits = torch.int32, number << DIGIT
        setup.scratch(keys_a=room, keys_b=room, positions_a=room, positions_b=room)
        setup.scratch(counts_a=digits, counts_b=digits, counts_c=digits)
        setup.scratch(begins=(torch.int32, number) if self.few else digits, totals=(torch.int32, 1 << DIGIT))
        if flagged:
            setup.scratch(occurs=(torch.int32, max(1, groups)))
        if listed:
            self._count_heads, self._list = bind(group_count_heads), bind(group_list)
            setup.scratch(starts=room, ends=room, group_keys=room, segment_of=room, group_count=(torch.int32, 1))
        else:
            self._mark = bind(group_mark)
            setup.scratch(starts=(torch.int32, max(1, groups)), ends=(torch.int32, max(1, groups)))

    def _blocks(self, count: int) -> int:
        """Blocks of positions; the last one has room for at least one place past the end."""
        return count // self.block + 1

    def begin(self, memory: Mapping[str, Any], ids: Any, count: int, groups: int, skipped: int = -1) -> None:
        """Makes the keys of ids and sorts them by their lowest digit.

        An id below 0, at least `groups`, or equal to `skipped` has the key `groups`.
        """
        blocks, occurs = self._blocks(count), memory.get("occurs", memory["keys_a"])
        programs = max(blocks, min(self.clearing_programs, -(-groups // self.block))) if self.flagged else blocks
        self._make_keys.launch(
            (programs,), ids=ids, keys=memory["keys_b"], counts=memory["counts_a"], cleared=memory["counts_b"],
            occurs=occurs, count=count, groups=groups, skipped=skipped, blocks=blocks,
        )  # fmt: skip
        self._pass(memory, 0, count, groups)

    def finish(self, memory: Mapping[str, Any], count: int, groups: int) -> tuple[Any, Any]:
        """Sorts by the other digits; gives the sorted keys and the position each had. Both live in `memory`."""
        number = self._passes(groups)
        for index in range(1, number):
            self._pass(memory, index, count, groups)
        last = "ba"[number % 2]
        return memory[f"keys_{last}"], memory[f"positions_{last}"]

    def _passes(self, groups: int) -> int:
        """Where groups are listed, at least `LISTED_PASSES`: listing takes as long for a large table as for a small."""
        return max(passes(groups), LISTED_PASSES) if self.listed else passes(groups)

    def _pass(self, memory: Mapping[str, Any], index: int, count: int, groups: int) -> None:
        """Sorts by one digit, stably, from one of two lists into the other."""
        blocks, begins, totals = self._blocks(count), memory["begins"], memory["totals"]
        source, target = "ba" if index % 2 == 0 else "ab"
        counts, following, cleared = (memory[f"counts_{'abc'[(index + n) % 3]}"] for n in range(3))
        if not self.few:
            self._sums.launch(counts, begins, totals, 1 << DIGIT, blocks)
        self._move[index == 0].launch(
            (blocks,), keys=memory[f"keys_{source}"], positions=memory[f"positions_{source}"], counts=counts,
            begins=begins, totals=totals, next_counts=following, cleared=cleared,
            occurs=memory.get("occurs", counts), sorted_keys=memory[f"keys_{target}"],
            sorted_positions=memory[f"positions_{target}"], groups=groups, shift=index * DIGIT,
            is_last=int(index == self._passes(groups) - 1),
        )  # fmt: skip

    def mark_groups(self, memory: Mapping[str, Any], keys: Any, count: int, groups: int) -> None:
        """Group g has the places from memory["starts"][g] to memory["ends"][g], if it has any.

        Of a group that has none, both are what they were. Its key is then not the one at that start, if that is a
        place at all, so this tells such groups.
        """
        self._mark.launch(
            (self._blocks(count),), sorted_keys=keys, starts=memory["starts"], ends=memory["ends"], groups=groups
        )

    def list_groups(self, memory: Mapping[str, Any], keys: Any, count: int, groups: int) -> None:
        """Lists the groups that occur in memory: "starts", "ends", "group_keys", "segment_of" and "group_count"."""
        grid, counts, begins = (self._blocks(count),), memory["counts_a"], memory["begins"]
        self._count_heads.launch(grid, sorted_keys=keys, counts=counts, groups=groups)
        self._sums.launch(counts, begins, memory["group_count"], 1, grid[0])
        self._list.launch(
            grid, sorted_keys=keys, begins=begins, starts=memory["starts"], ends=memory["ends"],
            group_keys=memory["group_keys"], segment_of=memory["segment_of"], groups=groups,
        )  # fmt: skip
