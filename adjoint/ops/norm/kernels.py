"""Triton kernels of `rms_norm` and `gated_rms_norm`, both directions, and what launches them.

With w = offset + weight, z = x·r, r = 1 / sqrt(mean(x²) + ε), and u = dy, or dy·silu(gate) where there is a gate:

    y = z·w, times silu(gate); where there is a residual, x is s = x + residual, rounded
    dx = r·(u·w − z·m) + ds,  m = mean(u·w·x)·r        dgate = dy·z·w·silu'(gate)        dweight = Σ over rows of u·z

r is computed again in the backward: that costs less than reading it.

dweight has one order for each number of rows: tile t, of 2^ROW_LEVELS rows, belongs to block t mod (number of blocks);
a block adds its tiles one after the other, then the rows of what it has by halves; `rms_norm_add_blocks` adds the
blocks, 2^RUN_LEVELS of them by halves, and such runs one after the other.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Float, Int32, Int64If16, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.core.problem import wide_dtype
from adjoint.device.row_tiles import (
    LEVELS,
    halves,
    order,
    reciprocal_root,
    row_offsets,
    row_sums,
    sums_of_rows,
    tile_columns,
    tile_mask,
    two_row_sums,
)
from adjoint.device.rows import RowReader
from adjoint.ops.activation.kernels import exponential_2, reciprocal, silu_parts, widen
from adjoint.ops.norm.arguments import Norm
from adjoint.ops.norm.plans import RUN_LEVELS, blocks_of, most_blocks, padded, row_levels

_FORWARD = Budget(registers=136, shared_bytes=16_384)
_BACKWARD = Budget(registers=255, shared_bytes=81_920)


@triton.jit
def load_weight(
    weight, offset, column, SIZE: tl.constexpr, COLUMNS: tl.constexpr, HAS_GATE: tl.constexpr, COMPUTED: tl.constexpr
):
    """offset + weight, in the type of the sums; a norm with a gate has no offset.

    `column` has the shape of a tile, rows included: a load of that shape has the layout of the tile's other loads, and
    nothing has to change lanes.
    """
    if SIZE == COLUMNS:
        value = tl.load(weight + column)
    else:
        value = tl.load(weight + column, column < SIZE, other=0)
    return value.to(COMPUTED) if HAS_GATE else value.to(COMPUTED) + offset


@triton.jit
def mean(total, COUNT: tl.constexpr):
    """total / COUNT, as the product with the rounded 1 / COUNT."""
    return total * (1.0 / COUNT)


@triton.jit
def silu_and_slope(gate, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """silu(gate) and silu'(gate).

    For 16-bit types in the fewest instructions: gates below −87 give −0, and all others fewer correct digits the larger
    they are, but always more than the result keeps. Bounds keep infinities from meeting zeros.
    """
    gate = widen(gate)
    if NARROW:
        bounded = tl.maximum(gate, -128.0)
        sigmoid = reciprocal(1.0 + exponential_2(gate * -1.4426950408889634, NATIVE), NATIVE)
        slope = sigmoid * (1.0 + tl.minimum(bounded, 128.0) * (1.0 - sigmoid))
        return bounded * sigmoid, slope
    else:
        value, slope, d = silu_parts(gate, NARROW, NATIVE)
        return value * d, slope * d * d


@kernel(budget=_FORWARD, numeric=LEVELS, schedule=("ROWS",))
@triton.jit
def rms_norm_forward(
    x: PointerIf16.element, residual: PointerIf16.element, gate: PointerIf16.element, weight: PointerIf16.weight,
    s: PointerIf16.element, y: PointerIf16.element, rows: Int32, epsilon: Float.computed, offset: Float.computed,
    x_inner: Int32, x_outer: Int64If16, x_step: Int64If16, residual_inner: Int32, residual_outer: Int64If16,
    residual_step: Int64If16, gate_inner: Int32, gate_outer: Int64If16, gate_step: Int64If16,
    SIZE: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_GATE: tl.constexpr, ROUND: tl.constexpr, NARROW: tl.constexpr,
    NATIVE: tl.constexpr, LAYOUT: tl.constexpr, REPEAT_LEVELS: tl.constexpr, GROUP_LEVELS: tl.constexpr,
    LANE_LEVELS: tl.constexpr, VECTOR_LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of ROWS rows, and s where there is a residual. ROUND: z is rounded before the weight."""
    PIECES: tl.constexpr = 2 ** (REPEAT_LEVELS + GROUP_LEVELS)
    PIECE: tl.constexpr = 2 ** (LANE_LEVELS + VECTOR_LEVELS)
    column = tile_columns(PIECES, PIECE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tile_mask(row, rows, column, SIZE, PIECES * PIECE)
    value = tl.load(x + row_offsets(row, x_inner, x_outer, x_step, SIZE, LAYOUT) + column, inside, other=0)
    element: tl.constexpr = value.dtype
    at = row_offsets(row, 0, 0, 0, SIZE, "contiguous") + column
    if HAS_GATE:
        place = gate + row_offsets(row, gate_inner, gate_outer, gate_step, SIZE, LAYOUT) + column
        gates = tl.load(place, inside, other=0)
    if HAS_RESIDUAL:
        place = residual + row_offsets(row, residual_inner, residual_outer, residual_step, SIZE, LAYOUT) + column
        value = (widen(value) + widen(tl.load(place, inside, other=0))).to(element)
        tl.store(s + at, value, inside)
    value = widen(value)
    squares = row_sums(value * value, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    r = reciprocal_root(mean(squares, SIZE) + epsilon, NATIVE)
    scaled = value * r[None, :, None]
    if ROUND:
        scaled = scaled.to(element).to(value.dtype)
    every_row = column + tl.zeros([1, ROWS, 1], tl.int32)
    result = scaled * load_weight(weight, offset, every_row, SIZE, PIECES * PIECE, HAS_GATE, value.dtype)
    if HAS_GATE:
        result = result * silu_and_slope(gates, NARROW, NATIVE)[0]
    tl.store(y + at, result.to(element), inside)


@kernel(budget=_BACKWARD, numeric=(*LEVELS, "ROW_LEVELS"), schedule=("STAGES", "RELOAD"))
@triton.jit
def rms_norm_backward(
    x: PointerIf16.element, gate: PointerIf16.element, weight: PointerIf16.weight, dy: PointerIf16.element,
    ds: PointerIf16.element, dx: PointerIf16.element, dgate: PointerIf16.element, sums: Pointer16.computed,
    rows: Int32, epsilon: Float.computed, offset: Float.computed,
    x_inner: Int32, x_outer: Int64If16, x_step: Int64If16, gate_inner: Int32, gate_outer: Int64If16,
    gate_step: Int64If16, dy_inner: Int32, dy_outer: Int64If16, dy_step: Int64If16, ds_inner: Int32,
    ds_outer: Int64If16, ds_step: Int64If16,
    SIZE: tl.constexpr, HAS_DS: tl.constexpr, HAS_GATE: tl.constexpr, ROUND: tl.constexpr, NEED_X: tl.constexpr,
    NEED_GATE: tl.constexpr, NEED_WEIGHT: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr,
    LAYOUT: tl.constexpr, REPEAT_LEVELS: tl.constexpr, GROUP_LEVELS: tl.constexpr, LANE_LEVELS: tl.constexpr,
    VECTOR_LEVELS: tl.constexpr, ROW_LEVELS: tl.constexpr, STAGES: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """dx and dgate of a block's rows, and the block's sum of dweight, row `block` of `sums`. One program is one block.

    RELOAD: where registers have no room, the weight is read for every tile, and the tile again after its sums: from
    cache. The second reading has a hint of its own, or the compiler would take both for one.
    """
    ROWS: tl.constexpr = 2**ROW_LEVELS
    PIECES: tl.constexpr = 2 ** (REPEAT_LEVELS + GROUP_LEVELS)
    PIECE: tl.constexpr = 2 ** (LANE_LEVELS + VECTOR_LEVELS)
    COLUMNS: tl.constexpr = PIECES * PIECE
    element: tl.constexpr = x.dtype.element_ty
    COMPUTED: tl.constexpr = tl.float64 if element == tl.float64 else tl.float32
    column = tile_columns(PIECES, PIECE)
    every_row = column + tl.zeros([1, ROWS, 1], tl.int32)
    if not RELOAD:
        w = load_weight(weight, offset, every_row, SIZE, COLUMNS, HAS_GATE, COMPUTED)
    total = tl.zeros([PIECES, ROWS, PIECE], COMPUTED)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)
        inside = tile_mask(row, rows, column, SIZE, COLUMNS)
        x_place = x + row_offsets(row, x_inner, x_outer, x_step, SIZE, LAYOUT) + column
        dy_place = dy + row_offsets(row, dy_inner, dy_outer, dy_step, SIZE, LAYOUT) + column
        value = widen(tl.load(x_place, inside, other=0))
        upstream = widen(tl.load(dy_place, inside, other=0))
        u = upstream
        if HAS_GATE:
            gate_place = gate + row_offsets(row, gate_inner, gate_outer, gate_step, SIZE, LAYOUT) + column
            activated, slope = silu_and_slope(tl.load(gate_place, inside, other=0), NARROW, NATIVE)
            u = upstream * activated
        if RELOAD:
            w = load_weight(weight, offset, every_row, SIZE, COLUMNS, HAS_GATE, COMPUTED)
        gradient = u * w
        squares, along = two_row_sums(
            value * value, gradient * value, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS
        )
        r = reciprocal_root(mean(squares, SIZE) + epsilon, NATIVE)
        r = tl.where(row < rows, r, 0.0)  # rows past the end are zeros: with ε = 0 they would add NaN to dweight
        m = (mean(along, SIZE) * r)[None, :, None]
        r = r[None, :, None]
        if RELOAD:
            value = widen(tl.load(x_place, inside, other=0, eviction_policy="evict_first"))
            upstream = widen(tl.load(dy_place, inside, other=0, eviction_policy="evict_first"))
            u = upstream
            if HAS_GATE:
                gates = tl.load(gate_place, inside, other=0, eviction_policy="evict_first")
                activated, slope = silu_and_slope(gates, NARROW, NATIVE)
                u = upstream * activated
        scaled = value * r
        stored = scaled.to(element).to(COMPUTED) if ROUND else scaled
        if NEED_WEIGHT:
            total += u * stored
        if RELOAD:
            w = load_weight(weight, offset, every_row, SIZE, COLUMNS, HAS_GATE, COMPUTED)
            gradient = u * w
        at = row_offsets(row, 0, 0, 0, SIZE, "contiguous") + column
        if NEED_X:
            result = (gradient - scaled * m) * r
            if HAS_DS:
                place = ds + row_offsets(row, ds_inner, ds_outer, ds_step, SIZE, LAYOUT) + column
                result += widen(tl.load(place, inside, other=0))
            tl.store(dx + at, result.to(element), inside)
        if NEED_GATE:
            tl.store(dgate + at, (upstream * (stored * w) * slope).to(element), inside)
    if NEED_WEIGHT:
        total = sums_of_rows(total, PIECES, ROW_LEVELS, PIECE)[:, None, :]
        place = sums + tl.program_id(0).to(tl.int64) * SIZE + column
        if SIZE == COLUMNS:
            tl.store(place, total)
        else:
            tl.store(place, total, column < SIZE)


@kernel(budget=Budget(registers=96, shared_bytes=8_192), numeric=("RUN_LEVELS",))
@triton.jit
def rms_norm_add_blocks(
    sums: Pointer16.computed, dweight: Pointer.weight, count: Int32,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, RUN_LEVELS: tl.constexpr,
):  # fmt: skip
    """dweight, the sum over the rows of `sums` [count, SIZE]: runs of 2^RUN_LEVELS by halves, one after the other."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([1, COLUMNS], sums.dtype.element_ty)
    for start in range(0, count, 2**RUN_LEVELS):
        block = start + tl.arange(0, 2**RUN_LEVELS)[:, None]
        terms = tl.load(sums + block.to(tl.int64) * SIZE + column, (block < count) & (column < SIZE), other=0)
        total += halves(terms, 1, RUN_LEVELS, COLUMNS)
    tl.store(dweight + column, total.to(dweight.dtype.element_ty), column < SIZE)


def _constants(setup: Setup, norm: Norm, reader: RowReader) -> dict[str, Any]:
    """What both directions are compiled for. NVIDIA's GPUs have instructions of their own (NATIVE)."""
    (element, weight), (size, _) = setup.problem.dtypes, setup.problem.sizes
    return {
        "element": element, "weight": weight, "computed": wide_dtype(element), "SIZE": size, "HAS_GATE": norm.gate,
        "ROUND": norm.gate and setup.problem.options[1], "NARROW": element.itemsize == 2, "NATIVE": setup.nvidia,
        "LAYOUT": reader.kind, "num_warps": setup.schedule["warps"], **order(size, element),
    }  # fmt: skip


def forward(setup: Setup, norm: Norm) -> Execute:
    """y, and s where there is a residual, of rows of which one program has all elements."""
    reader, (_, count), tile = RowReader(setup), setup.problem.sizes, setup.schedule["rows"]
    constants = _constants(setup, norm, reader)
    bound = setup.either(rms_norm_forward, HAS_RESIDUAL=norm.residual, ROWS=tile, **constants)
    grid = (-(-count // tile),)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        of, y, s, memory = norm.forward(arguments), outputs[0], outputs[-1], setup.memory(workspace)
        x, residual = reader.rows("x", of.x, memory, y), reader.rows("residual", of.residual, memory, y)
        gate, weight = reader.rows("gate", of.gate, memory, y), reader.contiguous("weight", of.weight, memory)
        aligned = x.is_aligned and residual.is_aligned and gate.is_aligned and is_aligned(weight, y, s)
        bound[aligned].launch(
            grid, x=x.tensor, residual=residual.tensor, gate=gate.tensor, weight=weight, s=s, y=y, rows=count,
            epsilon=of.eps, offset=of.offset, x_inner=x.inner, x_outer=x.outer, x_step=x.step,
            residual_inner=residual.inner, residual_outer=residual.outer, residual_step=residual.step,
            gate_inner=gate.inner, gate_outer=gate.outer, gate_step=gate.step,
        )  # fmt: skip

    return execute


def backward(setup: Setup, norm: Norm) -> Execute:
    """dx, dweight and dgate, as far as they are needed."""
    reader, problem, schedule = RowReader(setup), setup.problem, setup.schedule
    (element, weight_type), (size, count) = problem.dtypes, problem.sizes
    (need_x, need_weight, need_gate), blocks = norm.needs(problem.options[-1]), blocks_of(size, count)
    has_ds = norm.residual and not problem.layout.endswith("ds absent")
    bound = setup.either(
        rms_norm_backward, HAS_DS=has_ds, NEED_X=need_x, NEED_GATE=need_gate, NEED_WEIGHT=need_weight,
        ROW_LEVELS=row_levels(size), STAGES=schedule["stages"], RELOAD=schedule["readings"] > 1,
        num_stages=schedule["stages"], **_constants(setup, norm, reader),
    )  # fmt: skip
    columns = min(16, padded(size))
    add_blocks = setup.kernel(
        rms_norm_add_blocks, weight=weight_type, computed=wide_dtype(element), SIZE=size, COLUMNS=columns,
        RUN_LEVELS=RUN_LEVELS, num_warps=8,
    )  # fmt: skip
    setup.scratch(sums=(wide_dtype(element), blocks * size if need_weight and count else 0))
    setup.add_numeric(most_blocks=most_blocks(size))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        of, dx, dweight, dgate = norm.backward(arguments), outputs[0], outputs[1], outputs[-1]
        if count == 0 or of.dy is None:  # there are no rows, or nothing but s was used
            dweight.zero_()
            if of.ds is not None and need_x:
                dx.copy_(of.ds)
            return
        memory = setup.memory(workspace)
        x, dy = reader.rows("x", of.x, memory, dx), reader.rows("dy", of.dy, memory, dx)
        gate, ds = reader.rows("gate", of.gate, memory, dx), reader.rows("ds", of.ds, memory, dx)
        weight, sums = reader.contiguous("weight", of.weight, memory), memory["sums"] if need_weight else dx
        aligned = x.is_aligned and gate.is_aligned and dy.is_aligned and ds.is_aligned
        bound[aligned and is_aligned(weight, dx, dgate)].launch(
            (blocks,), x=x.tensor, gate=gate.tensor, weight=weight, dy=dy.tensor, ds=ds.tensor, dx=dx, dgate=dgate,
            sums=sums, rows=count, epsilon=of.eps, offset=of.offset, x_inner=x.inner, x_outer=x.outer, x_step=x.step,
            gate_inner=gate.inner, gate_outer=gate.outer, gate_step=gate.step, dy_inner=dy.inner, dy_outer=dy.outer,
            dy_step=dy.step, ds_inner=ds.inner, ds_outer=ds.outer, ds_step=ds.step,
        )  # fmt: skip
        if need_weight:
            add_blocks.launch((-(-size // columns),), sums=sums, dweight=dweight, count=blocks)

    return execute
