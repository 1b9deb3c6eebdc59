"""The Triton kernel of the rotary embedding, and what launches it.

Rows, which are the heads of all tokens, follow each other in tiles of one tensor: first those of q, then those of k. A
program rotates the pairs of its rows and copies their other columns. Every element has one reader and one writer, and
products and sums are IEEE's, in an order that the element alone fixes: neither tiles nor strides can change a bit.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int64, Int64If16, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.ops.activation.kernels import widen
from adjoint.ops.rotary.rotary.plans import Rotation


@triton.jit
def load_pairs(
    rows, columns, column_stride, inside, COUNT: tl.constexpr, BOTH: tl.constexpr, INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, ADJACENT: tl.constexpr,
):  # fmt: skip
    """The first and the second column of pairs of each row, or, of tables that have one number for both, that twice.

    `columns` are those of the pairs, 0 to PAIRS further on, COUNT is the number of pairs of a row.
    """
    step = 1 if ADJACENT else column_stride
    if INTERLEAVED and BOTH:
        column = 2 * columns + tl.arange(0, 2 * PAIRS)
        mask = inside[:, None] & (column < 2 * COUNT)[None, :]
        both = tl.load(rows[:, None] + (column * step)[None, :], mask)
        first, second = tl.split(tl.reshape(both, (ROWS, PAIRS, 2)))
    else:
        column = columns + tl.arange(0, PAIRS)
        mask = inside[:, None] & (column < COUNT)[None, :]
        first = tl.load(rows[:, None] + (column * step)[None, :], mask)
        second = tl.load(rows[:, None] + ((COUNT + column) * step)[None, :], mask) if BOTH else first
    return first, second


@triton.jit
def rotate_rows(
    x, y, cos, sin, x_token, x_head, x_column, y_token, y_head, y_column, cos_token, cos_column, sin_token, sin_column,
    tile, tokens,
    HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, WIDE_TABLES: tl.constexpr, INTERLEAVED: tl.constexpr,
    ADJOINT: tl.constexpr, COPIES: tl.constexpr, ADJACENT: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Rotates a tile of rows of a tensor of one batch item."""
    first_row = tile * ROWS
    place = (first_row % HEADS).to(tl.int32) + tl.arange(0, ROWS)
    token = first_row // HEADS + place // HEADS
    head = (place % HEADS).to(tl.int64)
    inside = token < tokens
    x_rows = x + token * x_token + head * x_head
    y_rows = y + token * y_token + head * y_head
    x_step = 1 if ADJACENT else x_column
    y_step = 1 if ADJACENT else y_column
    if COPIES:
        for start in range(2 * HALF, SIZE, REST):
            column = start + tl.arange(0, REST)
            mask = inside[:, None] & (column < SIZE)[None, :]
            rest = tl.load(x_rows[:, None] + (column * x_step)[None, :], mask)
            tl.store(y_rows[:, None] + (column * y_step)[None, :], rest, mask)
    cos_rows = cos + token * cos_token
    sin_rows = sin + token * sin_token
    for start in range(0, HALF, PAIRS):
        first, second = load_pairs(x_rows, start, x_column, inside, HALF, True, INTERLEAVED, ROWS, PAIRS, ADJACENT)
        first, second = widen(first), widen(second)
        cos_1, cos_2 = load_pairs(
            cos_rows, start, cos_column, inside, HALF, WIDE_TABLES, INTERLEAVED, ROWS, PAIRS, ADJACENT
        )
        sin_1, sin_2 = load_pairs(
            sin_rows, start, sin_column, inside, HALF, WIDE_TABLES, INTERLEAVED, ROWS, PAIRS, ADJACENT
        )
        cos_1, cos_2 = cos_1.to(first.dtype), cos_2.to(first.dtype)
        sin_1, sin_2 = sin_1.to(first.dtype), sin_2.to(first.dtype)
        if ADJOINT:
            new_first = first * cos_1 + second * sin_2
            new_second = second * cos_2 - first * sin_1
        else:
            new_first = first * cos_1 - second * sin_1
            new_second = second * cos_2 + first * sin_2
        element = y.dtype.element_ty
        if INTERLEAVED:
            column = 2 * start + tl.arange(0, 2 * PAIRS)
            mask = inside[:, None] & (column < 2 * HALF)[None, :]
            both = tl.reshape(tl.join(new_first, new_second), (ROWS, 2 * PAIRS))
            tl.store(y_rows[:, None] + (column * y_step)[None, :], both.to(element), mask)
        else:
            column = start + tl.arange(0, PAIRS)
            mask = inside[:, None] & (column < HALF)[None, :]
            tl.store(y_rows[:, None] + (column * y_step)[None, :], new_first.to(element), mask)
            tl.store(y_rows[:, None] + ((HALF + column) * y_step)[None, :], new_second.to(element), mask)


