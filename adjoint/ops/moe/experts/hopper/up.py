"""The products up into the experts, for Hopper.

    g = x[token] · gate[e]ᵀ,   u = x[token] · up[e]ᵀ,   h = silu(g) ⊙ u

A tile has 128 rows and 128 columns of the gate beside the same 128 of up: 256 columns of sums. So one product reads the
rows once for both, and g and u of a number are in one thread. For N rows of D columns, and I columns of the gate:

    operations   4·N·D·I:  0.69 TFLOP for T 16384, D 2048, E 512, I 512, k 10, at 670 TFLOP/s 1.03 ms
    bytes        weights 4·E·D·I = 2.1 GB and x 2·T·D once, g and u 4·N·I and h 2·N·I written (0.5 GB): 2.7 GB, 0.64 ms
    L2 to SM     48 KiB for 4.2 MFLOP: 7.7 TB/s at that rate

Rows are gathered, which TMA does not do on Hopper: threads copy them, 16 bytes each. Weights come by TMA. What is past
the last row of an expert, or the last column of the gate, is multiplied and not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from adjoint.core.kernels import Pointer, Pointer16, Tiled, kernel
from adjoint.device.gluon import TILE, rounded_to
from adjoint.ops.moe.experts.hopper import device
from adjoint.ops.moe.experts.hopper.device import COLUMNS, DEPTH, HALF, RIGHT_BYTES, Stages, Tiles

GATE = gl.constexpr(COLUMNS.value // 2)
"""Columns of the gate, and of up, in a tile."""

GATE_TILE = Tiled.of("element", GATE.value, DEPTH.value)


@gluon.jit
def _producer(
    x, gate_up, tokens, tiles, stages, D: gl.constexpr, INNER: gl.constexpr, COLUMN_TILES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Copies the operands of every tile, a stage as soon as it is empty."""
    parts = stages.rights._reinterpret(stages.rights.dtype, [2 * stages.full.shape[0], GATE, DEPTH], TILE)
    stage = 0
    phase = 1
    copied = 0
    filled = 0
    for number in range(gl.program_id(0), tiles.count * COLUMN_TILES, gl.num_programs(0)):
        tile, column_tile = tiles.place(number, COLUMN_TILES, GROUP)
        expert = gl.load(tiles.expert + tile)
        begin = gl.load(tiles.begin + tile)
        end = gl.load(tiles.end + tile)
        first_lines, in_first = device.token_lines(x, tokens, begin, end, D)
        second_lines, in_second = device.token_lines(x, tokens, begin + HALF, end, D)
        gate_row = expert * (2 * INNER) + column_tile * GATE
        for depth in range(0, D, DEPTH):
            mbarrier.wait(stages.empty.index(stage), phase)
            full = stages.full.index(stage)
            mbarrier.expect(full, RIGHT_BYTES)
            tma.async_copy_global_to_shared(gate_up, [gate_row, depth], full, parts.index(stage * 2))
            tma.async_copy_global_to_shared(gate_up, [gate_row + INNER, depth], full, parts.index(stage * 2 + 1))
            async_copy.async_copy_global_to_shared(stages.lefts.index(stage * 2), first_lines + depth, mask=in_first)
            async_copy.async_copy_global_to_shared(
                stages.lefts.index(stage * 2 + 1), second_lines + depth, mask=in_second
            )
            filled = device.fill_late(stages, copied, filled)
            copied += 1
            stage, phase = stages.after(stage, phase)
    device.fill_rest(stages, copied, filled)


@gluon.jit
def _consumer(
    gu, h, tiles, stages, HALF_NUMBER: gl.constexpr, D: gl.constexpr, INNER: gl.constexpr, KEEP: gl.constexpr,
    COLUMN_TILES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile: g, u and h."""
    stage = 0
    phase = 0
    program = gl.program_id(0)
    begin, end, column_tile = tiles.rows(program, COLUMN_TILES, GROUP)
    for number in range(program, tiles.count * COLUMN_TILES, gl.num_programs(0)):
        next_begin, next_end, next_column_tile = tiles.rows(number + gl.num_programs(0), COLUMN_TILES, GROUP)
        if begin + HALF_NUMBER * HALF < end:
            both, stage, phase = device.multiply(stages, HALF_NUMBER, stage, phase, D // DEPTH, False, False)
            first = begin + HALF_NUMBER * HALF
            g, u = device.halves(both)
            gates = device.halves(g)
            ups = device.halves(u)
            # Some columns at a time: all of them would not fit in registers.
            for part in gl.static_range(2):
                column = column_tile * GATE + part * (GATE // 2)
                place = first.to(gl.int64) * INNER + column
                g = rounded_to(gates[part], h.dtype.element_ty)
                u = rounded_to(ups[part], h.dtype.element_ty)
                if KEEP:
                    place_of_g = gu + (place + first.to(gl.int64) * INNER)
                    device.store_rows(place_of_g, g, end - first, INNER - column, 2 * INNER)
                    device.store_rows(place_of_g + INNER, u, end - first, INNER - column, 2 * INNER)
                hidden = rounded_to(device.silu_product(g.to(gl.float32), u.to(gl.float32)), h.dtype.element_ty)
                device.store_rows(h + place, hidden, end - first, INNER - column, INNER)
        else:
            stage, phase = device.pass_by(stages, stage, phase, D // DEPTH)
        begin = next_begin
        end = next_end
        column_tile = next_column_tile


@kernel(budget=device.BUDGET, targets=("sm_90",), schedule=("STAGES", "GROUP"))
@gluon.jit
def moe_experts_up_hopper(
    x: Pointer16.element, gate_up: GATE_TILE, tokens: Pointer.int32, tile_expert: Pointer.int32,
    tile_begin: Pointer.int32, tile_end: Pointer.int32, tile_count: Pointer.int32, gu: Pointer16.element,
    h: Pointer16.element,
    D: gl.constexpr, INNER: gl.constexpr, KEEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """g and u, rounded, side by side in gu (where KEEP), and h = silu(g)·u of the rounded ones.

    For 16-bit types, D and INNER multiples of 64.
    """
    COLUMN_TILES: gl.constexpr = (INNER + GATE - 1) // GATE
    tiles = Tiles(tile_expert, tile_begin, tile_end, gl.load(tile_count))
    stages = Stages.allocate(x.dtype.element_ty, STAGES, False, False)
    gl.warp_specialize(
        [
            (_consumer, (gu, h, tiles, stages, 0, D, INNER, KEEP, COLUMN_TILES, GROUP)),
            (_consumer, (gu, h, tiles, stages, 1, D, INNER, KEEP, COLUMN_TILES, GROUP)),
            (_producer, (x, gate_up, tokens, tiles, stages, D, INNER, COLUMN_TILES, GROUP)),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[216, 72],
    )  # fmt: skip
