"""The products up into the experts, and those that the gradients of weights are."""

import triton
import triton.language as tl

from adjoint.core.kernels import Pointer, PointerIf16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.activation.kernels import silu_parts
from adjoint.ops.moe.experts.triton.tiles import PRODUCT, ByAlignment, bind_products
from adjoint.ops.moe.kernels import halves


@triton.jit
def tile_of_program(column_tiles, GROUP: tl.constexpr):
    """The tile of rows and the tile of columns of this program: GROUP tiles of rows share columns that are in cache."""
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    within = program % (GROUP * column_tiles)
    return group * GROUP + within % GROUP, within // GROUP


@kernel(budget=PRODUCT, numeric=("DEPTH",), schedule=("ROWS", "COLUMNS", "GROUP"))
@triton.jit
def moe_experts_up(
    x: PointerIf16.element, gate_up: PointerIf16.element, tokens: Pointer.int32, tile_expert: Pointer.int32,
    tile_begin: Pointer.int32, tile_end: Pointer.int32, gu: PointerIf16.element, h: PointerIf16.element,
    D: tl.constexpr, INNER: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """g and u, rounded, side by side in gu (where KEEP), and h = silu(g)·u of the rounded ones."""
    tile, column_tile = tile_of_program(tl.cdiv(INNER, COLUMNS), GROUP)
    expert = tl.load(tile_expert + tile)
    if expert < 0:
        return
    begin = tl.load(tile_begin + tile)
    end = tl.load(tile_end + tile)
    row = begin + tl.arange(0, ROWS)
    token = tl.load(tokens + tl.minimum(row, end - 1)).to(tl.int64)
    # COLUMNS rows of the gate's weights, then as many of up's: one product computes both.
    lane = tl.arange(0, 2 * COLUMNS)
    unit = tl.minimum(column_tile * COLUMNS + lane % COLUMNS, INNER - 1) + (lane // COLUMNS) * INNER
    depth = tl.arange(0, DEPTH)
    left = x + token[:, None] * D + depth[None, :]
    right = gate_up + expert.to(tl.int64) * (2 * INNER * D) + (unit * D)[None, :] + depth[:, None]
    both = tl.zeros([ROWS, 2 * COLUMNS], tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, D, DEPTH):
        if D % DEPTH == 0:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, (depth < D - start)[None, :], other=0)
            b = tl.load(right, (depth < D - start)[:, None], other=0)
        both = tl.dot(a, b, both, input_precision="ieee", out_dtype=both.dtype)
        left += DEPTH
        right += DEPTH
    g, u = halves(both)
    g = g.to(gu.dtype.element_ty)
    u = u.to(gu.dtype.element_ty)
    NARROW: tl.constexpr = h.dtype.element_ty.primitive_bitwidth == 16
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < end)[:, None] & (column < INNER)[None, :]
    place = row.to(tl.int64)[:, None]
    if KEEP:
        tl.store(gu + place * (2 * INNER) + column[None, :], g, mask)
        tl.store(gu + place * (2 * INNER) + (column + INNER)[None, :], u, mask)
    value, _, d = silu_parts(g.to(both.dtype), NARROW, False)
    value = value * (u.to(both.dtype) * d)
    tl.store(h + place * INNER + column[None, :], value.to(h.dtype.element_ty), mask)


@kernel(budget=PRODUCT, numeric=("DEPTH",), schedule=("ROWS", "COLUMNS", "GROUP"))
@triton.jit
def moe_experts_outer(
    left: PointerIf16.element, right: PointerIf16.element, tokens: Pointer.int32, offsets: Pointer.int32,
    out: PointerIf16.element,
    M: tl.constexpr, N: tl.constexpr, LEFT_BY_TOKEN: tl.constexpr, RIGHT_BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ left[row, :]ᵀ · right[row, :] over the expert's rows, in their order; zeros where it has none."""
    row_tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    expert = program // (row_tiles * column_tiles)
    within = program % (row_tiles * column_tiles)
    # GROUP rows of tiles at a time; the last group may have fewer.
    group = within // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = within % (GROUP * column_tiles)
    m = (group * GROUP + within % height) * ROWS + tl.arange(0, ROWS)
    n = (within // height) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(offsets + expert).to(tl.int32)
    end = tl.load(offsets + expert + 1).to(tl.int32)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float64 if left.dtype.element_ty == tl.float64 else tl.float32)
    # Tokens are read a step ahead: addresses that wait for them would halve the depth of the pipeline.
    token = tl.load(tokens + begin + depth, begin + depth < end, other=0)
    for first in range(begin, end, DEPTH):
        place = first + depth
        inside = place < end
        from_left = token if LEFT_BY_TOKEN else place
        from_right = token if RIGHT_BY_TOKEN else place
        in_left = inside[None, :]
        if M % ROWS != 0:
            in_left = in_left & (m < M)[:, None]
        in_right = inside[:, None]
        if N % COLUMNS != 0:
            in_right = in_right & (n < N)[None, :]
        a = tl.load(left + from_left.to(tl.int64)[None, :] * M + m[:, None], in_left, other=0)
        b = tl.load(right + from_right.to(tl.int64)[:, None] * N + n[None, :], in_right, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
        token = tl.load(tokens + place + DEPTH, place + DEPTH < end, other=0)
    target = out + expert.to(tl.int64) * (M * N) + (m * N)[:, None] + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


# ------------------------------------------------------------------------------------------------ launches


def bind_outer(setup: Setup, m: int, n: int, left_by_token: bool) -> ByAlignment:
    """The product of columns of rows, m on the left and n on the right, for each expert; one side is read by token."""
    experts = setup.problem.sizes[2]
    return bind_products(
        setup, moe_experts_outer, "outer", lambda tile: experts * -(-m // tile.rows) * -(-n // tile.columns),
        M=m, N=n, LEFT_BY_TOKEN=left_by_token, RIGHT_BY_TOKEN=not left_by_token,
    )  # fmt: skip
