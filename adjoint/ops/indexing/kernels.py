"""Triton kernels of taking along an axis, and of its adjoint.

A tensor is walked along up to four axes: see `walks`. Sums over the entries of an element run in an order fixed
by the element alone: its entries, in their order, are added one after the other in tiles of TILE; TILE tiles make
a tile of the next level, and so on.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.faults import record
from adjoint.core.kernels import Budget
from adjoint.ops.indexing.plans import TILE_BITS

_TILE = tl.constexpr(1 << TILE_BITS)
_BITS = tl.constexpr(TILE_BITS)


@triton.jit
def walk(flat, size_1, size_2, size_3, step_0, step_1, step_2, step_3, AXES: tl.constexpr):
    """Where the element with a number lies. Steps are 64 bits wide, and so is what is multiplied by them."""
    if AXES == 1:
        return flat * step_3
    rest = flat // size_3
    offset = (flat % size_3) * step_3
    if AXES == 2:
        return offset + rest * step_2
    offset += (rest % size_2) * step_2
    rest = rest // size_2
    if AXES == 3:
        return offset + rest * step_1
    return offset + (rest % size_1) * step_1 + (rest // size_1) * step_0


@triton.jit
def from_the_beginning(index, length):
    """An index below 0 counts from the end."""
    return tl.where(index < 0, index + length, index)


# --------------------------------------------------------------------------------------------- taking


@triton.jit
def take_forward(
    x, indices, out, status_word, fault, count, length, axis_step, size_1, size_2, size_3,
    x_step_0, x_step_1, x_step_2, x_step_3, index_step_0, index_step_1, index_step_2, index_step_3,
    number_step_0, number_step_1, number_step_2, number_step_3,
    RAISE: tl.constexpr, AXES: tl.constexpr, PLAIN: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = the elements of x at the indices, and 0 where an index is out of range."""
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LARGE:
        flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = flat < count
    place = flat
    if not PLAIN:
        place = walk(
            flat, size_1, size_2, size_3, index_step_0, index_step_1, index_step_2, index_step_3, AXES
        )  # fmt: skip
    index = tl.load(indices + place, inside, other=0)
    chosen = from_the_beginning(index, length)
    valid = (chosen >= 0) & (chosen < length)
    if RAISE:
        number = flat
        if not PLAIN:
            number = walk(
                flat, size_1, size_2, size_3, number_step_0, number_step_1, number_step_2, number_step_3, AXES
            )  # fmt: skip
        record(status_word, fault, number, index, inside & (valid == 0))
    line = walk(flat, size_1, size_2, size_3, x_step_0, x_step_1, x_step_2, x_step_3, AXES)
    value = tl.load(x + line + tl.where(valid, chosen, 0) * axis_step, inside & valid, other=0)
    tl.store(out + flat, value, inside)


# ----------------------------------------------------------------------------- the adjoint, line by line


