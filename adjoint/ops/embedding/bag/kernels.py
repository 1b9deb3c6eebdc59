"""Triton kernels of `embedding_bag`, and what launches them; the table's gradient is `GroupSums` of the family.

A bag's entries stand at positions `begin` to `end` of the ids: rows of a matrix, or what lies between two
offsets. Offsets that are out of range or out of order are recorded and clipped, so nothing is read out of
bounds.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.core.problem import wide_dtype
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.ops.embedding.bag.plans import NEED_WEIGHT, NEED_WEIGHTS, WEIGHTS_BLOCK, forward_options
from adjoint.ops.embedding.kernels import GroupSums, access_of, by_access, tile_of
from adjoint.ops.embedding.plans import TILE, TILE_BITS
from adjoint.ops.embedding.table import BAG_ID_OUT_OF_RANGE, OFFSETS_OUT_OF_ORDER

_BAGS = Budget(registers=255, shared_bytes=65536)

_TILE = tl.constexpr(1 << TILE_BITS)
_TILE_2 = tl.constexpr(1 << 2 * TILE_BITS)
_TILE_3 = tl.constexpr(1 << 3 * TILE_BITS)
_TILE_4 = tl.constexpr(1 << 4 * TILE_BITS)
_TILE_5 = tl.constexpr(1 << 5 * TILE_BITS)


@triton.jit
def quotient(dividend, divisor, DOUBLE: tl.constexpr):
    """Division rounded to nearest: the operator alone is an approximation in float32."""
    if DOUBLE:
        return dividend / divisor
    else:
        return tl.div_rn(dividend, divisor)


@triton.jit
def load_offset(offsets, bag, offset_count, count):
    """offsets[bag], clipped to 0 and count; count past the end of the list."""
    offset = tl.load(offsets + bag, bag < offset_count, other=2147483647).to(tl.int64)
    return tl.minimum(tl.maximum(offset, 0), count).to(tl.int32)


@triton.jit
def load_entry(ids, place, inside, rows, skipped):
    """Ids at some places: row, whether it exists, and whether it counts."""
    row = tl.load(ids + place, inside, other=0)
    valid = inside & (row >= 0) & (row < rows)
    return row, valid, valid & (row != skipped)


@kernel(budget=replace(_BAGS, spilled_elsewhere=16), numeric=("MODE",), schedule=("ROWS", "BLOCK"))
@triton.jit
def embedding_bag_forward(
    ids: Pointer.ids, weight: PointerIf16.element, offsets: Pointer.offsets, per_sample_weights: Pointer.element,
    out: PointerIf16.element, winners: PointerIf16.int32, entry_counts: Pointer.int32, status_word: Pointer.int64,
    id_fault: Int32, offset_fault: Int32, bags: Int32, offset_count: Int32, width: Int32, count: Int32, rows: Int32,
    skipped: Int32, columns: Int32If16, row_stride: Int64If16, column_stride: Int64,
    OFFSETS: tl.constexpr, MODE: tl.constexpr, SCALED: tl.constexpr,
    DOUBLE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum, mean or maximum of the rows of each bag; sums in tiles and tiles of tiles, as everywhere here."""
    bag = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    present = bag < bags
    reports = present & (tl.program_id(1) == 0)
    if OFFSETS:
        begin = load_offset(offsets, bag, offset_count, count)
        end = load_offset(offsets, bag + 1, offset_count, count)
        offset = tl.load(offsets + bag, bag < offset_count, other=0).to(tl.int64)
        following = tl.load(offsets + bag + 1, present & (bag + 1 < offset_count), other=count).to(tl.int64)
        record(status_word, offset_fault, bag, offset, (tl.program_id(1) == 0) & (bag == 0) & (offset != 0))
        wrong = (following < offset) | (following > count)
        record(status_word, offset_fault, bag + 1, following, reports & wrong)
    else:
        begin = bag * width
        end = begin + width
    length = tl.where(present, tl.maximum(end - begin, 0), 0)
    longest = tl.max(length)
    step = column if UNIT else column * column_stride
    in_row = (column < columns)[None, :]
    number = tl.zeros([ROWS], tl.int32)  # of entries that count

    if MODE == "max":
        best = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
        winner = tl.full([ROWS, BLOCK], -1, tl.int32)
        for entry in range(0, longest):
            place = begin + entry
            row, valid, counts = load_entry(ids, place, entry < length, rows, skipped)
            record(status_word, id_fault, place, row, reports & (entry < length) & (valid == 0))
            start = tl.where(counts, row, 0).to(tl.int64) * row_stride
            value = tl.load(weight + start[:, None] + step[None, :], counts[:, None] & in_row, other=0).to(best.dtype)
            better = (winner < 0) | (value > best) | ((value != value) & (best == best))
            better = better & counts[:, None]
            best = tl.where(better, value, best)
            winner = tl.where(better, place[:, None], winner)
        total = best
        mask = present[:, None] & in_row
        tl.store(winners + bag.to(tl.int64)[:, None] * columns + column[None, :], winner, mask)
    else:
        nothing = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
        level_1, level_2, level_3, level_4, total = nothing, nothing, nothing, nothing, nothing
        for first in range(0, longest, _TILE):
            tile = nothing
            for entry in range(first, tl.minimum(first + _TILE, longest)):
                place = begin + entry
                row, valid, counts = load_entry(ids, place, entry < length, rows, skipped)
                record(status_word, id_fault, place, row, reports & (entry < length) & (valid == 0))
                start = tl.where(counts, row, 0).to(tl.int64) * row_stride
                term = tl.load(weight + start[:, None] + step[None, :], counts[:, None] & in_row, other=0)
                term = term.to(total.dtype)
                if SCALED:
                    factor = tl.load(per_sample_weights + place, counts, other=0).to(total.dtype)
                    term = term * factor[:, None]
                tile += term
                number += counts.to(tl.int32)
            level_1 += tile
            after = first + _TILE
            if after % _TILE_2 == 0:
                level_2 += level_1
                level_1 = nothing
                if after % _TILE_3 == 0:
                    level_3 += level_2
                    level_2 = nothing
                    if after % _TILE_4 == 0:
                        level_4 += level_3
                        level_3 = nothing
                        if after % _TILE_5 == 0:
                            total += level_4
                            level_4 = nothing
        total += level_4 + (level_3 + (level_2 + level_1))
        if MODE == "mean":
            divisor = tl.maximum(number, 1).to(total.dtype)
            total = quotient(total, tl.broadcast_to(divisor[:, None], [ROWS, BLOCK]), DOUBLE)
            tl.store(entry_counts + bag, number, reports)
    target = out + bag.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), present[:, None] & in_row)


