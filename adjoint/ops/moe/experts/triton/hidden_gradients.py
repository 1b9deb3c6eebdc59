"""The gradient of the hidden values, back through the gate, and that of the routing weights."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Int32, Pointer, PointerIf16, kernel
from adjoint.core.launch import Setup
from adjoint.core.problem import wide_dtype
from adjoint.core.workspace import Memory
from adjoint.ops.activation.kernels import silu_parts
from adjoint.ops.moe.combine.kernels import sum_neighbours
from adjoint.ops.moe.experts.plans import HIDDEN_COLUMNS, NEED_DOWN, NEED_GATE_UP, NEED_WEIGHTS, NEED_X
from adjoint.ops.moe.experts.triton.products import tile_of_program
from adjoint.ops.moe.experts.triton.tiles import PRODUCT, SMALL, Tiles, bind_over_rows
from adjoint.ops.moe.kernels import halves
from adjoint.ops.moe.layout import Layout


@triton.jit
def gate_adjoint(
    dh, gu, weight, row, end, first_column, dgu, scaled, INNER: tl.constexpr, HIDDEN: tl.constexpr, SCALED: tl.constexpr
):
    """Stores dgu and w·h of some columns, and gives h·dh of them."""
    NARROW: tl.constexpr = gu.dtype.element_ty.primitive_bitwidth == 16
    column = first_column + tl.arange(0, dh.shape[1])
    inside = (row < end)[:, None] & (column < INNER)[None, :]
    place = row.to(tl.int64)[:, None]
    g = tl.load(gu + place * (2 * INNER) + column[None, :], inside, other=0).to(dh.dtype)
    u = tl.load(gu + place * (2 * INNER) + (column + INNER)[None, :], inside, other=0).to(dh.dtype)
    value, slope, d = silu_parts(g, NARROW, False)
    h = value * (u * d)
    if SCALED:
        tl.store(scaled + place * INNER + column[None, :], (weight * h).to(scaled.dtype.element_ty), inside)
    if HIDDEN:
        gated = (weight * dh) * d
        dg = gated * (u * (d * (0.5 * slope))) * 2.0
        tl.store(dgu + place * (2 * INNER) + column[None, :], dg.to(dgu.dtype.element_ty), inside)
        tl.store(
            dgu + place * (2 * INNER) + (column + INNER)[None, :], (gated * value).to(dgu.dtype.element_ty), inside
        )
    return h * dh


@kernel(budget=PRODUCT, numeric={"depth": "DEPTH", "hidden_columns": "COLUMNS"}, schedule=("ROWS", "GROUP"))
@triton.jit
def moe_experts_down_adjoint(
    dy: PointerIf16.element, down: PointerIf16.element, gu: PointerIf16.element, tokens: Pointer.int32,
    row_weights: Pointer.wide, tile_expert: Pointer.int32, tile_begin: Pointer.int32, tile_end: Pointer.int32,
    dgu: PointerIf16.element, scaled: PointerIf16.element, partials: Pointer.wide, count: Int32,
    D: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr, SCALED: tl.constexpr, WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dh = dy[token] · down[e], and from it, with g and u as saved and w the row's weight:

    HIDDEN   dgu      = w·dh·u·silu'(g) and w·dh·silu(g), side by side
    SCALED   scaled   = w·h
    WEIGHTS  partials = Σ h·dh over COLUMNS columns: the sum of their quarters, then of neighbours
    """
    tile, column_tile = tile_of_program(tl.cdiv(INNER, COLUMNS), GROUP)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    end = tl.load(tile_end + tile)
    row = begin + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    dh = tl.zeros([ROWS, COLUMNS], tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32)
    if HIDDEN or WEIGHTS:
        token = tl.load(tokens + tl.minimum(row, end - 1)).to(tl.int64)
        depth = tl.arange(0, DEPTH)
        left = dy + token[:, None] * D + depth[None, :]
        right = down + expert.to(tl.int64) * (D * INNER) + column[None, :] + (depth * INNER)[:, None]
        for start in range(0, D, DEPTH):
            if D % DEPTH == 0:
                a = tl.load(left)
            else:
                a = tl.load(left, (depth < D - start)[None, :], other=0)
            if D % DEPTH == 0 and INNER % COLUMNS == 0:
                b = tl.load(right)
            else:
                b = tl.load(right, (depth < D - start)[:, None] & (column < INNER)[None, :], other=0)
            dh = tl.dot(a, b, dh, input_precision="ieee", out_dtype=dh.dtype)
            left += DEPTH
            right += DEPTH * INNER
    # A quarter of the columns at a time: all of g, u and what follows from them would not fit in registers.
    QUARTER: tl.constexpr = COLUMNS // 4
    weight = tl.load(row_weights + row, row < end, other=0)[:, None]
    low, high = halves(dh)
    quarters = halves(low) + halves(high)
    first = column_tile * COLUMNS
    total = gate_adjoint(quarters[0], gu, weight, row, end, first, dgu, scaled, INNER, HIDDEN, SCALED)
    for number in tl.static_range(1, 4):
        first += QUARTER
        total += gate_adjoint(quarters[number], gu, weight, row, end, first, dgu, scaled, INNER, HIDDEN, SCALED)
    if WEIGHTS:
        tl.store(partials + column_tile.to(tl.int64) * count + row, sum_neighbours(total), row < end)


