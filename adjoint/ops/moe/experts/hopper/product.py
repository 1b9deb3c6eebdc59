"""Products of rows with an expert's weight, for Hopper: y's rows from the hidden values, and dx's from dg and du.

    out[row, c] = Σ_k rows[row, k] · weight[e][k, c]

N rows, K terms and D columns, of which a launch has as many as I, or 512 where that is more. Wider launches have more
tiles: with 132 programs, 540 tiles take as long as 660 do.

    down   K = I:    2·N·I·D operations, 0.34 TFLOP for T 16384, D 2048, E 512, I 512, k 10: 0.51 ms at 670 TFLOP/s
    dx     K = 2·I:  0.69 TFLOP, 1.03 ms
    bytes  the weights once, rows 2·N·K for every launch, out 2·N·D: 1.1 + 4·0.17 + 0.7 GB for down, 0.6 ms

The rows of an expert lie side by side, so that TMA copies both operands; what follows the last row of an expert is
another's, is multiplied and not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from adjoint.core.kernels import Int32, Pointer, Pointer16, Tiled, kernel
from adjoint.device.gluon import fields, row_layout
from adjoint.ops.moe.experts.hopper import device
from adjoint.ops.moe.experts.hopper.device import (
    COLUMNS,
    DEPTH,
    HALF,
    LEFT_BYTES,
    RESULT_PARTS,
    RESULT_TILE,
    RIGHT_BYTES,
    Stages,
    Tiles,
)

ROW_TILE = Tiled.of("element", HALF.value, DEPTH.value)
WEIGHT_TILE = Tiled.of("element", "WEIGHT_LINES", "WEIGHT_WIDTH")

Results = fields("out tiles rest")
"""Where results go: an address and a matrix, which are the same memory, and room on the way."""


@gluon.jit
def _producer(
    rows, weight, first_column, column_tiles, tiles, stages, K: gl.constexpr, N: gl.constexpr,
    BY_COLUMN: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Copies the operands of every tile, a stage as soon as it is empty."""
    stage = 0
    phase = 1
    for number in range(gl.program_id(0), tiles.count * column_tiles, gl.num_programs(0)):
        tile, column_tile = tiles.place(number, column_tiles, GROUP)
        expert = gl.load(tiles.expert + tile)
        begin = gl.load(tiles.begin + tile)
        end = gl.load(tiles.end + tile)
        column = first_column + column_tile * COLUMNS
        for depth in range(0, K, DEPTH):
            mbarrier.wait(stages.empty.index(stage), phase)
            full = stages.full.index(stage)
            mbarrier.expect(full, LEFT_BYTES + RIGHT_BYTES)
            if BY_COLUMN:
                tma.async_copy_global_to_shared(weight, [expert * N + column, depth], full, stages.rights.index(stage))
            else:
                tma.async_copy_global_to_shared(weight, [expert * K + depth, column], full, stages.rights.index(stage))
            tma.async_copy_global_to_shared(rows, [begin, depth], full, stages.lefts.index(stage * 2))
            if begin + HALF < end:
                mbarrier.expect(full, LEFT_BYTES)
                tma.async_copy_global_to_shared(rows, [begin + HALF, depth], full, stages.lefts.index(stage * 2 + 1))
            else:
                mbarrier.arrive(full)
            stage, phase = stages.after(stage, phase)
        mbarrier.wait(stages.empty.index(stage), phase)
        mbarrier.arrive(stages.full.index(stage), count=2)
        stage, phase = stages.after(stage, phase)


@gluon.jit
def _store(results, stages, stage, first, rows, column, columns, HALF_NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """Copies results to memory: 64 rows by TMA, fewer by threads, because the next rows are another expert's."""
    for part in gl.static_range(RESULT_PARTS):
        room = device.result_room(stages, results.rest, stage, HALF_NUMBER, part)
        if part * HALF < columns:
            if rows >= HALF:
                tma.async_copy_shared_to_global(results.tiles, [first, column + part * HALF], room)
            else:
                place = results.out + (first.to(gl.int64) * WIDTH + column + part * HALF)
                device.store_rows(place, room.load(row_layout(HALF)), rows, columns - part * HALF, WIDTH)


@gluon.jit
def _consumer(
    results, first_column, column_tiles, tiles, stages, HALF_NUMBER: gl.constexpr, K: gl.constexpr, N: gl.constexpr,
    WIDTH: gl.constexpr, BY_COLUMN: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile."""
    stage = 0
    phase = 0
    program = gl.program_id(0)
    begin, end, column_tile = tiles.rows(program, column_tiles, GROUP)
    lent = program < 0
    for number in range(program, tiles.count * column_tiles, gl.num_programs(0)):
        next_begin, next_end, next_column_tile = tiles.rows(number + gl.num_programs(0), column_tiles, GROUP)
        first = begin + HALF_NUMBER * HALF
        rows = end - first
        if rows > 0:
            total, stage, phase = device.multiply(
                stages, HALF_NUMBER, stage, phase, K // DEPTH, False, not BY_COLUMN, lent
            )
            column = column_tile * COLUMNS
            columns = gl.minimum(WIDTH, N - first_column) - column
            mbarrier.wait(stages.full.index(stage), phase)
            device.write_results(total, stages, results.rest, stage, HALF_NUMBER, False)
            _store(results, stages, stage, first, rows, column, columns, HALF_NUMBER, WIDTH)
            stage, phase = stages.after(stage, phase)
        else:
            tma.store_wait(0)
            stages.release(stages.before(stage), lent)
            stage, phase = device.pass_by(stages, stage, phase, K // DEPTH + 1)
        lent = rows > 0
        begin = next_begin
        end = next_end
        column_tile = next_column_tile
    tma.store_wait(0)


@kernel(budget=device.BUDGET, targets=("sm_90",), schedule=("WIDTH", "STAGES", "GROUP"))
@gluon.jit
def moe_experts_product_hopper(
    rows: ROW_TILE, weight: WEIGHT_TILE, tile_expert: Pointer.int32, tile_begin: Pointer.int32,
    tile_end: Pointer.int32, tile_count: Pointer.int32, out: Pointer16.element, out_tiles: RESULT_TILE, chunk: Int32,
    K: gl.constexpr, N: gl.constexpr, WIDTH: gl.constexpr, BY_COLUMN: gl.constexpr, WEIGHT_LINES: gl.constexpr,
    WEIGHT_WIDTH: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """out[row, c] = Σ_k rows[row, k] · weight[e][k, chunk·WIDTH + c], for WIDTH columns of N, or the last.

    BY_COLUMN, the weight of an expert is [N, K], and a tile of it [256, 64]; else it is [K, N], and a tile [64, 256].
    For 16-bit types, K and N multiples of 64.
    """
    tiles = Tiles(tile_expert, tile_begin, tile_end, gl.load(tile_count))
    stages = Stages.allocate(out.dtype.element_ty, STAGES, False, not BY_COLUMN)
    results = Results(out, out_tiles, device.allocate_rest(out.dtype.element_ty))
    first_column = chunk * WIDTH
    column_tiles = (gl.minimum(WIDTH, N - first_column) + (COLUMNS - 1)) // COLUMNS
    gl.warp_specialize(
        [
            (_consumer, (results, first_column, column_tiles, tiles, stages, 0, K, N, WIDTH, BY_COLUMN, GROUP)),
            (_consumer, (results, first_column, column_tiles, tiles, stages, 1, K, N, WIDTH, BY_COLUMN, GROUP)),
            (_producer, (rows, weight, first_column, column_tiles, tiles, stages, K, N, BY_COLUMN, GROUP)),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[216, 72],
    )  # fmt: skip
