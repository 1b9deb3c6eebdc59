"""The adjoint of lines that are too long for a program: kernels, and what launches them.

The entries of many lines are sorted by the element they belong to (`adjoint.device.grouping`). Then the entries of an
element stand next to each other, in order, at places `starts[element]` to `ends[element]`. Their sum is the tree that
`lines` describes: where there is more than one tile, partial sums stand in `partials` at the place where a tile begins,
and every level replaces those of the level below.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.core.problem import wide_dtype
from adjoint.device.grouping.kernels import Grouping
from adjoint.ops.indexing.take_along_axis.layout import Lines, lines_of
from adjoint.ops.indexing.take_along_axis.plans import TILE_BITS, lines_at_once
from adjoint.ops.indexing.take_along_axis.triton.offsets import bind_for_axes, from_the_beginning, offset_of

_SUM = Budget(registers=128, shared_bytes=1024)

_TILE = tl.constexpr(1 << TILE_BITS)
_BITS = tl.constexpr(TILE_BITS)


@kernel(budget=replace(_SUM, registers=168), schedule=("BLOCK",))  # with many axes
@triton.jit
def take_keys(
    indices: Pointer.index, ids: Pointer.int32, count: Int32, entries: Int32, length: Int32, first_line: Int64,
    line_size_1: Int64, line_size_2: Int64, line_size_3: Int64,
    line_index_step_0: Int64, line_index_step_1: Int64, line_index_step_2: Int64, line_index_step_3: Int64,
    entry_size_1: Int32, entry_size_2: Int32, entry_size_3: Int32,
    index_step_0: Int64, index_step_1: Int64, index_step_2: Int64, index_step_3: Int64,
    ONE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids[entry] = the element of dx it belongs to, counted from the first line on; −1 out of range."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count
    line, entry = flat // entries, flat % entries
    place = offset_of(
        line + first_line, line_size_1, line_size_2, line_size_3,
        line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3, ONE, MANY,
    ) + offset_of(
        entry, entry_size_1, entry_size_2, entry_size_3,
        index_step_0, index_step_1, index_step_2, index_step_3, True, MANY,
    )  # fmt: skip
    chosen = from_the_beginning(tl.load(indices + place, inside, other=0), length)
    valid = (chosen >= 0) & (chosen < length)
    tl.store(ids + flat, tl.where(valid, line * length + chosen, -1).to(tl.int32), inside)


@triton.jit
def load_entry(
    dout, position, inside, entries, first_line, line_size_1, line_size_2, line_size_3,
    line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, ONE: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The entries at positions, counted from the first line on, widened; 0 outside."""
    place = offset_of(
        position // entries + first_line, line_size_1, line_size_2, line_size_3,
        line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3, ONE, MANY,
    ) + offset_of(
        position % entries, entry_size_1, entry_size_2, entry_size_3,
        dout_step_0, dout_step_1, dout_step_2, dout_step_3, True, MANY,
    )  # fmt: skip
    return tl.load(dout + place, inside, other=0).to(tl.float64 if DOUBLE else tl.float32)