@triton.jit
def take_backward_lines(
    dout, indices, dx, lines, entries, length, axis_step, spans, span,
    line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3,
    line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3,
    line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, index_step_0, index_step_1, index_step_2, index_step_3,
    dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, SUM: tl.constexpr, UNIT: tl.constexpr, LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr,
    LINES: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lines with few entries: a program fills `span` elements of LINES lines with zeros, then writes the sums.

    With SUM, every entry is compared with every other of its line: the first of those with one index writes
    their sum. Without, no index repeats, and every entry writes itself. UNIT lines lie along the axis; of
    others, neighbours lie side by side.
    """
    program = tl.program_id(0)
    begin = (program % spans) * span
    line = (program // spans).to(tl.int64) * LINES + tl.arange(0, LINES)
    if UNIT:
        line, entry, element = line[:, None], tl.arange(0, ENTRIES)[None, :], tl.arange(0, BLOCK)[None, :]
    else:
        line, entry, element = line[None, :], tl.arange(0, ENTRIES)[:, None], tl.arange(0, BLOCK)[:, None]
    present = line < lines
    target = dx + walk(
        line, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, LINE_AXES
    )  # fmt: skip
    line_indices = indices + walk(
        line, line_size_1, line_size_2, line_size_3,
        line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3, LINE_AXES,
    )  # fmt: skip
    line_dout = dout + walk(
        line, line_size_1, line_size_2, line_size_3,
        line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3, LINE_AXES,
    )  # fmt: skip

    inside = present & (entry < entries)
    place = walk(
        entry, entry_size_1, entry_size_2, entry_size_3,
        index_step_0, index_step_1, index_step_2, index_step_3, ENTRY_AXES,
    )  # fmt: skip
    chosen = from_the_beginning(tl.load(line_indices + place, inside, other=0), length)
    writes = inside & (chosen >= 0) & (chosen < length)
    # Zeros first: they are on their way to memory while the entries are compared.
    zeros = tl.zeros((line + element).shape, dx.dtype.element_ty)
    for first in range(begin, tl.minimum(begin + span, length), BLOCK):
        step = first + element if UNIT else (first + element) * axis_step
        tl.store(target + step, zeros, present & (first + element < length))
    if SUM:
        total = tl.zeros(chosen.shape, tl.float64 if DOUBLE else tl.float32)
        tile = total
        found = tl.zeros(chosen.shape, tl.int32)
        for other in range(0, entries):
            other_place = walk(
                other, entry_size_1, entry_size_2, entry_size_3,
                index_step_0, index_step_1, index_step_2, index_step_3, ENTRY_AXES,
            )  # fmt: skip
            other_chosen = from_the_beginning(tl.load(line_indices + other_place, present, other=0), length)
            term_place = walk(
                other, entry_size_1, entry_size_2, entry_size_3,
                dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
            )  # fmt: skip
            term = tl.load(line_dout + term_place, present, other=0).to(total.dtype)
            same = other_chosen == chosen
            writes = writes & ((same == 0) | (entry <= other))
            tile += tl.where(same, term, 0.0)
            if ENTRIES > _TILE:
                found += same.to(tl.int32)
                full = same & (found % _TILE == 0)
                total += tl.where(full, tile, 0.0)
                tile = tl.where(full, 0.0, tile)
        total += tile
    else:
        place = walk(
            entry, entry_size_1, entry_size_2, entry_size_3,
            dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
        )  # fmt: skip
        total = tl.load(line_dout + place, writes, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0

    tl.debug_barrier()  # a sum goes where another thread may have written zero
    writes = writes & (chosen >= begin) & (chosen < begin + span)
    tl.store(target + chosen * axis_step, total.to(dx.dtype.element_ty), writes)


@triton.jit
def take_scatter(
    dout, indices, dx, lines, entries, length, axis_step,
    line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3,
    line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3,
    line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, index_step_0, index_step_1, index_step_2, index_step_3,
    dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, UNIT: tl.constexpr, LARGE: tl.constexpr, LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Every entry to its element of dx, which is zero before; for indices that do not repeat.

    Neighbouring threads take neighbouring entries of UNIT lines, and of others neighbouring lines.
    """
    flat = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LARGE:
        flat = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if UNIT:
        line, entry = flat // entries, flat % entries
    else:
        line, entry = flat % lines, flat // lines
    inside = (line < lines) & (entry < entries)
    place = walk(
        line, line_size_1, line_size_2, line_size_3,
        line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3, LINE_AXES,
    ) + walk(
        entry, entry_size_1, entry_size_2, entry_size_3,
        index_step_0, index_step_1, index_step_2, index_step_3, ENTRY_AXES,
    )  # fmt: skip
    chosen = from_the_beginning(tl.load(indices + place, inside, other=0), length)
    valid = inside & (chosen >= 0) & (chosen < length)
    place = walk(
        line, line_size_1, line_size_2, line_size_3,
        line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3, LINE_AXES,
    ) + walk(
        entry, entry_size_1, entry_size_2, entry_size_3,
        dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
    )  # fmt: skip
    value = tl.load(dout + place, valid, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0
    place = walk(
        line, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, LINE_AXES
    )  # fmt: skip
    tl.store(dx + place + chosen * axis_step, value.to(dx.dtype.element_ty), valid)


# ------------------------------------------------------------------------------- the adjoint, by sorting


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


_COPY = Budget(registers=128)
_SUM = Budget(registers=255, shared_bytes=8192)

KERNELS = (
    kernels.register(take_forward, budget=_COPY),
    kernels.register(take_backward_lines, budget=_SUM),
    kernels.register(take_scatter, budget=_COPY),
    kernels.register(take_keys, budget=_COPY),
    kernels.register(take_sum_tiles, budget=_SUM),
    kernels.register(take_sum_partials, budget=_SUM),
    kernels.register(take_write_sums, budget=_SUM),
)
