"""The adjoint of taking along an axis, line by line: kernels, each with what launches it.

Sums over the entries of an element run in an order fixed by the element alone: its entries, in their order, are added
one after the other in tiles of TILE; TILE tiles make a tile of the next level, and so on. Lines too long for a program
are sorted: see `sorting`.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Kernel, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.core.problem import wide_dtype
from adjoint.ops.indexing.take_along_axis.layout import LARGE, Lines, lines_of
from adjoint.ops.indexing.take_along_axis.plans import MAX_FILLED, TILE, lines_at_once
from adjoint.ops.indexing.take_along_axis.triton.take import (
    COPY,
    bind_for_axes,
    from_the_beginning,
    offset_of,
    place_of,
)

_SUM = Budget(registers=192, shared_bytes=16384)

_TILE = tl.constexpr(TILE)


@kernel(budget=_SUM, schedule=("LINES", "BLOCK"))
@triton.jit
def take_backward_few(
    dout: Pointer.element, indices: Pointer.index, dx: PointerIf16.element, lines: Int64, entries: Int32,
    length: Int32If16, axis_step: Int64, spans: Int32, span: Int32If16, line_sizes: Int64 * 3,
    dx_steps: Int64If16 * 4, line_index_steps: Int64 * 4, line_dout_steps: Int64 * 4, entry_sizes: Int32 * 3,
    index_steps: Int64 * 4, dout_steps: Int64 * 4,
    DOUBLE: tl.constexpr, SUM: tl.constexpr, UNIT: tl.constexpr, MANY: tl.constexpr, LINES: tl.constexpr,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
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
    target = dx + offset_of(line, line_sizes, dx_steps, UNIT, MANY)
    line_indices = indices + offset_of(line, line_sizes, line_index_steps, UNIT, MANY)
    line_dout = dout + offset_of(line, line_sizes, line_dout_steps, UNIT, MANY)

    inside = present & (entry < entries)
    place = offset_of(entry, entry_sizes, index_steps, True, MANY)
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
            other_place = offset_of(other, entry_sizes, index_steps, True, MANY)
            other_chosen = from_the_beginning(tl.load(line_indices + other_place, present, other=0), length)
            term_place = offset_of(other, entry_sizes, dout_steps, True, MANY)
            term = tl.load(line_dout + term_place, present, other=0).to(total.dtype)
            same = other_chosen == chosen
            writes = writes & ((same == 0) | (entry <= other))
            total += tl.where(same, term, 0.0)
    else:
        place = offset_of(entry, entry_sizes, dout_steps, True, MANY)
        total = tl.load(line_dout + place, writes, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0

    tl.debug_barrier()  # a sum goes where another thread may have written zero
    writes = writes & (chosen >= begin) & (chosen < begin + span)
    tl.store(target + chosen * axis_step, total.to(dx.dtype.element_ty), writes)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@kernel(budget=replace(_SUM, spilled_elsewhere=8), schedule=("LINES", "BLOCK"))
@triton.jit
def take_backward_lines(
    dout: Pointer.element, indices: Pointer.index, dx: PointerIf16.element, order: Pointer.key,
    partials: Pointer.accumulator, lines: Int64, first_line: Int64, entries: Int32, length: Int32If16,
    axis_step: Int64, line_sizes: Int64 * 3, dx_steps: Int64If16 * 4, line_index_steps: Int64 * 4,
    line_dout_steps: Int64 * 4, entry_sizes: Int32 * 3, index_steps: Int64 * 4, dout_steps: Int64 * 4,
    DOUBLE: tl.constexpr, SUM: tl.constexpr, FILL: tl.constexpr, UNIT: tl.constexpr, LONG: tl.constexpr,
    MANY: tl.constexpr, LINES: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Lines whose entries fit a program: it fills them with zeros (FILL), then writes the sums.

    With SUM, a line's entries are sorted by index and number, and put into `order` for all threads to read; the
    first of those with one index writes their sum. On the way, `partials` gets the sums of tiles. Without,
    no index repeats, and every entry writes itself. LONG keys have 64 bits.
    """
    local = tl.program_id(0) * LINES + tl.arange(0, LINES)
    entry = tl.arange(0, ENTRIES)[None, :]
    line = (local + first_line)[:, None]
    present = line < lines
    target = dx + offset_of(line, line_sizes, dx_steps, UNIT, MANY)
    line_dout = dout + offset_of(line, line_sizes, line_dout_steps, UNIT, MANY)
    place = place_of(line, entry, line_sizes, line_index_steps, entry_sizes, index_steps, UNIT, MANY)
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
            beside = dx + offset_of(side, line_sizes, dx_steps, UNIT, MANY)
            for first in range(0, length, BLOCK):
                element = first + tl.arange(0, BLOCK)[:, None]
                tl.store(beside + element * axis_step, 0.0, (side < lines) & (element < length))
    if SUM:
        key = tl.where(writes, chosen, length).to(tl.int64 if LONG else tl.int32) * ENTRIES + entry
        key = tl.sort(key)
        places = order + local.to(tl.int64)[:, None] * ENTRIES + entry
        tl.store(places, key, present)
        tl.debug_barrier()  # what one thread has sorted, another reads
        chosen = key // ENTRIES
        leads = (entry == 0) | (tl.load(places - 1, present & (entry > 0), other=0) // ENTRIES != chosen)
        # How many entries of its index an entry has before it.
        rank = entry - tl.associative_scan(tl.where(leads, entry, 0), 1, larger)
        counts = present & (chosen < length)
        begins = counts & (rank % _TILE == 0)
        total = tl.zeros(begins.shape, tl.float64 if DOUBLE else tl.float32)
        for step in range(0, tl.max(tl.where(counts, rank % _TILE + 1, 0))):
            other = tl.load(places + step, begins & (entry + step < ENTRIES), other=-1)
            same = begins & (other // ENTRIES == chosen) & (other >= 0)
            term = offset_of(other % ENTRIES, entry_sizes, dout_steps, True, MANY)
            total += tl.load(line_dout + term, same, other=0).to(total.dtype)
        writes = counts & leads
        if ENTRIES > _TILE:
            tiles = partials + local.to(tl.int64)[:, None] * ENTRIES + entry
            tl.store(tiles, total, begins)
            tl.debug_barrier()
            total = tl.zeros(begins.shape, tl.float64 if DOUBLE else tl.float32)
            for step in range(0, tl.max(tl.where(counts, rank // _TILE + 1, 0))):
                near = writes & (entry + step * _TILE < ENTRIES)
                other = tl.load(places + step * _TILE, near, other=-1)
                same = near & (other // ENTRIES == chosen) & (other >= 0)
                total += tl.load(tiles + step * _TILE, same, other=0)
    else:
        term = offset_of(entry, entry_sizes, dout_steps, True, MANY)
        total = tl.load(line_dout + term, writes, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0
    tl.debug_barrier()  # a sum goes where another thread may have written zero
    tl.store(target + chosen * axis_step, total.to(dx.dtype.element_ty), writes)


@kernel(budget=COPY, schedule=("BLOCK",))
@triton.jit
def take_scatter(
    dout: Pointer.element, indices: Pointer.index, dx: Pointer.element, lines: Int64, entries: Int32, length: Int32,
    axis_step: Int64, line_sizes: Int64 * 3, dx_steps: Int64 * 4, line_index_steps: Int64 * 4,
    line_dout_steps: Int64 * 4, entry_sizes: Int32 * 3, index_steps: Int64 * 4, dout_steps: Int64 * 4,
    DOUBLE: tl.constexpr, UNIT: tl.constexpr, LARGE: tl.constexpr, MANY: tl.constexpr, BLOCK: tl.constexpr,
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
    place = place_of(line, entry, line_sizes, line_index_steps, entry_sizes, index_steps, UNIT, MANY)
    index = tl.load(indices + place, inside, other=0)
    place = place_of(line, entry, line_sizes, line_dout_steps, entry_sizes, dout_steps, UNIT, MANY)
    # On its way before it is known whether its index is valid.
    value = tl.load(dout + place, inside, other=0).to(tl.float64 if DOUBLE else tl.float32) + 0.0
    chosen = from_the_beginning(index, length)
    valid = inside & (chosen >= 0) & (chosen < length)
    place = offset_of(line, line_sizes, dx_steps, UNIT, MANY)
    tl.store(dx + place + chosen * axis_step, value.to(dx.dtype.element_ty), valid)


# ----------------------------------------------------------------------------------------------- launches

ALIGNED, UNIT, STRIDED = "aligned", "unit", "strided"
"""How a line of dx is written: 16 bytes at a time, adjacent elements, or any distance."""


def _access(lines: Lines, length: int, dx: Tensor) -> str:
    if lines.axis_step != 1:
        return STRIDED
    return ALIGNED if dx.data_ptr() % 16 == 0 and length % 16 == 0 else UNIT


class Tile(NamedTuple):
    """What a program takes: lines, room for their entries, elements of each at once, and its warps."""

    lines: int
    entries: int
    block: int
    warps: int


def _by_access(
    setup: Setup, kernel: Kernel, tile_of: Callable[[bool], Tile], **settings: Any
) -> dict[str, tuple[Tile, Launch]]:
    """A kernel for every access, with its tile; `tile_of(unit)` gives that of lines along the axis, or of others."""
    (element, index), (_, _, distinct) = setup.problem.dtypes, setup.problem.options
    setup.add_numeric(tile=TILE)

    def bind(many: bool) -> dict[str, tuple[Tile, Launch]]:
        bound = {}
        for access in (ALIGNED, UNIT, STRIDED):
            tile = tile_of(access != STRIDED)
            launch = setup.kernel(
                kernel, aligned=access == ALIGNED, element=element, index=index, DOUBLE=element == torch.float64,
                SUM=not distinct, UNIT=access != STRIDED, MANY=many, LINES=tile.lines, ENTRIES=tile.entries,
                BLOCK=tile.block, num_warps=tile.warps, **settings,
            )  # fmt: skip
            bound[access] = tile, launch
        return bound

    return bind_for_axes(setup, bind)


def _power(number: int) -> int:
    """The smallest power of two that is not less, and not 1: a line of one has nothing to sort."""
    return 1 << max(1, number - 1).bit_length()


def by_comparing(setup: Setup) -> Execute:
    """For lines with few entries: those of a line are compared with each other."""
    schedule, (shape, axis, distinct) = setup.schedule, setup.problem.options
    length, entries = shape[axis], _power(setup.problem.sizes[1])

    def tile_of(unit: bool) -> Tile:
        """Short lines share a program, long ones have several; lines that lie side by side are taken at once."""
        elements = schedule["few_distinct_elements" if distinct else "few_elements"]
        longest, compared = max(16, _power(length)), schedule["few_compared"] // entries
        if unit:
            block = min(longest, max(16, elements))
            return Tile(max(1, min(elements // block, compared)), entries, block, schedule["few_warps"])
        count = min(schedule["few_neighbours"], compared)
        return Tile(count, entries, min(longest, max(1, elements // count)), schedule["few_strided_warps"])

    by_access = _by_access(setup, take_backward_few, tile_of)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, indices = arguments[:2]
        (dx,) = outputs
        if dx.numel() == 0:
            return
        lines = lines_of(dout, indices, shape, axis)
        tile, bound = by_access[_access(lines, length, dx)]
        span = max(tile.block, schedule["few_span"])
        spans = -(-length // span)
        bound.launch(
            (-(-lines.line_count // tile.lines) * spans,), dout=dout, indices=indices, dx=dx, lines=lines.line_count,
            spans=spans, span=span, **lines.numbers,
        )  # fmt: skip

    return execute


def by_lines(setup: Setup) -> Execute:
    """For lines whose entries fit a program: every program writes its lines, zeros and all."""
    problem, schedule = setup.problem, setup.schedule
    (shape, axis, distinct), (line_count, entry_count) = problem.options, problem.sizes
    length, entries, accumulator = shape[axis], _power(entry_count), wide_dtype(problem.dtypes[0])
    long = (length + 1) * entries > 2**31  # an index and the number of an entry need more than 32 bits
    key = torch.int64 if long else torch.int32
    count = max(1, schedule["lines_entries"] // entries)
    tile = Tile(count, entries, max(16, schedule["lines_elements"] // count), schedule["lines_warps"])
    settings = {"key": key, "accumulator": accumulator, "FILL": length <= MAX_FILLED, "LONG": long}
    by_access = _by_access(setup, take_backward_lines, lambda unit: tile, **settings)
    at_once = lines_at_once(entries)
    if not distinct:
        room = min(line_count, at_once) * entries
        setup.scratch(order=(key, room), partials=(accumulator, room if entries > TILE else 0))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, indices = arguments[:2]
        (dx,) = outputs
        if dx.numel() == 0:
            return
        if length > MAX_FILLED:
            dx.zero_()
        lines = lines_of(dout, indices, shape, axis)
        _, bound = by_access[_access(lines, length, dx)]
        memory: Mapping[str, Any] = {} if distinct else setup.memory(workspace)
        order, partials = memory.get("order", dx), memory.get("partials", dx)  # dx stands for what is not read
        step = lines.line_count if distinct else at_once
        for first in range(0, lines.line_count, step):
            end = min(first + step, lines.line_count)
            bound.launch(
                (-(-(end - first) // tile.lines),), dout=dout, indices=indices, dx=dx, order=order, partials=partials,
                lines=end, first_line=first, **lines.numbers,
            )  # fmt: skip

    return execute


def scatter(setup: Setup) -> Execute:
    """For many entries that do not repeat: zeros, then every entry to its element."""
    (element, index), (shape, axis, _) = setup.problem.dtypes, setup.problem.options
    block = setup.schedule["scatter_block"]
    setup.add_numeric(tile=TILE)

    def bind(many: bool) -> dict[bool, Launch]:
        return {
            unit: setup.kernel(
                take_scatter, element=element, index=index, DOUBLE=element == torch.float64, UNIT=unit,
                LARGE=LARGE in setup.problem.layout, MANY=many, BLOCK=block,
                num_warps=setup.schedule["scatter_warps"],
            )
            for unit in (True, False)
        }  # fmt: skip

    by_unit = bind_for_axes(setup, bind)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, indices = arguments[:2]
        (dx,) = outputs
        dx.zero_()
        if dx.numel() == 0 or dout.numel() == 0:
            return
        lines = lines_of(dout, indices, shape, axis)
        by_unit[lines.axis_step == 1].launch(
            (-(-dout.numel() // block),), dout=dout, indices=indices, dx=dx, lines=lines.line_count, **lines.numbers
        )  # fmt: skip

    return execute
