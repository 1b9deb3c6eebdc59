"""Triton kernels of the adjoint of lines that are too long for a program.

The entries of many lines are sorted by the element they belong to (`adjoint.device.grouping`). Then the entries of an
element stand together, in order, at places `starts[element]` to `ends[element]`. Their sum is the tree that `kernels`
describes: where there is more than one tile, partial sums stand in `partials` at the place where a tile begins, and
every level replaces those of the level below.
"""

from dataclasses import replace

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.ops.indexing.kernels import from_the_beginning, walk
from adjoint.ops.indexing.plans import TILE_BITS

_TILE = tl.constexpr(1 << TILE_BITS)
_BITS = tl.constexpr(TILE_BITS)


@triton.jit
def take_keys(
    indices, ids, count, entries, length, first_line, line_size_1, line_size_2, line_size_3,
    line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3,
    entry_size_1, entry_size_2, entry_size_3, index_step_0, index_step_1, index_step_2, index_step_3,
    LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """ids[entry] = the element of dx it belongs to, counted from the first line on; −1 out of range."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count
    line, entry = flat // entries, flat % entries
    place = walk(
        line + first_line, line_size_1, line_size_2, line_size_3,
        line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3, LINE_AXES,
    ) + walk(
        entry, entry_size_1, entry_size_2, entry_size_3,
        index_step_0, index_step_1, index_step_2, index_step_3, ENTRY_AXES,
    )  # fmt: skip
    chosen = from_the_beginning(tl.load(indices + place, inside, other=0), length)
    valid = (chosen >= 0) & (chosen < length)
    tl.store(ids + flat, tl.where(valid, line * length + chosen, -1).to(tl.int32), inside)


@triton.jit
def load_entry(
    dout, position, inside, entries, first_line, line_size_1, line_size_2, line_size_3,
    line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr,
):  # fmt: skip
    """The entries at positions, counted from the first line on, widened; 0 outside."""
    place = walk(
        position // entries + first_line, line_size_1, line_size_2, line_size_3,
        line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3, LINE_AXES,
    ) + walk(
        position % entries, entry_size_1, entry_size_2, entry_size_3,
        dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
    )  # fmt: skip
    return tl.load(dout + place, inside, other=0).to(tl.float64 if DOUBLE else tl.float32)


@triton.jit
def take_sum_tiles(
    dout, keys, positions, starts, ends, partials, count, groups, entries, first_line,
    line_size_1, line_size_2, line_size_3, line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr, BLOCK: tl.constexpr,
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
            DOUBLE, LINE_AXES, ENTRY_AXES,
        )  # fmt: skip
    tl.store(partials + place, total, begins)


@triton.jit
def take_sum_partials(keys, starts, ends, partials, count, groups, bits, BLOCK: tl.constexpr):
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


@triton.jit
def take_write_sums(
    dout, positions, starts, ends, partials, dx, groups, entries, length, axis_step, first_line,
    line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3,
    line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr, BLOCK: tl.constexpr,
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
            DOUBLE, LINE_AXES, ENTRY_AXES,
        )  # fmt: skip
    # The level of partial sums with at most TILE of them for this element.
    bits = tl.full([BLOCK], _BITS, tl.int32)
    for _ in tl.static_range(5):
        bits = tl.where(((count - 1) >> bits) >= _TILE, bits + _BITS, bits)
    number = tl.where(count > _TILE, ((count - 1) >> bits) + 1, 0)
    for step in range(0, tl.max(number)):
        total += tl.load(partials + start + (step << bits), step < number, other=0)
    line = element // length + first_line
    target = walk(
        line, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, LINE_AXES
    ) + (element % length) * axis_step  # fmt: skip
    tl.store(dx + target, total.to(dx.dtype.element_ty), inside)


_SUM = Budget(registers=128, shared_bytes=1024)

KERNELS = (
    kernels.register(take_keys, budget=replace(_SUM, registers=168)),  # with many axes
    kernels.register(take_sum_tiles, budget=_SUM),
    kernels.register(take_sum_partials, budget=_SUM),
    kernels.register(take_write_sums, budget=replace(_SUM, spilled_elsewhere=16)),
)