@kernel(budget=SMALL, schedule=("BLOCK",))
@triton.jit
def moe_experts_sum_partials(
    partials: Pointer.wide, inverse: Pointer.int32, offsets: Pointer.int32, out: Pointer.weight, count: Int32,
    experts: Int32, tiles: Int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of each entry's routing weight: its row's partial sums, one after the other; 0 out of range."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(inverse + entry, inside, other=0)
    valid = inside & (row < tl.load(offsets + experts))
    total = tl.zeros([BLOCK], partials.dtype.element_ty)
    partial = partials + row.to(tl.int64)
    for _ in range(tiles):
        total += tl.load(partial, valid, other=0)
        partial += count
    tl.store(out + entry, total.to(out.dtype.element_ty), inside)


# ------------------------------------------------------------------------------------------------ launches


class PartialSums:
    """The gradients of routing weights from partial sums, one of which has `columns` columns of a row.

    The workspace gets the region "partials".
    """

    def __init__(self, setup: Setup, columns: int) -> None:
        tokens, _, self._experts, inner, slots = setup.problem.sizes
        element, weight = setup.problem.dtypes
        self._count, self._block, self._tiles = tokens * slots, setup.schedule["block"], -(-inner // columns)
        self._sums = setup.kernel(moe_experts_sum_partials, wide=wide_dtype(element), weight=weight, BLOCK=self._block)
        setup.scratch(partials=(wide_dtype(element), self._count * self._tiles))

    def launch(self, memory: Memory, layout: Layout, dweights: Tensor) -> None:
        self._sums.launch(
            (-(-self._count // self._block),), partials=memory["partials"], inverse=layout.inverse,
            offsets=layout.offsets, out=dweights, count=self._count, experts=self._experts, tiles=self._tiles,
        )  # fmt: skip


class HiddenGradients:
    """From dy, for each row: dgu, w·h and the gradient of its routing weight, as far as they are needed.

    The workspace gets the regions "dgu" and "partials", where these are needed.
    """

    def __init__(self, setup: Setup) -> None:
        tokens, hidden, _, inner, slots = setup.problem.sizes
        element = setup.problem.dtypes[0]
        (need,) = setup.problem.options
        self._count = tokens * slots
        self._needs_weights = bool(need & NEED_WEIGHTS)
        self.products = bind_over_rows(
            setup, moe_experts_down_adjoint, "hidden", inner, wide=wide_dtype(element), D=hidden, INNER=inner,
            HIDDEN=bool(need & (NEED_X | NEED_GATE_UP)), SCALED=bool(need & NEED_DOWN), WEIGHTS=self._needs_weights,
        )  # fmt: skip
        if need & (NEED_X | NEED_GATE_UP):
            setup.scratch(dgu=(element, self._count * 2 * inner))
        if self._needs_weights:
            self._sums = PartialSums(setup, HIDDEN_COLUMNS[element])

    def launch(
        self, aligned: bool, memory: Memory, dy: Tensor, down: Tensor, gu: Tensor, layout: Layout, tiles: Tiles,
        scaled: Any, dweights: Tensor,
    ) -> None:  # fmt: skip
        """Computes them; `scaled` has room for w·h."""
        tokens = memory["tokens"]  # also stands for a pointer that the kernel does not use
        partials = memory.get("partials", tokens)
        self.products[aligned].launch(
            dy=dy, down=down, gu=gu, tokens=tokens, row_weights=memory["row_weights"], tile_expert=tiles.expert,
            tile_begin=tiles.begin, tile_end=tiles.end, dgu=memory.get("dgu", tokens), scaled=scaled,
            partials=partials, count=self._count,
        )  # fmt: skip
        if self._needs_weights:
            self._sums.launch(memory, layout, dweights)
