"""The adjoint of lines that are too long for a program: kernels, and what launches them.

The entries of many lines are sorted by the element they belong to (`adjoint.device.grouping`). Then the entries of an
element stand next to each other, in order, at places `starts[element]` to `ends[element]`. Their sum is the tree that
`lines` describes: where there is more than one tile, partial sums stand in `partials` at the place where a tile begins,
and every level replaces those of the level below.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.core.problem import wide_dtype
from adjoint.core.workspace import Memory
from adjoint.device.grouping.kernels import Grouping
from adjoint.ops.indexing.take_along_axis.layout import Lines, lines_of
from adjoint.ops.indexing.take_along_axis.plans import TILE, TILE_BITS, lines_at_once
from adjoint.ops.indexing.take_along_axis.triton.take import bind_for_axes, from_the_beginning, offset_of, place_of

_SUM = Budget(registers=128, shared_bytes=1024)

_TILE = tl.constexpr(TILE)
_BITS = tl.constexpr(TILE_BITS)


@kernel(budget=replace(_SUM, registers=168), schedule=("BLOCK",))  # with many axes
@triton.jit
def take_keys(
    indices: Pointer.index, ids: Pointer.int32, count: Int32, entries: Int32, length: Int32, first_line: Int64,
    line_sizes: Int64 * 3, line_index_steps: Int64 * 4, entry_sizes: Int32 * 3, index_steps: Int64 * 4,
    ONE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids[entry] = the element of dx it belongs to, counted from the first line on; −1 out of range."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count
    line, entry = flat // entries, flat % entries
    place = place_of(line + first_line, entry, line_sizes, line_index_steps, entry_sizes, index_steps, ONE, MANY)
    chosen = from_the_beginning(tl.load(indices + place, inside, other=0), length)
    valid = (chosen >= 0) & (chosen < length)
    tl.store(ids + flat, tl.where(valid, line * length + chosen, -1).to(tl.int32), inside)


@triton.jit
def load_entry(
    dout, position, inside, entries, first_line, line_sizes, line_dout_steps, entry_sizes, dout_steps,
    DOUBLE: tl.constexpr, ONE: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """The entries at positions, counted from the first line on, widened; 0 outside."""
    place = offset_of(position // entries + first_line, line_sizes, line_dout_steps, ONE, MANY)
    place += offset_of(position % entries, entry_sizes, dout_steps, True, MANY)
    return tl.load(dout + place, inside, other=0).to(tl.float64 if DOUBLE else tl.float32)


@triton.jit
def load_group(keys, starts, ends, count, groups, BLOCK: tl.constexpr):
    """A program's places, and where the entries of each one's element begin and end."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + place, place < count, other=groups)
    return place, tl.load(starts + key, key < groups, other=0), tl.load(ends + key, key < groups, other=0)


@triton.jit
def has_entries(keys, start, element, count):
    """Whether elements have entries: their first is then at `start`, which is anything for one that has none."""
    inside = (start >= 0) & (start < count)
    return inside & (tl.load(keys + start, inside, other=-1) == element)