@kernel(budget=Budget(registers=255, shared_bytes=65536), schedule=("ROWS", "PAIRS", "REST"))
@triton.jit
def rotary_rows(
    q: PointerIf16.element, k: PointerIf16.element, rotated_q: PointerIf16.element, rotated_k: PointerIf16.element,
    cos: PointerIf16.table, sin: PointerIf16.table, q_strides: Int64If16 * 3, k_strides: Int64If16 * 3,
    rotated_q_strides: Int64If16 * 3, rotated_k_strides: Int64If16 * 3, cos_strides: Int64If16 * 2,
    sin_strides: Int64If16 * 2, column_strides: Int64 * 6, tokens: Int64, q_tiles: Int64, tiles: Int64,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr, WIDE_TABLES: tl.constexpr,
    INTERLEAVED: tl.constexpr, ADJOINT: tl.constexpr, COPIES: tl.constexpr, ADJACENT: tl.constexpr,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Strides are those of batch, tokens and heads, of a table those of batch and tokens, and of columns in the order
    q, k, rotated q, rotated k, cos, sin. Of every batch item, `q_tiles` of `tiles` tiles are rows of q."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // tiles
    tile = program % tiles
    cos += batch * cos_strides[0]
    sin += batch * sin_strides[0]
    if tile < q_tiles:
        rotate_rows(
            q + batch * q_strides[0], rotated_q + batch * rotated_q_strides[0], cos, sin, q_strides[1], q_strides[2],
            column_strides[0], rotated_q_strides[1], rotated_q_strides[2], column_strides[2], cos_strides[1],
            column_strides[4], sin_strides[1], column_strides[5], tile, tokens, Q_HEADS, SIZE, HALF, WIDE_TABLES,
            INTERLEAVED, ADJOINT, COPIES, ADJACENT, ROWS, PAIRS, REST,
        )  # fmt: skip
    else:
        rotate_rows(
            k + batch * k_strides[0], rotated_k + batch * rotated_k_strides[0], cos, sin, k_strides[1], k_strides[2],
            column_strides[1], rotated_k_strides[1], rotated_k_strides[2], column_strides[3], cos_strides[1],
            column_strides[4], sin_strides[1], column_strides[5], tile - q_tiles, tokens, K_HEADS, SIZE, HALF,
            WIDE_TABLES, INTERLEAVED, ADJOINT, COPIES, ADJACENT, ROWS, PAIRS, REST,
        )  # fmt: skip


def rows(setup: Setup, of: Rotation) -> Execute:
    """Any layout. What nobody asks for has no tiles, and others' memory stands in its place."""
    problem, schedule = setup.problem, setup.schedule
    (element, table), (size, q_heads, k_heads, width) = problem.dtypes, problem.sizes
    interleaved, rotary_dim = problem.options[:2]
    half = rotary_dim // 2
    copies = not of.in_place
    pairs = min(triton.next_power_of_2(half), max(1, schedule["columns"] // 2))
    rest = min(triton.next_power_of_2(max(1, size - rotary_dim)), schedule["columns"]) if copies else 1
    tile_rows = max(1, min(schedule["elements"] // max(4 * pairs, rest), 1024))
    rotate = setup.either(
        rotary_rows, element=element, table=table, Q_HEADS=max(1, q_heads), K_HEADS=max(1, k_heads), SIZE=size,
        HALF=half, WIDE_TABLES=width == rotary_dim, INTERLEAVED=interleaved, ADJOINT=of.adjoint, COPIES=copies,
        ADJACENT=problem.layout == "rows", ROWS=tile_rows, PAIRS=pairs, REST=rest, num_warps=schedule["num_warps"],
    )  # fmt: skip

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        q, k, cos, sin, rotated_q, rotated_k = of.tensors(arguments, outputs)
        if q is None and k is None:
            return
        q_rows, k_rows = [0 if x is None else x.shape[1] * x.shape[2] for x in (q, k)]
        if q is None:
            q, rotated_q = k, rotated_k
        elif k is None:
            k, rotated_k = q, rotated_q
        batch, tokens = q.shape[:2]
        strides = [x.stride() for x in (q, k, rotated_q, rotated_k)]
        tables = [x.stride() if x.dim() == 3 and x.shape[0] > 1 else (0, *x.stride()[-2:]) for x in (cos, sin)]
        if tokens == 1 and batch > 1:  # rows of several tokens then share a tile
            batch, tokens = 1, batch
            q_rows, k_rows = q_rows * tokens, k_rows * tokens
            strides = [(0, x[0], x[2], x[3]) for x in strides]
            tables = [(0, x[0], x[2]) for x in tables]
        leading = [x[:-1] if batch > 1 else (0, *x[1:-1]) for x in (*strides, *tables)]
        aligned = is_aligned(q, k, rotated_q, rotated_k, cos, sin) and not any([s % 16 for x in leading for s in x])
        q_tiles, k_tiles = -(-q_rows // tile_rows), -(-k_rows // tile_rows)
        rotate[aligned].launch(
            (batch * (q_tiles + k_tiles),), q=q, k=k, rotated_q=rotated_q, rotated_k=rotated_k, cos=cos, sin=sin,
            q_strides=leading[0], k_strides=leading[1], rotated_q_strides=leading[2], rotated_k_strides=leading[3],
            cos_strides=leading[4], sin_strides=leading[5],
            column_strides=tuple([x[-1] for x in (*strides, *tables)]), tokens=tokens, q_tiles=q_tiles,
            tiles=q_tiles + k_tiles,
        )  # fmt: skip

    return execute
