"""Sums over groups of tokens, in an order fixed by the group alone: what gradients of tables are made of.

A group's tokens stand in order at places `starts[g]` to `ends[g]`; tiles of TILE tokens are summed one token after the
other; TILE tiles make a tile of the next level, and so on. A group longer than a tile is summed in pieces by many
programs, which leave partial sums in slots. The tile of a level with bits b that begins at place p has the slot

    2·(p >> b) + (p is the beginning of its group)

of that level: of all tiles that begin in a window of 2^b places, at most one is the first of its group and
at most one is not, so slots need no counting. What a level must sum follows from the slot.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Kernel, Pointer, PointerIf16, kernel
from adjoint.core.launch import Launch, Setup, run_concurrently
from adjoint.core.layout import Rows
from adjoint.core.problem import wide_dtype
from adjoint.device.grouping import MAX_GROUPS
from adjoint.device.grouping.kernels import Grouping
from adjoint.ops.embedding.plans import SEQUENTIAL, TILE_BITS

LEVELS = 5
"""Levels of partial sums: groups of up to 2^30 tokens."""

CONCURRENT_BYTES = 2**25
"""The least bytes of a result whose empty rows are written beside the sort: less take no longer than that costs."""

LARGE_BYTES = 2**29
"""The least bytes of a result whose zeros are written by as many programs as there are tiles. Those of a smaller one
are written by few programs, which leave the sort room: on an H200 the gradient of 32000×4096 in bfloat16 takes 121 µs
so, and 131 with a program for each tile; that of 151936×2048 in float32 takes 388 µs with few, and 350 with one for
each tile."""

COPY = Budget(registers=128)
_SUM = Budget(registers=255, shared_bytes=8192)

_TILE = tl.constexpr(1 << TILE_BITS)
_BITS = tl.constexpr(TILE_BITS)
_BITS_2 = tl.constexpr(2 * TILE_BITS)
_BITS_3 = tl.constexpr(3 * TILE_BITS)
_BITS_4 = tl.constexpr(4 * TILE_BITS)
_BITS_5 = tl.constexpr(5 * TILE_BITS)


@triton.jit
def load_term(
    terms, position, inside, column, columns, DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BAGGED: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """What the tokens at some positions add to their groups, widened; 0 outside.

    The token at position n adds row n of the gradient; in a bag, the row of its bag, times the token's
    factor, or only the columns the token has won.
    """
    gradient, bag_of, factors, winners, inner, outer_stride, inner_stride, column_stride = terms
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
    in_group = segment < segments
    start = tl.load(starts + segment, in_group, other=0)
    end = tl.load(ends + segment, in_group, other=0)
    following = start + (((window - start + width - 1) >> bits) << bits)
    begin = tl.where(first, start, following)
    exists = in_group & (end - start > width) & (begin < end) & tl.where(first, start >= window, start < window)
    return start, begin, tl.where(exists, tl.minimum(begin + width, end), begin)


@kernel(budget=_SUM, schedule=("UNROLL", "BLOCK"))
@triton.jit
def embedding_sum_tiles(
    gradient: PointerIf16.element, positions: Pointer.int32, bag_of: Pointer.int32, factors: Pointer.accumulator,
    winners: PointerIf16.int32, segment_of: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    partials: PointerIf16.accumulator, count: Int32, segments: Int32, columns: Int32If16,
    inner: Int32, outer_stride: Int64, inner_stride: Int64If16, column_stride: Int64,
    DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BAGGED: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr,
    UNROLL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first level: tiles of tokens, of groups that have more than one."""
    terms = gradient, bag_of, factors, winners, inner, outer_stride, inner_stride, column_stride
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
                    terms, position, place < end, column, columns, DOUBLE, SPLIT, UNIT, BAGGED, SCALED, CHOSEN
                )  # fmt: skip
        target = partials + slot.to(tl.int64) * columns + column[None, :]
        tl.store(target, total, (column < columns)[None, :])


