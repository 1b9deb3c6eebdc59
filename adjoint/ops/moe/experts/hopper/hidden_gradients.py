"""The gradient of the hidden values for Hopper, back through the gate, and its part of that of the routing weights.

    dh = dy[token] · down[e]                                      dweights = Σ h·dh over the columns
    dgu = w·dh ⊙ u ⊙ silu'(g) beside w·dh ⊙ silu(g)               scaled = w·h

A tile has 128 rows and 256 columns of dh, which stay in registers. After the terms of its sums come four stages with g
and u, 64 columns each, by TMA as well: so nobody waits for memory when dh has been summed.

    operations   2·N·D·I: 0.34 TFLOP for T 16384, D 2048, E 512, I 512, k 10, at 670 TFLOP/s 0.51 ms
    bytes        down 2·E·D·I = 1.1 GB, dy 2·T·D, g and u 4·N·I read, dgu 4·N·I and w·h 2·N·I written: 2.0 GB, 0.47 ms
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from adjoint.core.kernels import Int32, Pointer, Pointer16, Tiled, kernel
from adjoint.device.gluon import fields, product_layout, rounded_to
from adjoint.ops.moe.experts.hopper import device
from adjoint.ops.moe.experts.hopper.device import COLUMNS, DEPTH, HALF, LEFT_BYTES, RIGHT_BYTES, Stages, Tiles

DOWN_TILE = Tiled.of("element", DEPTH.value, COLUMNS.value)

PAIR_TILE = Tiled.of("element", HALF.value, DEPTH.value)

PARTS = gl.constexpr(COLUMNS.value // DEPTH.value)
"""Stages with g and u."""

PART = gl.constexpr(DEPTH.value // 2)
"""Columns that go through the gate at a time: all of them would not fit in registers."""

WAITING = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
"""Sums in shared memory."""

Gradients = fields("row_weights dgu scaled partials count")
"""What is read and written of every row."""


@gluon.jit
def _producer(
    dy, down, gu, tokens, tiles, stages, D: gl.constexpr, INNER: gl.constexpr, COLUMN_TILES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Copies the operands of every tile, and then its g and u, a stage as soon as it is empty."""
    pairs = stages.pairs()
    stage = 0
    phase = 1
    copied = 0
    filled = 0
    for number in range(gl.program_id(0), tiles.count * COLUMN_TILES, gl.num_programs(0)):
        tile, column_tile = tiles.place(number, COLUMN_TILES, GROUP)
        expert = gl.load(tiles.expert + tile)
        begin = gl.load(tiles.begin + tile)
        end = gl.load(tiles.end + tile)
        first_lines, in_first = device.token_lines(dy, tokens, begin, end, D)
        second_lines, in_second = device.token_lines(dy, tokens, begin + HALF, end, D)
        for depth in range(0, D, DEPTH):
            mbarrier.wait(stages.empty.index(stage), phase)
            full = stages.full.index(stage)
            mbarrier.expect(full, RIGHT_BYTES)
            tma.async_copy_global_to_shared(
                down, [expert * D + depth, column_tile * COLUMNS], full, stages.rights.index(stage)
            )
            async_copy.async_copy_global_to_shared(stages.lefts.index(stage * 2), first_lines + depth, mask=in_first)
            async_copy.async_copy_global_to_shared(
                stages.lefts.index(stage * 2 + 1), second_lines + depth, mask=in_second
            )
            filled = device.fill_late(stages, copied, filled)
            copied += 1
            stage, phase = stages.after(stage, phase)
        for part in range(PARTS):
            column = column_tile * COLUMNS + part * DEPTH
            mbarrier.wait(stages.empty.index(stage), phase)
            full = stages.full.index(stage)
            if begin + HALF < end:
                mbarrier.expect(full, 4 * LEFT_BYTES)
                tma.async_copy_global_to_shared(gu, [begin + HALF, column], full, pairs.index(stage * 4 + 2))
                tma.async_copy_global_to_shared(gu, [begin + HALF, column + INNER], full, pairs.index(stage * 4 + 3))
            else:
                mbarrier.expect(full, 2 * LEFT_BYTES)
            tma.async_copy_global_to_shared(gu, [begin, column], full, pairs.index(stage * 4))
            tma.async_copy_global_to_shared(gu, [begin, column + INNER], full, pairs.index(stage * 4 + 1))
            filled = device.fill_late(stages, copied, filled)
            copied += 1
            stage, phase = stages.after(stage, phase)
    device.fill_rest(stages, copied, filled)


@gluon.jit
def _through_gate(
    gradients, dh, g, u, weight, first, rows, column, INNER: gl.constexpr, HIDDEN: gl.constexpr, SCALED: gl.constexpr
):
    """Stores dgu and w·h of 64 rows and PART columns, and gives the sum of h·dh of each row."""
    LAYOUT: gl.constexpr = product_layout(PART)
    kind: gl.constexpr = g.dtype
    columns = INNER - column
    u = u.to(gl.float32)
    value, slope, d = device.silu_parts(g.to(gl.float32))
    h = value * (u * d)
    # All is rounded before anything is stored: threads wait for each other there, with less in their registers.
    scaled = rounded_to(weight * h, kind)
    gated = (weight * dh) * d
    dg = rounded_to(gated * (u * (d * (0.5 * slope))) * 2.0, kind)
    du = rounded_to(gated * value, kind)
    # What is past the last column is of another expert, and may be no finite number.
    inside = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT)) < columns
    total = gl.sum(gl.where(inside[None, :], h * dh, 0.0), 1)
    if SCALED:
        place = gradients.scaled + (first.to(gl.int64) * INNER + column)
        device.store_rows(place, scaled, rows, columns, INNER, True)
    if HIDDEN:
        place = gradients.dgu + (first.to(gl.int64) * (2 * INNER) + column)
        device.store_rows(place, dg, rows, columns, 2 * INNER, True)
        device.store_rows(place + INNER, du, rows, columns, 2 * INNER, True)
    return total