@kernel(budget=_SUM, schedule=("BLOCK",))
@triton.jit
def take_sum_tiles(
    dout: Pointer.element, keys: Pointer.int32, positions: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    partials: Pointer.accumulator, count: Int32, groups: Int32, entries: Int32, first_line: Int64,
    line_sizes: Int64 * 3, line_dout_steps: Int64 * 4, entry_sizes: Int32 * 3, dout_steps: Int64 * 4,
    DOUBLE: tl.constexpr, ONE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of each tile of an element that has more than one, at the place where the tile begins."""
    place, start, end = load_group(keys, starts, ends, count, groups, BLOCK)
    begins = (end - start > _TILE) & ((place - start) % _TILE == 0)
    number = tl.where(begins, tl.minimum(end - place, _TILE), 0)
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    for step in range(0, tl.max(number)):
        position = tl.load(positions + place + step, step < number, other=0)
        total += load_entry(
            dout, position, step < number, entries, first_line, line_sizes, line_dout_steps, entry_sizes, dout_steps,
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
    place, start, end = load_group(keys, starts, ends, count, groups, BLOCK)
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
    dout: Pointer.element, keys: Pointer.int32, positions: Pointer.int32, starts: Pointer.int32, ends: Pointer.int32,
    partials: Pointer.accumulator, dx: Pointer.element, count: Int32, groups: Int32, entries: Int32, length: Int32,
    axis_step: Int64,
    first_line: Int64, line_sizes: Int64 * 3, dx_steps: Int64 * 4, line_dout_steps: Int64 * 4, entry_sizes: Int32 * 3,
    dout_steps: Int64 * 4,
    DOUBLE: tl.constexpr, ONE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Every element of dx: the sum of its entries, of its tiles where there are several, or zero."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = element < groups
    start = tl.load(starts + element, inside, other=-1)
    size = tl.where(has_entries(keys, start, element, count), tl.load(ends + element, inside, other=0) - start, 0)
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    number = tl.where(size <= _TILE, size, 0)
    for step in range(0, tl.max(number)):
        position = tl.load(positions + start + step, step < number, other=0)
        total += load_entry(
            dout, position, step < number, entries, first_line, line_sizes, line_dout_steps, entry_sizes, dout_steps,
            DOUBLE, ONE, MANY,
        )  # fmt: skip
    # The level of partial sums with at most TILE of them for this element.
    bits = tl.full([BLOCK], _BITS, tl.int32)
    for _ in tl.static_range(5):
        bits = tl.where(((size - 1) >> bits) >= _TILE, bits + _BITS, bits)
    number = tl.where(size > _TILE, ((size - 1) >> bits) + 1, 0)
    for step in range(0, tl.max(number)):
        total += tl.load(partials + start + (step << bits), step < number, other=0)
    line = element // length + first_line
    target = offset_of(line, line_sizes, dx_steps, ONE, MANY) + (element % length) * axis_step
    tl.store(dx + target, total.to(dx.dtype.element_ty), inside)


# ----------------------------------------------------------------------------------------------- launches


def by_sorting(setup: Setup) -> Execute:
    """For any number of entries: sorts them by element, then sums; so many lines at once as the workspace has room."""
    schedule, (element, index) = setup.schedule, setup.problem.dtypes
    (shape, axis, _), (line_count, entries) = setup.problem.options, setup.problem.sizes
    length, accumulator = shape[axis], wide_dtype(element)
    at_once = min(line_count, lines_at_once(max(length, entries)))
    most = at_once * entries
    # Bits of the tiles of each level of partial sums that an element with all entries of a line would have.
    levels = [bits for bits in range(TILE_BITS, 31, TILE_BITS) if entries > 1 << bits]
    keys_block, sums_block = schedule["keys_block"], schedule["sums_block"]
    sums: dict[str, Any] = {"BLOCK": sums_block, "num_warps": schedule["sums_warps"], "accumulator": accumulator}

    def bind(many: bool) -> dict[bool, tuple[Launch, Launch, Launch]]:
        """The kernels that read tensors of the call, by whether lines lie along one axis."""
        reading = {**sums, "element": element, "DOUBLE": element == torch.float64, "MANY": many}
        keys: dict[str, Any] = {"BLOCK": keys_block, "num_warps": schedule["keys_warps"], "MANY": many}
        return {
            one: (
                setup.kernel(take_keys, index=index, ONE=one, **keys),
                setup.kernel(take_sum_tiles, ONE=one, **reading),
                setup.kernel(take_write_sums, ONE=one, **reading),
            )
            for one in (True, False)
        }

    by_axes = bind_for_axes(setup, bind)
    sum_partials = setup.kernel(take_sum_partials, **sums)
    grouping = Grouping(setup, torch.int32, most, at_once * length)
    setup.scratch(ids=(torch.int32, max(1, most)), partials=(accumulator, most if entries > TILE else 1))
    setup.add_numeric(tile=TILE)

    def sum_lines(memory: Memory, lines: Lines, first_line: int, dout: Tensor, indices: Tensor, dx: Tensor) -> None:
        """As many lines of dx as are taken at once, or are left."""
        number = min(at_once, lines.line_count - first_line)
        count, groups = number * entries, number * length
        make_keys, sum_tiles, write_sums = by_axes[lines.axes.number == 1]
        sums_grid = (-(-count // sums_block),)
        make_keys.launch(
            (-(-count // keys_block),), indices=indices, ids=memory["ids"], count=count, first_line=first_line,
            **lines.select(take_keys.types),
        )  # fmt: skip
        grouping.begin(memory, memory["ids"], count, groups)
        keys, positions = grouping.finish(memory, count, groups)
        grouping.mark_groups(memory, keys, count, groups)
        sorted_entries = {name: memory[name] for name in ("starts", "ends", "partials")}
        for bits in levels:
            if bits == TILE_BITS:
                sum_tiles.launch(
                    sums_grid, dout=dout, keys=keys, positions=positions, count=count, groups=groups,
                    first_line=first_line, **sorted_entries, **lines.select(take_sum_tiles.types),
                )  # fmt: skip
            else:
                sum_partials.launch(sums_grid, keys=keys, count=count, groups=groups, bits=bits, **sorted_entries)
        write_sums.launch(
            (-(-groups // sums_block),), dout=dout, keys=keys, positions=positions, dx=dx, count=count, groups=groups,
            first_line=first_line, **sorted_entries, **lines.select(take_write_sums.types),
        )  # fmt: skip

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, indices = arguments[:2]
        (dx,) = outputs
        if dx.numel() and dout.numel():
            memory, lines = setup.memory(workspace), lines_of(dout, indices, shape, axis)
            for first in range(0, lines.line_count, at_once):
                sum_lines(memory, lines, first, dout, indices, dx)
        else:
            dx.zero_()

    return execute