@kernel(budget=_SUM, schedule=("UNROLL", "BLOCK"))
@triton.jit
def embedding_sum_partials(
    partials: PointerIf16.accumulator, segment_of: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    count: Int32, segments: Int32, columns: Int32If16, bits: Int32, source: Int32, target: Int32,
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


@kernel(budget=replace(_SUM, spilled_elsewhere=16), schedule=("UNROLL", "ROWS", "BLOCK"))
@triton.jit
def embedding_write_groups(
    gradient: PointerIf16.element, positions: Pointer.int32, bag_of: Pointer.int32, factors: Pointer.accumulator,
    winners: PointerIf16.int32, segment_of: Pointer.int32, ends: Pointer.int32, group_keys: Pointer.int32,
    partials: PointerIf16.accumulator, out: PointerIf16.output, count: Int32, segments: Int32, columns: Int32If16,
    tile: Int32, level_2: Int32, level_3: Int32, level_4: Int32, level_5: Int32,
    inner: Int32, outer_stride: Int64, inner_stride: Int64If16, column_stride: Int64,
    out_row_stride: Int64If16, out_column_stride: Int64,
    DOUBLE: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
    BAGGED: tl.constexpr, SCALED: tl.constexpr, CHOSEN: tl.constexpr, INTO: tl.constexpr,
    UNROLL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rows of groups that occur, each by the programs of its first place.

    Groups up to `tile` tokens are summed here; longer ones have partial sums at the highest level that has
    more than one for them. INTO a buffer, sums are added to its rows.
    """
    terms = gradient, bag_of, factors, winners, inner, outer_stride, inner_stride, column_stride
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
            terms, position, present, column, columns, DOUBLE, SPLIT, UNIT, BAGGED, SCALED, CHOSEN
        )  # fmt: skip
        total = tl.where((length <= tile)[:, None], total, 0.0) + 0.0
        short = tl.where(present & (length <= tile), length, 0)
        for first in range(1, tl.max(short), UNROLL):
            for step in tl.static_range(UNROLL):
                position = tl.load(positions + place + first + step, first + step < short, other=0)
                total += load_term(
                    terms, position, first + step < short, column, columns, DOUBLE, SPLIT, UNIT, BAGGED, SCALED, CHOSEN
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
            row = tl.load(group_keys + segment, present, other=0)
        step = column if UNIT else column * out_column_stride
        target = out + row.to(tl.int64)[:, None] * out_row_stride + step[None, :]
        mask = present[:, None] & in_row
        if INTO:
            if DOUBLE or out.dtype.element_ty == tl.float64:
                total = tl.load(target, mask, other=0).to(tl.float64) + total.to(tl.float64)
            else:
                total = tl.load(target, mask, other=0).to(tl.float32) + total
        tl.store(target, total.to(out.dtype.element_ty), mask)


@kernel(budget=COPY, schedule=("ROWS", "BLOCK"))
@triton.jit
def embedding_write_zeros(
    occurs: Pointer.int32, out: PointerIf16.output, rows: Int32, columns: Int32If16,
    out_row_stride: Int64If16, out_column_stride: Int64,
    UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Zeros for the rows that no token refers to: nearly all of a large table.

    Its programs are few, each with many rows, and leave room for those that sort and sum at the same time.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    step = column if UNIT else column * out_column_stride
    zeros = tl.zeros([ROWS, BLOCK], out.dtype.element_ty)
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        empty = tl.load(occurs + row, row < rows, other=1) == 0
        target = out + row.to(tl.int64)[:, None] * out_row_stride + step[None, :]
        tl.store(target, zeros, empty[:, None] & (column < columns)[None, :])


# ------------------------------------------------------------------------------------------------ launches


class Tile(NamedTuple):
    """The rows and columns that a program takes, and its warps."""

    rows: int
    block: int
    warps: int

    def grid(self, rows: int, columns: int) -> tuple[int, int]:
        return -(-rows // self.rows), -(-columns // self.block)

    @property
    def settings(self) -> dict[str, Any]:
        return {"ROWS": self.rows, "BLOCK": self.block, "num_warps": self.warps}


def tile_of(schedule: Mapping[str, int], part: str, columns: int) -> Tile:
    """The tile of a part of a schedule: short rows share a program, and a warp has something to do."""
    block = max(16, min(schedule[f"{part}_block"], 1 << (columns - 1).bit_length() if columns else 1))
    rows = max(1, schedule.get(f"{part}_elements", block) // block)
    return Tile(rows, block, min(schedule[f"{part}_warps"], max(1, rows * block // 256)))


ALIGNED, ADJACENT, STRIDED = "aligned", "adjacent", "strided"
"""How a kernel reads and writes rows: 16 bytes at a time, adjacent elements, or any strides."""


def by_access(
    setup: Setup, kernel: Kernel, settings: Mapping[str, Any], **exceptions: Mapping[str, Any]
) -> dict[str, Launch]:
    """A kernel for every access, which may have exceptions from the settings."""
    return {
        access: setup.kernel(
            kernel,
            aligned=access == ALIGNED,
            **{"UNIT": access != STRIDED, **settings, **exceptions.get(access, {})},
        )
        for access in (ALIGNED, ADJACENT, STRIDED)
    }


def access_of(is_adjacent: bool, *values: Any) -> str:
    """How rows are read: aligned where tensors begin at multiples of 16, and numbers are such."""
    if not is_adjacent:
        return STRIDED
    for value in values:
        if (value.data_ptr() if isinstance(value, Tensor) else value) % 16:
            return ADJACENT
    return ALIGNED


def level_slots(count: int) -> list[int]:
    """Slots of each level of partial sums that a group of all tokens would have."""
    levels = range(1, LEVELS + 1)
    return [2 * (((count - 1) >> TILE_BITS * level) + 1) for level in levels if count > 1 << TILE_BITS * level]


class GroupSums:
    """Groups tokens by id, and writes the sum of the rows of a gradient in each group to its row, or adds it there.

    The sizes of the problem begin with the tokens, the rows of the result and the columns. The workspace gets the
    regions of `Grouping` and "partials".

    Args:
        setup: binds the kernels.
        ids: the dtype of the ids.
        tile: the longest sum of one token after the other.
        listed: only the groups that occur are written, one after the other; else the other rows become 0.
        into: sums are added to the rows of the result, which has the last dtype of the problem.
        scaled: whether terms have factors; both where that depends on the call.
        bagged: rows of the gradient are bags, and tokens their entries.
        chosen: an entry adds only the columns it has won.
    """

    def __init__(
        self, setup: Setup, ids: torch.dtype, tile: int, *, listed: bool = False, into: bool = False,
        scaled: tuple[bool, ...] = (False,), bagged: bool = False, chosen: bool = False,
    ) -> None:  # fmt: skip
        problem, schedule = setup.problem, setup.schedule
        element, output = problem.dtypes[0], problem.dtypes[-1 if into else 0]
        accumulator = wide_dtype(element)
        self.count, self.rows, self.columns = problem.sizes[:3]
        self.tile, self.listed = tile, listed
        self.limit = MAX_GROUPS if listed else self.rows
        self.slots = level_slots(self.count) if tile < SEQUENTIAL else []
        self.levels = [sum(self.slots[:level]) for level in range(LEVELS)]
        """The first slot of each level."""

        def tile_and_settings(part: str) -> tuple[Tile, dict[str, Any]]:
            part_tile = tile_of(schedule, part, self.columns)
            unroll = schedule[f"{part}_unroll"]
            return part_tile, {"UNROLL": unroll, "BLOCK": part_tile.block, "num_warps": part_tile.warps}

        def reading(kernel: Kernel, settings: dict[str, Any], **unaligned: Any) -> dict[bool, dict[str, Launch]]:
            """A kernel that reads the gradient, by whether terms have factors, and access."""
            settings |= {"element": element, "accumulator": accumulator, "SPLIT": False}
            settings |= {"DOUBLE": element == torch.float64, "BAGGED": bagged, "CHOSEN": chosen}
            strided = {**unaligned, "SPLIT": not bagged}
            return {
                has_factors: by_access(
                    setup, kernel, {**settings, "SCALED": has_factors}, adjacent=unaligned, strided=strided
                )
                for has_factors in scaled
            }

        self.grouping = Grouping(setup, ids, self.count, self.rows, listed=listed, flagged=not listed)
        if tile < SEQUENTIAL:
            setup.scratch(partials=(accumulator, sum(self.slots) * self.columns))
            self.tiles_tile, settings = tile_and_settings("tiles")
            self.sum_tiles = reading(embedding_sum_tiles, settings)
            self.partials_tile, settings = tile_and_settings("partials")
            self.sum_partials = setup.either(embedding_sum_partials, accumulator=accumulator, **settings)
        self.groups_tile, settings = tile_and_settings("groups")
        settings |= {"ROWS": self.groups_tile.rows, "output": output, "INTO": into}
        # Addresses of single elements take registers, and so does float64: with both, more at once would spill.
        unroll = settings["UNROLL"] // 2 if element == torch.float64 else settings["UNROLL"]
        self.write_groups = reading(embedding_write_groups, settings, UNROLL=max(1, unroll))
        if not listed:
            self.zeros_tile = tile_of(schedule, "zeros", self.columns)
            size = self.rows * self.columns * output.itemsize
            self.zeros_programs = schedule["large_zeros_programs" if size >= LARGE_BYTES else "zeros_programs"]
            settings = {"output": output, **self.zeros_tile.settings}
            # Addresses of single elements take registers: of more rows at once they would spill.
            self.write_zeros = by_access(setup, embedding_write_zeros, settings, strided={"ROWS": 1})
            self.concurrently = size >= CONCURRENT_BYTES
        self.device = setup.device

    def launch(
        self, memory: Mapping[str, Any], ids: Any, skipped: int, gradient: Tensor, out: Tensor,
        winners: Tensor | None = None, scaled: bool = False,
    ) -> None:  # fmt: skip
        """Sums rows of the gradient by id, but for a skipped one.

        Of bags, the regions "bag_of" and "factors" have the row and the factor of each entry, and `winners` the entry
        that has won each element.
        """
        count, columns = self.count, self.columns
        self.grouping.begin(memory, ids, count, self.rows, skipped)
        _, inner, outer_stride, inner_stride = Rows.of(gradient)
        column_stride, (out_row_stride, out_column_stride) = gradient.stride(-1), out.stride()
        is_adjacent = outer_stride == 0 and (columns == 1 or column_stride == out_column_stride == 1)
        access = access_of(
            is_adjacent, gradient, out, columns, inner_stride, out_row_stride, 0 if winners is None else winners
        )
        into = {"out": out, "out_row_stride": out_row_stride, "out_column_stride": out_column_stride}
        terms: dict[str, Any] = {
            "gradient": gradient, "winners": winners, "columns": columns, "count": count, "inner": inner,
            "outer_stride": outer_stride, "inner_stride": inner_stride, "column_stride": column_stride,
        }  # fmt: skip

        def write_zeros() -> None:
            if columns:
                row_tiles, column_tiles = self.zeros_tile.grid(self.rows, columns)
                self.write_zeros[access].launch(
                    (min(row_tiles, self.zeros_programs), column_tiles), occurs=memory["occurs"], rows=self.rows,
                    columns=columns, **into,
                )  # fmt: skip

        def write_groups() -> None:
            self._write_groups(memory, terms, into, scaled, access)

        if self.listed:
            write_groups()
        else:
            run_concurrently(self.device, write_groups, write_zeros, worthwhile=self.concurrently)

    def _write_groups(
        self, memory: Mapping[str, Any], terms: dict[str, Any], into: dict[str, Any], scaled: bool, access: str
    ) -> None:
        """Finishes the sort and writes the rows of the groups that occur."""
        count, columns, limit, levels, grouping = self.count, self.columns, self.limit, self.levels, self.grouping
        keys, positions = grouping.finish(memory, count, self.rows)
        if self.listed:
            grouping.list_groups(memory, keys, count, self.rows)
        else:
            grouping.mark_groups(memory, keys, count, self.rows)
        if columns == 0:
            return
        # What a variant does not read, something else stands for.
        terms = terms | {
            "positions": positions, "bag_of": memory.get("bag_of", positions),
            "winners": positions if terms["winners"] is None else terms["winners"],
            "factors": memory.get("factors", positions), "segment_of": memory.get("segment_of", keys),
            "ends": memory["ends"], "partials": memory.get("partials", positions), "segments": limit,
        }  # fmt: skip
        starts = memory["starts"]
        for level, number in enumerate(self.slots):
            if level == 0:
                self.sum_tiles[scaled][access].launch(self.tiles_tile.grid(number, columns), starts=starts, **terms)
            else:
                self.sum_partials[access == ALIGNED].launch(
                    self.partials_tile.grid(number, columns), partials=terms["partials"], starts=starts,
                    segment_of=terms["segment_of"], ends=terms["ends"], count=count, segments=limit, columns=columns,
                    bits=TILE_BITS * (level + 1), source=levels[level - 1], target=levels[level],
                )  # fmt: skip
        self.write_groups[scaled][access].launch(
            self.groups_tile.grid(count, columns), group_keys=memory.get("group_keys", positions),
            tile=self.tile, level_2=levels[1], level_3=levels[2], level_4=levels[3], level_5=levels[4],
            **into, **terms,
        )  # fmt: skip
