"""What kernels over rows are made of: tiles of rows, sums over a row, and the reciprocal of a root.

A tile is [pieces, rows, columns of a piece]: Triton gives the warps of a program to rows first, and then to pieces.

How a row is summed. It is padded with zeros to a power of two and cut into pieces of 2^(LANE_LEVELS + VECTOR_LEVELS)
columns; 2^GROUP_LEVELS pieces are a group, and 2^REPEAT_LEVELS groups a row. Sums are halved, the first half plus the
second, until one number remains: first the groups, then the 2^VECTOR_LEVELS neighbours of a vector, then the vectors
of a piece, then the pieces of a group. Every addition takes two numbers, and the levels follow from the width and the
dtype alone: so neither the layout of threads, which Triton chooses by alignment, nor the number of warps, nor the rows
of a tile can change a bit. The order is the one in which a GPU has the terms at hand: a thread holds vectors of all
groups, a warp holds a piece, and the warps of a program hold a group.
"""

import torch
import triton
import triton.language as tl

LEVELS = ("REPEAT_LEVELS", "GROUP_LEVELS", "LANE_LEVELS", "VECTOR_LEVELS")


def level(number: int) -> int:
    """The smallest n with 2^n ≥ number."""
    return max(0, number - 1).bit_length()


def order(size: int, dtype: torch.dtype) -> dict[str, int]:
    """The levels of a row's sums: vectors of 16 bytes, pieces of 32 vectors, groups of at most 16 pieces."""
    remaining, levels = level(size), []
    for most in (level(16 // dtype.itemsize), 5, 4):
        levels.append(min(most, remaining))
        remaining -= levels[-1]
    vector, lane, group = levels
    return dict(zip(LEVELS, (remaining, group, lane, vector), strict=True))


@triton.jit
def halves(values, BEFORE: tl.constexpr, LEVELS: tl.constexpr, AFTER: tl.constexpr):
    """[BEFORE, 2^LEVELS, AFTER] -> [BEFORE, AFTER], whatever the shape of the values: the first half plus the second.

    `tl.sum` of two numbers has one order; of more it has the layout's.
    """
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, (BEFORE, 2, AFTER * 2 ** (LEVELS - 1 - level))), 1)
    return tl.reshape(values, (BEFORE, AFTER))


@triton.jit
def added_halves(values, BEFORE: tl.constexpr, LEVELS: tl.constexpr, AFTER: tl.constexpr):
    """`halves`, of tiles with several rows and several pieces: there Triton 3.6 takes `tl.sum` over the wrong warps."""
    for level in tl.static_range(LEVELS):
        values = tl.reshape(values, (BEFORE, 2, AFTER * 2 ** (LEVELS - 1 - level)))
        first, second = tl.split(tl.permute(values, (0, 2, 1)))
        values = first + second
    return tl.reshape(values, (BEFORE, AFTER))


@triton.jit
def group_sums(values, LEVELS: tl.constexpr, ROWS: tl.constexpr, AFTER: tl.constexpr):
    """[pieces of a group, AFTER] -> [1, AFTER], AFTER numbers for all ROWS together."""
    if ROWS == 1:
        return halves(values, 1, LEVELS, AFTER)
    else:
        return added_halves(values, 1, LEVELS, AFTER)


@triton.jit
def sums_of_rows(values, PIECES: tl.constexpr, ROW_LEVELS: tl.constexpr, PIECE: tl.constexpr):
    """A tile -> [PIECES, PIECE]: the rows by halves."""
    if PIECES == 1:
        return halves(values, PIECES, ROW_LEVELS, PIECE)
    else:
        return added_halves(values, PIECES, ROW_LEVELS, PIECE)


