"""Triton kernels of taking along an axis, and of its adjoint.

A tensor is walked along up to four axes: see `walks`. Sums over the entries of an element run in an order fixed
by the element alone: its entries, in their order, are added one after the other in tiles of TILE; TILE tiles make
a tile of the next level, and so on. Lines too long for a program are sorted: see `sorting_kernels`.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record
from adjoint.ops.indexing.plans import TILE_BITS

_TILE = tl.constexpr(1 << TILE_BITS)


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
def take_backward_few(
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
            total += tl.where(same, term, 0.0)
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
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def take_backward_lines(
    dout, indices, dx, order, partials, lines, first_line, entries, length, axis_step,
    line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3,
    line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3,
    line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3,
    entry_size_1, entry_size_2, entry_size_3, index_step_0, index_step_1, index_step_2, index_step_3,
    dout_step_0, dout_step_1, dout_step_2, dout_step_3,
    DOUBLE: tl.constexpr, SUM: tl.constexpr, FILL: tl.constexpr, UNIT: tl.constexpr, LONG: tl.constexpr,
    LINE_AXES: tl.constexpr, ENTRY_AXES: tl.constexpr,
    LINES: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lines whose entries fit a program: it fills them with zeros (FILL), then writes the sums.

    With SUM, a line's entries are sorted by index and number, and put into `order` for all threads to read; the
    first of those with one index writes their sum. Sums of tiles are left in `partials` on the way. Without,
    no index repeats, and every entry writes itself. LONG keys have 64 bits.
    """
    local = tl.program_id(0) * LINES + tl.arange(0, LINES)
    entry = tl.arange(0, ENTRIES)[None, :]
    line = (local + first_line)[:, None]
    present = line < lines
    target = dx + walk(
        line, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, LINE_AXES
    )  # fmt: skip
    line_dout = dout + walk(
        line, line_size_1, line_size_2, line_size_3,
        line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3, LINE_AXES,
    )  # fmt: skip
    place = walk(
        line, line_size_1, line_size_2, line_size_3,
        line_index_step_0, line_index_step_1, line_index_step_2, line_index_step_3, LINE_AXES,
    ) + walk(
        entry, entry_size_1, entry_size_2, entry_size_3,
        index_step_0, index_step_1, index_step_2, index_step_3, ENTRY_AXES,
    )  # fmt: skip
    inside = present & (entry < entries)
    chosen = from_the_beginning(tl.load(indices + place, inside, other=0), length)
    writes = inside & (chosen >= 0) & (chosen < length)
    if FILL:  # on its way to memory while the entries are sorted
        if UNIT:
            for first in range(0, length, BLOCK):
                element = first + tl.arange(0, BLOCK)[None, :]
                tl.store(target + element, 0.0, present & (element < length))
        else:  # threads along neighbouring lines
            side = (local + first_line)[None, :]
            beside = dx + walk(
                side, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, LINE_AXES
            )  # fmt: skip
            for first in range(0, length, BLOCK):
                element = first + tl.arange(0, BLOCK)[:, None]
                tl.store(beside + element * axis_step, 0.0, (side < lines) & (element < length))
    if SUM:
        key = tl.where(writes, chosen, length).to(tl.int64 if LONG else tl.int32) * ENTRIES + entry
        key = tl.sort(key)
        own = order + local.to(tl.int64)[:, None] * ENTRIES + entry
        tl.store(own, key, present)
        tl.debug_barrier()  # what one thread has sorted, another reads
        chosen = key // ENTRIES
        leads = (entry == 0) | (tl.load(own - 1, present & (entry > 0), other=0) // ENTRIES != chosen)
        # How many entries of its index an entry has before it.
        rank = entry - tl.associative_scan(tl.where(leads, entry, 0), 1, larger)
        counts = present & (chosen < length)
        begins = counts & (rank % _TILE == 0)
        total = tl.zeros(begins.shape, tl.float64 if DOUBLE else tl.float32)
        for step in range(0, tl.max(tl.where(counts, rank % _TILE + 1, 0))):
            other = tl.load(own + step, begins & (entry + step < ENTRIES), other=-1)
            same = begins & (other // ENTRIES == chosen) & (other >= 0)
            term = walk(
                other % ENTRIES, entry_size_1, entry_size_2, entry_size_3,
                dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
            )  # fmt: skip
            total += tl.load(line_dout + term, same, other=0).to(total.dtype)
        writes = counts & leads
        if ENTRIES > _TILE:
            tiles = partials + local.to(tl.int64)[:, None] * ENTRIES + entry
            tl.store(tiles, total, begins)
            tl.debug_barrier()
            total = tl.zeros(begins.shape, tl.float64 if DOUBLE else tl.float32)
            for step in range(0, tl.max(tl.where(counts, rank // _TILE + 1, 0))):
                near = writes & (entry + step * _TILE < ENTRIES)
                other = tl.load(own + step * _TILE, near, other=-1)
                same = near & (other // ENTRIES == chosen) & (other >= 0)
                total += tl.load(tiles + step * _TILE, same, other=0)
    else:
        term = walk(
            entry, entry_size_1, entry_size_2, entry_size_3,
            dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
        )  # fmt: skip
        total = tl.load(line_dout + term, writes, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0
    tl.debug_barrier()  # a sum goes where another thread may have written zero
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
    index = tl.load(indices + place, inside, other=0)
    place = walk(
        line, line_size_1, line_size_2, line_size_3,
        line_dout_step_0, line_dout_step_1, line_dout_step_2, line_dout_step_3, LINE_AXES,
    ) + walk(
        entry, entry_size_1, entry_size_2, entry_size_3,
        dout_step_0, dout_step_1, dout_step_2, dout_step_3, ENTRY_AXES,
    )  # fmt: skip
    # On its way before it is known whether its index is valid.
    value = tl.load(dout + place, inside, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0
    chosen = from_the_beginning(index, length)
    valid = inside & (chosen >= 0) & (chosen < length)
    place = walk(
        line, line_size_1, line_size_2, line_size_3, dx_step_0, dx_step_1, dx_step_2, dx_step_3, LINE_AXES
    )  # fmt: skip
    tl.store(dx + place + chosen * axis_step, value.to(dx.dtype.element_ty), valid)


_COPY = Budget(registers=192)  # with many axes; with few, a sixth of it
_SUM = Budget(registers=192, shared_bytes=16384)

KERNELS = (
    kernels.register(take_forward, budget=_COPY),
    kernels.register(take_backward_few, budget=_SUM),
    kernels.register(take_backward_lines, budget=_SUM),
    kernels.register(take_scatter, budget=_COPY),
)