@gluon.jit
def _consumer(
    gradients, tiles, stages, waiting, HALF_NUMBER: gl.constexpr, D: gl.constexpr, INNER: gl.constexpr,
    HIDDEN: gl.constexpr, SCALED: gl.constexpr, WEIGHTS: gl.constexpr, COLUMN_TILES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """64 rows of every tile."""
    LAYOUT: gl.constexpr = product_layout(PART)
    pairs = stages.pairs()
    stage = 0
    phase = 0
    program = gl.program_id(0)
    row = gl.arange(0, HALF, gl.SliceLayout(1, LAYOUT))
    begin, end, column_tile = tiles.rows(program, COLUMN_TILES, GROUP)
    for number in range(program, tiles.count * COLUMN_TILES, gl.num_programs(0)):
        next_number = number + gl.num_programs(0)
        if begin + HALF_NUMBER * HALF < end:
            first = begin + HALF_NUMBER * HALF
            rows = end - first
            dh, stage, phase = device.multiply(stages, HALF_NUMBER, stage, phase, D // DEPTH, False, True)
            parts = device.quarters(dh)
            # The last columns wait in shared memory: there are not registers enough for them beside the first.
            _, last = device.halves(parts[PARTS - 1])
            waiting.index(HALF_NUMBER).store(last)
            weight = gl.load(gradients.row_weights + first + row, mask=row < rows, other=0)[:, None]
            total = gl.zeros([HALF], gl.float32, gl.SliceLayout(1, LAYOUT))
            for part in gl.static_range(PARTS):
                mbarrier.wait(stages.full.index(stage), phase)
                dh_left, dh_right = device.halves(parts[part])
                if part == PARTS - 1:  # not earlier, for want of registers
                    next_begin, next_end, next_column_tile = tiles.rows(next_number, COLUMN_TILES, GROUP)
                for side in gl.static_range(2):
                    column = column_tile * COLUMNS + part * DEPTH + side * PART
                    g = pairs.index(stage * 4 + 2 * HALF_NUMBER).slice(side * PART, PART, 1).load(LAYOUT)
                    u = pairs.index(stage * 4 + 2 * HALF_NUMBER + 1).slice(side * PART, PART, 1).load(LAYOUT)
                    dh_side = dh_left if side == 0 else dh_right
                    if part * 2 + side == 2 * PARTS - 1:
                        dh_side = waiting.index(HALF_NUMBER).load(LAYOUT)
                    total += _through_gate(gradients, dh_side, g, u, weight, first, rows, column, INNER, HIDDEN, SCALED)
                fence_async_shared()  # what is copied there next must not overtake the loads
                stages.release(stage, True)
                stage, phase = stages.after(stage, phase)
            if WEIGHTS:
                place = gradients.partials + (column_tile.to(gl.int64) * gradients.count + first)
                gl.store(place + row, total, mask=row < rows)
        else:
            next_begin, next_end, next_column_tile = tiles.rows(next_number, COLUMN_TILES, GROUP)
            stage, phase = device.pass_by(stages, stage, phase, D // DEPTH + PARTS)
        begin = next_begin
        end = next_end
        column_tile = next_column_tile


@kernel(budget=device.BUDGET, targets=("sm_90",), schedule=("STAGES", "GROUP"))
@gluon.jit
def moe_experts_down_adjoint_hopper(
    dy: Pointer16.element, down: DOWN_TILE, gu: PAIR_TILE, tokens: Pointer.int32, row_weights: Pointer.float32,
    tile_expert: Pointer.int32, tile_begin: Pointer.int32, tile_end: Pointer.int32, tile_count: Pointer.int32,
    dgu: Pointer16.element, scaled: Pointer16.element, partials: Pointer.float32, count: Int32,
    D: gl.constexpr, INNER: gl.constexpr, HIDDEN: gl.constexpr, SCALED: gl.constexpr, WEIGHTS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """dh = dy[token] · down[e], and from it, with g and u as saved and w the row's weight:

    HIDDEN   dgu      = w·dh·u·silu'(g) and w·dh·silu(g), side by side
    SCALED   scaled   = w·h
    WEIGHTS  partials = Σ h·dh over 256 columns: 32 after 32, of which a thread adds 8 and four threads theirs

    For 16-bit types, D and INNER multiples of 64.
    """
    COLUMN_TILES: gl.constexpr = (INNER + COLUMNS - 1) // COLUMNS
    tiles = Tiles(tile_expert, tile_begin, tile_end, gl.load(tile_count))
    stages = Stages.allocate(dy.dtype.element_ty, STAGES, False, True)
    waiting = gl.allocate_shared_memory(gl.float32, [2, HALF, PART], WAITING)
    gradients = Gradients(row_weights, dgu, scaled, partials, count)
    gl.warp_specialize(
        [
            (_consumer, (gradients, tiles, stages, waiting, 0, D, INNER, HIDDEN, SCALED, WEIGHTS, COLUMN_TILES, GROUP)),
            (_consumer, (gradients, tiles, stages, waiting, 1, D, INNER, HIDDEN, SCALED, WEIGHTS, COLUMN_TILES, GROUP)),
            (_producer, (dy, down, gu, tokens, tiles, stages, D, INNER, COLUMN_TILES, GROUP)),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[232, 40],
    )  # fmt: skip