@triton.jit
def piece_sums(
    values, ROWS: tl.constexpr, REPEAT_LEVELS: tl.constexpr, GROUP_LEVELS: tl.constexpr, LANE_LEVELS: tl.constexpr,
    VECTOR_LEVELS: tl.constexpr,
):  # fmt: skip
    """A tile -> [pieces of a group, ROWS]."""
    LINES: tl.constexpr = 2**GROUP_LEVELS * ROWS
    values = halves(values, 1, REPEAT_LEVELS, LINES * 2 ** (LANE_LEVELS + VECTOR_LEVELS))
    values = halves(values, LINES * 2**LANE_LEVELS, VECTOR_LEVELS, 1)
    return tl.reshape(halves(values, LINES, LANE_LEVELS, 1), (2**GROUP_LEVELS, ROWS))


@triton.jit
def row_sums(
    values, ROWS: tl.constexpr, REPEAT_LEVELS: tl.constexpr, GROUP_LEVELS: tl.constexpr, LANE_LEVELS: tl.constexpr,
    VECTOR_LEVELS: tl.constexpr,
):  # fmt: skip
    """A tile -> [ROWS]."""
    values = piece_sums(values, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    return tl.reshape(group_sums(values, GROUP_LEVELS, ROWS, ROWS), (ROWS,))


@triton.jit
def two_row_sums(
    first, second, ROWS: tl.constexpr, REPEAT_LEVELS: tl.constexpr, GROUP_LEVELS: tl.constexpr,
    LANE_LEVELS: tl.constexpr, VECTOR_LEVELS: tl.constexpr,
):  # fmt: skip
    """`row_sums` of both; their pieces, which different warps hold, meet at the same barriers."""
    first = piece_sums(first, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    second = piece_sums(second, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    if GROUP_LEVELS == 0:
        return tl.reshape(first, (ROWS,)), tl.reshape(second, (ROWS,))
    else:
        both = group_sums(tl.join(first, second), GROUP_LEVELS, ROWS, 2 * ROWS)
        return tl.split(tl.reshape(both, (ROWS, 2)))


@triton.jit
def row_offsets(row, inner, outer, step, SIZE: tl.constexpr, LAYOUT: tl.constexpr):
    """Where rows begin: see `adjoint.device.rows.KINDS`."""
    if LAYOUT == "contiguous":
        offset = row.to(tl.int64) * SIZE
    elif LAYOUT == "rows":
        offset = row.to(tl.int64) * step
    else:
        offset = (row // inner).to(tl.int64) * outer + (row % inner).to(tl.int64) * step
    return offset[None, :, None]


@triton.jit
def tile_columns(PIECES: tl.constexpr, PIECE: tl.constexpr):
    """The columns of a tile, [PIECES, 1, PIECE]."""
    return tl.arange(0, PIECES)[:, None, None] * PIECE + tl.arange(0, PIECE)[None, None, :]


@triton.jit
def tile_mask(row, rows, column, SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """Which elements of a tile there are; where no column lies past the end, columns play no part in it."""
    if SIZE == COLUMNS:
        return (row < rows)[None, :, None]
    else:
        return (row < rows)[None, :, None] & (column < SIZE)


@triton.jit
def reciprocal_root(x, NATIVE: tl.constexpr):
    """1 / sqrt(x) for x ≥ 0: the root correctly rounded, and its reciprocal too.

    On NVIDIA's GPUs without the compiler's own sequences, which call functions for extreme x and keep registers free
    for them: Newton's step from the approximate root, whose remainder x − s² is exact, and one from the approximate
    reciprocal. Where x − s² would be subnormal, x is scaled by 2⁶⁴ first, and the result by 2³². Every float32 was
    tried.
    """
    if x.dtype == tl.float64:
        return 1.0 / tl.sqrt(x)
    elif NATIVE:
        small = x < 1.2621774483536189e-29  # 2⁻⁹⁶
        scaled = tl.where(small, x * 18446744073709551616.0, x)
        guess = tl.rsqrt(scaled)
        root = scaled * guess
        root = tl.fma(tl.fma(-root, root, scaled), 0.5 * guess, root)
        guess = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [root], tl.float32, True, 1)
        result = tl.fma(tl.fma(-root, guess, 1.0), guess, guess)
        result = tl.where(small, result * 4294967296.0, result)
        result = tl.where(x == 0, float("inf"), result)
        return tl.where(x == float("inf"), 0.0, result)
    else:
        return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))