@kernel(budget=_BAGS, numeric=("MODE",), schedule=("BLOCK",))
@triton.jit
def embedding_bag_entries(
    ids: Pointer.ids, offsets: Pointer.offsets, per_sample_weights: Pointer.element, entry_counts: Pointer.int32,
    keys: Pointer.int32, bag_of: Pointer.int32, factors: Pointer.accumulator, bags: Int32, offset_count: Int32,
    width: Int32, count: Int32, rows: Int32, skipped: Int32, steps: Int32,
    OFFSETS: tl.constexpr, MODE: tl.constexpr, SCALED: tl.constexpr, DOUBLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For each entry: its bag, its key for grouping (`rows` when it adds nothing), and its factor."""
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    if OFFSETS:
        low = tl.zeros([BLOCK], tl.int32)  # so many offsets are at most the entry's position
        high = low + offset_count
        for _ in range(steps):
            middle = (low + high) >> 1
            before = load_offset(offsets, middle, offset_count, count) <= entry
            before = before & (middle < high)
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        bag = low - 1
    else:
        bag = entry // width
    row, _, counts = load_entry(ids, entry, inside & (bag >= 0) & (bag < bags), rows, skipped)
    tl.store(keys + entry, tl.where(counts, row, rows).to(tl.int32), inside)
    bag = tl.minimum(tl.maximum(bag, 0), tl.maximum(bags - 1, 0))
    tl.store(bag_of + entry, bag, inside)
    if MODE == "mean":
        number = tl.load(entry_counts + bag, counts, other=1).to(tl.float64 if DOUBLE else tl.float32)
        tl.store(factors + entry, quotient(tl.full([BLOCK], 1, number.dtype), number, DOUBLE), inside)
    if SCALED:
        factor = tl.load(per_sample_weights + entry, inside, other=0)
        tl.store(factors + entry, factor.to(tl.float64 if DOUBLE else tl.float32), inside)


@triton.jit
def halve(values, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS, WIDTH / 2]: the first half plus the second, whatever the layout of threads."""
    first, second = tl.split(tl.permute(tl.reshape(values, [ROWS, 2, WIDTH // 2]), [0, 2, 1]))
    return first + second


@kernel(budget=_BAGS, numeric={"weights_block": "BLOCK"}, schedule=("ROWS",))
@triton.jit
def embedding_bag_weights(
    gradient: PointerIf16.element, weight: PointerIf16.element, bag_of: Pointer.int32, keys: Pointer.int32,
    out: PointerIf16.element, count: Int32, rows: Int32, columns: Int32If16, gradient_row_stride: Int64If16,
    gradient_column_stride: Int64, row_stride: Int64If16, column_stride: Int64,
    DOUBLE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n] = gradient[bag of n] · weight[ids[n]]: blocks of columns one after the other, then by halves."""
    entry = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = entry < count
    row = tl.load(keys + entry, inside, other=0)
    counts = inside & (row < rows)
    bag = tl.load(bag_of + entry, counts, other=0).to(tl.int64)
    row = tl.where(counts, row, 0).to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
    for first in range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        mask = counts[:, None] & (column < columns)[None, :]
        step = column if UNIT else column * column_stride
        gradient_step = column if UNIT else column * gradient_column_stride
        dout = tl.load(gradient + (bag * gradient_row_stride)[:, None] + gradient_step[None, :], mask, other=0)
        value = tl.load(weight + (row * row_stride)[:, None] + step[None, :], mask, other=0)
        total += dout.to(total.dtype) * value.to(total.dtype)
    total = halve(total, ROWS, BLOCK)
    total = halve(total, ROWS, BLOCK // 2)
    total = halve(total, ROWS, BLOCK // 4)
    total = halve(total, ROWS, BLOCK // 8)
    total = halve(total, ROWS, BLOCK // 16)
    total = halve(total, ROWS, BLOCK // 32)
    total = halve(total, ROWS, BLOCK // 64)  # BLOCK is 128: one remains
    tl.store(out + entry, tl.reshape(total, [ROWS]).to(out.dtype.element_ty), inside)


# ------------------------------------------------------------------------------------------------ launches


class _Bags:
    """How kernels read the bags of a problem; ids, offsets and weights are copied where they are not contiguous."""

    def __init__(self, setup: Setup) -> None:
        problem = setup.problem
        element, ids, *offsets = problem.dtypes
        self.count, self.rows, self.columns, self.bags = problem.sizes
        self.mode, _, include_last_offset = forward_options(problem)
        self.scaled = (False, True) if self.mode == "sum" else (False,)
        """Whether entries may have weights."""
        self.settings: dict[str, Any] = {
            "element": element,
            "ids": ids,
            "offsets": offsets[0] if offsets else torch.int64,
            "OFFSETS": bool(offsets),
            "MODE": self.mode,
            "DOUBLE": element == torch.float64,
        }
        setup.add_numeric(mode=self.mode, tile=TILE)
        setup.copies(
            ids=(ids, self.count),
            offsets=(self.settings["offsets"], self.bags + include_last_offset),
            per_sample_weights=(element, self.count),
        )

    def read(self, memory: Memory, ids: Tensor, offsets: Any, weights: Any, other: Tensor) -> dict[str, Any]:
        """What kernels take of a call; `other` stands for weights that are not there."""
        ids, offsets = memory.contiguous("ids", ids), memory.contiguous("offsets", offsets)
        offset_count, width = (0, ids.shape[1]) if offsets is None else (offsets.numel(), 0)
        return {
            "ids": ids, "offsets": ids if offsets is None else offsets, "offset_count": offset_count, "width": width,
            "per_sample_weights": other if weights is None else memory.contiguous("per_sample_weights", weights),
            "bags": self.bags, "count": self.count, "rows": self.rows,
        }  # fmt: skip


def forward(setup: Setup) -> Execute:
    """The sum, mean or maximum of each bag's rows; extra gets the entries that won, or how many count."""
    bags = _Bags(setup)
    columns, device = bags.columns, setup.device
    tile = tile_of(setup.schedule, "bags", columns)

    def bind(scaled: bool) -> dict[str, Launch]:
        # With as few warps as the others, sums of adjacent elements without weights spill.
        adjacent = {"num_warps": 2 * tile.warps} if bags.mode == "sum" and not scaled else {}
        settings = {**bags.settings, **tile.settings, "SCALED": scaled}
        return by_access(setup, embedding_bag_forward, settings, adjacent=adjacent)

    kernels = {scaled: bind(scaled) for scaled in bags.scaled}
    grid = max(1, -(-bags.bags // tile.rows)), max(1, -(-columns // tile.block))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        ids, weight, offsets, per_sample_weights, _, padding, *_ = arguments
        out, extra = outputs
        if bags.bags == 0 and (offsets is None or offsets.numel() == 0):
            return
        row_stride, column_stride = weight.stride()
        access = access_of(column_stride == 1 or columns <= 1, weight, out, extra, columns or 1, row_stride)
        kernels[per_sample_weights is not None][access].launch(
            grid, weight=weight, out=out, winners=extra, entry_counts=extra, status_word=status_word(device),
            id_fault=BAG_ID_OUT_OF_RANGE.row, offset_fault=OFFSETS_OUT_OF_ORDER.row, skipped=padding, columns=columns,
            row_stride=row_stride, column_stride=column_stride,
            **bags.read(setup.memory(workspace), ids, offsets, per_sample_weights, weight),
        )  # fmt: skip
        if device.type == "cpu":
            check()

    return execute


def backward(setup: Setup) -> Execute:
    """The gradients of the table and of the per-sample weights, as far as they are needed."""
    bags, need = _Bags(setup), setup.problem.options[-1]
    find_entries = _find_entries(setup, bags)
    if need & NEED_WEIGHT:
        scaled = (True,) if bags.mode == "mean" else bags.scaled
        sums = GroupSums(setup, torch.int32, TILE, bagged=True, scaled=scaled, chosen=bags.mode == "max")
    if need & NEED_WEIGHTS:
        sum_weights = _sum_weights(setup, bags)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, ids, weight, offsets, per_sample_weights, extra, _, _, padding, *_ = arguments
        dweight, dper_sample_weights = outputs
        memory = setup.memory(workspace)
        if bags.count:
            find_entries(memory, ids, offsets, per_sample_weights, extra, padding)
        if need & NEED_WEIGHT and dweight.numel():
            scaled = bags.mode == "mean" or per_sample_weights is not None
            sums.launch(memory, memory.get("entry_keys", ids), -1, dout, dweight, extra, scaled)
        if need & NEED_WEIGHTS and bags.count:
            sum_weights(memory, dout, weight, dper_sample_weights)

    return execute


def _find_entries(setup: Setup, bags: _Bags) -> Callable[..., None]:
    """Finds the bag, the key and the factor of each entry: the regions "bag_of", "entry_keys" and "factors"."""
    accumulator, block = wide_dtype(setup.problem.dtypes[0]), setup.schedule["entries_block"]
    settings: dict[str, Any] = {"accumulator": accumulator, "BLOCK": block, **bags.settings}
    settings["num_warps"] = setup.schedule["entries_warps"]
    kernels = {scaled: setup.kernel(embedding_bag_entries, SCALED=scaled, **settings) for scaled in bags.scaled}
    number = torch.int32, bags.count
    setup.scratch(entry_keys=number, bag_of=number, factors=(accumulator, bags.count))
    grid = (-(-bags.count // block),)

    def launch(memory: Memory, ids: Tensor, offsets: Any, weights: Any, extra: Tensor, padding: int) -> None:
        read = bags.read(memory, ids, offsets, weights, extra)
        kernels[weights is not None].launch(
            grid, entry_counts=extra, keys=memory["entry_keys"], bag_of=memory["bag_of"], factors=memory["factors"],
            skipped=padding, steps=read["offset_count"].bit_length(), **read,
        )  # fmt: skip

    return launch


def _sum_weights(setup: Setup, bags: _Bags) -> Callable[..., None]:
    """The gradient of per-sample weights: for each entry, the gradient of its bag times its row."""
    element, columns = setup.problem.dtypes[0], bags.columns
    tile = tile_of({**setup.schedule, "weights_block": WEIGHTS_BLOCK}, "weights", WEIGHTS_BLOCK)
    settings = {"element": element, "DOUBLE": element == torch.float64, **tile.settings}
    kernels = by_access(setup, embedding_bag_weights, settings)
    grid = (-(-bags.count // tile.rows),)

    def launch(memory: Memory, dout: Tensor, weight: Tensor, out: Tensor) -> None:
        (dout_row, dout_column), (row, column) = dout.stride(), weight.stride()
        is_adjacent = columns <= 1 or dout_column == column == 1
        kernels[access_of(is_adjacent, dout, weight, out, columns, dout_row, row)].launch(
            grid, gradient=dout, weight=weight, bag_of=memory["bag_of"], keys=memory["entry_keys"], out=out,
            count=bags.count, rows=bags.rows, columns=columns, gradient_row_stride=dout_row,
            gradient_column_stride=dout_column, row_stride=row, column_stride=column,
        )  # fmt: skip

    return launch
