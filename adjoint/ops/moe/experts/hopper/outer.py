"""The gradients of weights for Hopper: sums over an expert's rows.

    sums[m, n] = Σ by_token[token of row, m] · rows[row, n]        ddown: dy and w·h;   dgate_up, turned: x and dgu

A tile has 128 × 256 of an expert's numbers; its sums go over the rows of the expert, 64 a stage. Both operands lie by
row, which is by term of the sums, and products read them transposed. The left one is read by token: threads copy it,
and it is the narrow one, because a copy takes a thread more instructions than TMA. The right one lies row after row:
TMA copies it, but for the last rows of an expert. Threads copy these, and zeros in the place of rows that are not
there: a NaN of the next expert's would reach this one.

    operations   2·N·D·I and twice that: 1.03 TFLOP for T 16384, D 2048, E 512, I 512, k 10, at 670 TFLOP/s 1.54 ms
    bytes        rows 2·N·(3·I) read for every tile of columns, mostly from the L2 cache, x and dy; 6·E·D·I = 3.2 GB
                 written, 0.75 ms
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from adjoint.core.kernels import Int32, Pointer, Pointer16, Tiled, kernel
from adjoint.device.gluon import row_layout
from adjoint.ops.moe.experts.hopper import device
from adjoint.ops.moe.experts.hopper.device import (
    COLUMNS,
    DEPTH,
    HALF,
    RESULT_PARTS,
    RESULT_TILE,
    RIGHT_BYTES,
    ROWS,
    Stages,
)

ROW_TILE = Tiled.of("element", DEPTH.value, COLUMNS.value)


@gluon.jit
def _copy(tile, base, place, inside, first_column, STRIDE: gl.constexpr):
    """Starts the copy of 64 lines, at places of a matrix; zeros where there is no line, and past the last column."""
    LAYOUT: gl.constexpr = row_layout(tile.shape[1])
    column = first_column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    lines = base + place.to(gl.int64)[:, None] * STRIDE + column[None, :]
    mask = inside[:, None] & (column < STRIDE)[None, :]
    async_copy.async_copy_global_to_shared(tile, lines, mask=mask)


@gluon.jit
def _producer(
    by_token, rows, row_tiles, tokens, offsets, experts, stages, M: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    """Copies the rows of every tile, a stage as soon as it is empty."""
    ROW_TILES: gl.constexpr = (M + ROWS - 1) // ROWS
    COLUMN_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    stage = 0
    phase = 1
    copied = 0
    filled = 0
    for number in range(gl.program_id(0), experts * (ROW_TILES * COLUMN_TILES), gl.num_programs(0)):
        expert = number // (ROW_TILES * COLUMN_TILES)
        m = (number // COLUMN_TILES) % ROW_TILES * ROWS
        n = number % COLUMN_TILES * COLUMNS
        begin = gl.load(offsets + expert)
        end = gl.load(offsets + expert + 1)
        term = gl.arange(0, DEPTH, gl.SliceLayout(1, row_layout(HALF)))
        row_term = gl.arange(0, DEPTH, gl.SliceLayout(1, row_layout(COLUMNS)))
        token = gl.load(tokens + begin + term, mask=begin + term < end, other=0)
        for first in range(begin, end, DEPTH):
            mbarrier.wait(stages.empty.index(stage), phase)
            full = stages.full.index(stage)
            inside = first + term < end
            _copy(stages.lefts.index(stage * 2), by_token, token, inside, m, M)
            _copy(stages.lefts.index(stage * 2 + 1), by_token, token, inside, m + HALF, M)
            # Tokens are read a stage ahead, so that no address waits for them.
            token = gl.load(tokens + first + DEPTH + term, mask=first + DEPTH + term < end, other=0)
            if first + DEPTH <= end:
                mbarrier.expect(full, RIGHT_BYTES)
                tma.async_copy_global_to_shared(row_tiles, [first, n], full, stages.rights.index(stage))
            else:
                place = first + row_term
                _copy(stages.rights.index(stage), rows, place, place < end, n, N)
                mbarrier.arrive(full)
            filled = device.fill_late(stages, copied, filled)
            copied += 1
            stage, phase = stages.after(stage, phase)
        mbarrier.wait(stages.empty.index(stage), phase)
        mbarrier.arrive(stages.full.index(stage))
        filled = device.fill_late(stages, copied, filled)
        copied += 1
        stage, phase = stages.after(stage, phase)
    device.fill_rest(stages, copied, filled)


@gluon.jit
def _consumer(
    out, offsets, experts, stages, rest, HALF_NUMBER: gl.constexpr, M: gl.constexpr, N: gl.constexpr,
    TURNED: gl.constexpr,
):  # fmt: skip
    """64 lines of every tile."""
    ROW_TILES: gl.constexpr = (M + ROWS - 1) // ROWS
    COLUMN_TILES: gl.constexpr = (N + COLUMNS - 1) // COLUMNS
    stage = 0
    phase = 0
    program = gl.program_id(0)
    last = experts * (ROW_TILES * COLUMN_TILES) - 1
    expert = gl.minimum(program, last) // (ROW_TILES * COLUMN_TILES)
    begin = gl.load(offsets + expert)
    end = gl.load(offsets + expert + 1)
    lent = program < 0
    for number in range(program, last + 1, gl.num_programs(0)):
        next_expert = gl.minimum(number + gl.num_programs(0), last) // (ROW_TILES * COLUMN_TILES)
        next_begin = gl.load(offsets + next_expert)
        next_end = gl.load(offsets + next_expert + 1)
        m = (number // COLUMN_TILES) % ROW_TILES * ROWS + HALF_NUMBER * HALF
        n = number % COLUMN_TILES * COLUMNS
        steps = (end - begin + (DEPTH - 1)) // DEPTH
        if m < M:
            total, stage, phase = device.multiply(stages, HALF_NUMBER, stage, phase, steps, True, True, lent)
            if steps == 0:  # else a stage before it was filled after this one had been found empty
                mbarrier.wait(stages.full.index(stage), phase)
            device.write_results(total, stages, rest, stage, HALF_NUMBER, TURNED)
            for part in gl.static_range(RESULT_PARTS):
                room = device.result_room(stages, rest, stage, HALF_NUMBER, part)
                column = n + part * HALF
                if column < N:
                    if TURNED:
                        tma.async_copy_shared_to_global(out, [expert * N + column, m], room)
                    else:
                        tma.async_copy_shared_to_global(out, [expert * M + m, column], room)
            stage, phase = stages.after(stage, phase)
        else:
            tma.store_wait(0)
            stages.release(stages.before(stage), lent)
            stage, phase = device.pass_by(stages, stage, phase, steps + 1)
        lent = m < M
        expert = next_expert
        begin = next_begin
        end = next_end
    tma.store_wait(0)


@kernel(budget=device.BUDGET, targets=("sm_90",), schedule=("STAGES",))
@gluon.jit
def moe_experts_outer_hopper(
    by_token: Pointer16.element, rows: Pointer16.element, row_tiles: ROW_TILE, tokens: Pointer.int32,
    offsets: Pointer.int32, out: RESULT_TILE, experts: Int32,
    M: gl.constexpr, N: gl.constexpr, TURNED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """out[e] = Σ by_token[token of row, :]ᵀ · rows[row, :] over the expert's rows in their order; zeros if it has none.

    The left operand has M columns, the right one N, multiples of 64. An expert has [M, N] in `out`; TURNED, [N, M].
    """
    stages = Stages.allocate(rows.dtype.element_ty, STAGES, True, True)
    rest = device.allocate_rest(rows.dtype.element_ty)
    gl.warp_specialize(
        [
            (_consumer, (out, offsets, experts, stages, rest, 0, M, N, TURNED)),
            (_consumer, (out, offsets, experts, stages, rest, 1, M, N, TURNED)),
            (_producer, (by_token, rows, row_tiles, tokens, offsets, experts, stages, M, N)),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[200, 104],
    )  # fmt: skip