@kernel(budget=_SUM, schedule=("BLOCK",))
@triton.jit
def take_sum_tiles(
    dout: Pointer.element, keys: Pointer.int32, positions: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    partials: Pointer.accumulator, count: Int32, groups: Int32, entries: Int32, first_line: Int64,
    line_size_1: Int64, line_size_2: Int64, line_size_3: Int64,
    line_dout_step_0: Int64, line_dout_step_1: Int64, line_dout_step_2: Int64, line_dout_step_3: Int64,
    entry_size_1: Int32, entry_size_2: Int32, entry_size_3: Int32,
    dout_step_0: Int64, dout_step_1: Int64, dout_step_2: Int64, dout_step_3: Int64,
    DOUBLE: tl.constexpr, ONE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of each tile of an element that has more than one, at the place where the tile begins."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + place, place < count, other=groups)
    start = tl.load(starts + key, key < groups, other=0)
    end = tl.load(ends + key, key < groups, other=0)
    begins = (end - start > _TILE) & ((place - start) % _TILE == 0)
    number = tl.where(begins, tl.minimum(end - place, _TILE), 0)
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    for step in range(0, tl.max(number)):
        position = tl.load(positions + place + step, step < number, other=0)
        total += load_entry(
            dout, position, step < number, entries, first_line, line_size_1, line_size_2, line_size_3,
            line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
            entry_size_1, entry_size_2, entry_size_3, dout_step_0, dout_step_1, dout_step_2, dout_step_3,
            DOUBLE, ONE, MANY,
        )  # fmt: skip
    tl.store(partials + place, total, begins)


@kernel(budget=_SUM, schedule=("BLOCK",))
@triton.jit
def take_sum_partials(
    keys: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32, partials: Pointer.accumulator, count: Int32,
    groups: Int32, bits: Int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A further level: tiles of 2^bits places, from those of the level below, at the place where each begins.

    Of all places, the one where a tile begins is read here by its own program alone: sums replace their first term.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + place, place < count, other=groups)
    start = tl.load(starts + key, key < groups, other=0)
    end = tl.load(ends + key, key < groups, other=0)
    below = bits - _BITS
    begins = (end - start > (1 << bits)) & (((place - start) & ((1 << bits) - 1)) == 0)
    number = tl.where(begins, (tl.minimum(end - place, 1 << bits) + ((1 << below) - 1)) >> below, 0)
    total = tl.zeros([BLOCK], partials.dtype.element_ty)
    for step in range(0, tl.max(number)):
        total += tl.load(partials + place + (step << below), step < number, other=0)
    tl.store(partials + place, total, begins)


@kernel(budget=replace(_SUM, spilled_elsewhere=16), schedule=("BLOCK",))
@triton.jit
def take_write_sums(
    dout: Pointer.element, positions: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    partials: Pointer.accumulator, dx: Pointer.element, groups: Int32, entries: Int32, length: Int32, axis_step: Int64,
    first_line: Int64,
    line_size_1: Int64, line_size_2: Int64, line_size_3: Int64,
    dx_step_0: Int64, dx_step_1: Int64, dx_step_2: Int64, dx_step_3: Int64,
    line_dout_step_0: Int64, line_dout_step_1: Int64, line_dout_step_2: Int64, line_dout_step_3: Int64,
    entry_size_1: Int32, entry_size_2: Int32, entry_size_3: Int32,
    dout_step_0: Int64, dout_step_1: Int64, dout_step_2: Int64, dout_step_3: Int64,
    DOUBLE: tl.constexpr, ONE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every element of dx: the sum of its entries, of its tiles where there are several, or zero."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < groups
    start = tl.load(starts + element, inside, other=-1)
    end = tl.load(ends + element, start >= 0, other=-1)
    count = end - start
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    number = tl.where(count <= _TILE, count, 0)
    for step in range(0, tl.max(number)):
        position = tl.load(positions + start + step, step < number, other=0)
        total += load_entry(
            dout, position, step < number, entries, first_line, line_size_1, line_size_2, line_size_3,
            line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
            entry_size_1, entry_size_2, entry_size_3, dout_step_0, dout_step_1, dout_step_2, dout_step_3,
            DOUBLE, ONE, MANY,
        )  # fmt: skip
    # The level of partial sums with at most TILE of them for this element.
    bits = tl.full([BLOCK], _BITS, tl.int32)
    for _ in tl.static_range(5):
        bits = tl.where(((count - 1) >> bits) >= _TILE, bits + _BITS, bits)
    number = tl.where(count > _TILE, ((count - 1) >> bits) + 1, 0)
    for step in range(0, tl.max(number)):
        total += tl.load(partials + start + (step << bits), step < number, other=0)
    line = element // length + first_line
    target = offset_of(
        line, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, ONE, MANY
    ) + (element % length) * axis_step  # fmt: skip
    tl.store(dx + target, total.to(dx.dtype.element_ty), inside)


# ----------------------------------------------------------------------------------------------- launches


def _levels(entries: int) -> list[int]:
    """Bits of the tiles of each level of partial sums that an element with all entries of a line would have."""
    levels, bits = [], TILE_BITS
    while entries > 1 << bits:
        levels.append(bits)
        bits += TILE_BITS
    return levels


def by_sorting(setup: Setup) -> Execute:
    """For any number of entries: sorts them by element, then sums; so many lines at once as the workspace has room."""
    (shape, axis, _), (line_count, entries) = setup.problem.options, setup.problem.sizes
    length = shape[axis]
    at_once = min(line_count, lines_at_once(max(length, entries)))
    sums = _SortedSums(setup, at_once * entries, at_once * length, entries, length)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, indices = arguments[:2]
        (dx,) = outputs
        if dx.numel() == 0:
            return
        if dout.numel() == 0:
            dx.zero_()
            return
        memory, lines = setup.memory(workspace), lines_of(dout, indices, shape, axis)
        for first in range(0, lines.line_count, at_once):
            sums.launch(memory, lines, first, min(at_once, lines.line_count - first), dout, indices, dx)

    return execute


class _SortedSums:
    """The sums of some lines at a time; `count` entries and `groups` elements at most."""

    def __init__(self, setup: Setup, count: int, groups: int, entries: int, length: int) -> None:
        schedule, (element, index) = setup.schedule, setup.problem.dtypes
        accumulator = wide_dtype(element)
        self.entries, self.length, self.levels = entries, length, _levels(entries)
        self.keys_block, self.sums_block = schedule["keys_block"], schedule["sums_block"]
        sums: dict[str, Any] = {"BLOCK": self.sums_block, "num_warps": schedule["sums_warps"]}

        def bind(many: bool) -> dict[bool, tuple[Launch, Launch, Launch]]:
            """The kernels that read tensors of the call, by whether lines lie along one axis."""
            reading: dict[str, Any] = {"element": element, "accumulator": accumulator, "MANY": many} | sums
            reading["DOUBLE"] = element == torch.float64
            keys: dict[str, Any] = {"BLOCK": self.keys_block, "num_warps": schedule["keys_warps"], "MANY": many}
            return {
                one: (
                    setup.kernel(take_keys, index=index, ONE=one, **keys),
                    setup.kernel(take_sum_tiles, ONE=one, **reading),
                    setup.kernel(take_write_sums, ONE=one, **reading),
                )
                for one in (True, False)
            }

        self.by_axes = bind_for_axes(setup, bind)
        self.sum_partials = setup.kernel(take_sum_partials, accumulator=accumulator, **sums)
        self.grouping = Grouping(setup, torch.int32, count, groups)
        setup.scratch(ids=(torch.int32, max(1, count)))
        setup.scratch(partials=(accumulator, count if entries > 1 << TILE_BITS else 1))

    def launch(
        self,
        memory: Mapping[str, Any],
        lines: Lines,
        first_line: int,
        number: int,
        dout: Tensor,
        indices: Tensor,
        dx: Tensor,
    ) -> None:
        """Writes a number of lines of dx."""
        entries, length = self.entries, self.length
        count, groups = number * entries, number * length
        take_keys, sum_tiles, write_sums = self.by_axes[lines.axes.number == 1]
        ids, starts, ends, partials = memory["ids"], memory["starts"], memory["ends"], memory["partials"]
        sums_grid = (-(-count // self.sums_block),)
        take_keys.launch(
            (-(-count // self.keys_block),), indices=indices, ids=ids, count=count, entries=entries, length=length,
            first_line=first_line, **lines.select(take_keys.kernel.types),
        )  # fmt: skip
        keys, positions = self.grouping.sort(memory, ids, count, groups)
        self.grouping.mark_groups(memory, keys, count, groups)
        for bits in self.levels:
            if bits == TILE_BITS:
                sum_tiles.launch(
                    sums_grid, dout=dout, keys=keys, positions=positions, starts=starts, ends=ends, partials=partials,
                    count=count, groups=groups, entries=entries, first_line=first_line,
                    **lines.select(sum_tiles.kernel.types),
                )  # fmt: skip
            else:
                self.sum_partials.launch(
                    sums_grid, keys=keys, starts=starts, ends=ends, partials=partials, count=count, groups=groups,
                    bits=bits,
                )  # fmt: skip
        write_sums.launch(
            (-(-groups // self.sums_block),), dout=dout, positions=positions, starts=starts, ends=ends,
            partials=partials, dx=dx, groups=groups, entries=entries, length=length, axis_step=lines.axis_step,
            first_line=first_line, **lines.select(write_sums.kernel.types),
        )  # fmt: skip
