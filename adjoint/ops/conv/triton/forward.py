"""y and the final states.

A program has a tile of channels and BLOCKS blocks of ROWS tokens. It loads the rows of a block and the W − 1 before it,
all before it computes, and uses each for W tokens: of memory, every number is read once, what a block needs of the one
before it comes from the cache. A block with an edge is computed EDGE_ROWS tokens at a time: few, so that registers are
left for the blocks without.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check
from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.ops.conv.arguments import MAX_PARTS
from adjoint.ops.conv.shape import Shape, named_strides
from adjoint.ops.conv.triton.rows import (
    PLACE_ROWS,
    activate,
    bounds_of,
    conv_places,
    convolve,
    in_part,
    launch_places,
    load_bias,
    load_rows_at_edges,
    load_taps,
    load_tokens,
    of_part,
    part_of,
    place_of,
    sequence_of,
    tap_at_edge,
)


@triton.jit
def write_within(
    at, out, size, taps, start, offset, inside, x_token, WIDTH: tl.constexpr, SILU: tl.constexpr, NARROW: tl.constexpr,
    NATIVE: tl.constexpr, TIME_ADJACENT: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """y of a block whose tokens, and the W − 1 before them, are of one sequence."""
    rows = load_tokens(at, offset, inside, x_token, WIDTH - 1, ROWS, LEVELS, TIME_ADJACENT, CHANNELS)
    for row in tl.static_range(ROWS):
        y = activate(convolve(rows, taps, start, row, WIDTH), SILU, NARROW, NATIVE)
        tl.store(out + row * size, y.to(out.dtype.element_ty), inside)


@triton.jit
def write_at_edges(
    x, out, size, taps, start, offset, inside, state, places, token, tokens, time, run, x_row, x_token, state_offset,
    state_sequence, state_column, WIDTH: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
    SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of a block in which a sequence begins, or the tokens end."""
    BEFORE: tl.constexpr = WIDTH - 1
    rows = load_rows_at_edges(x, token, tokens, run, offset, inside, x_row, x_token, -BEFORE, BEFORE + ROWS)
    for row in tl.static_range(ROWS):
        sequence, begin, _ = sequence_of(token + row, places, tokens, time, PACKED)
        age = token + row - begin
        place = sequence.to(tl.int64)
        columns = state_offset + place * state_sequence
        z = start
        for tap in tl.static_range(WIDTH):
            value = tap_at_edge(
                rows[row + tap], age, BEFORE - tap, state, place, columns, state_column, inside, WIDTH, HAS_STATE
            )
            z = tl.fma(taps[tap], value.to(start.dtype), z)
        y = activate(z, SILU, NARROW, NATIVE)
        tl.store(out + row * size, y.to(out.dtype.element_ty), inside & (token + row < tokens))


@kernel(
    budget=Budget(registers=255, shared_bytes=32_768), schedule=("CHANNELS", "ROWS", "LEVELS", "EDGE_ROWS", "BLOCKS")
)
@triton.jit
def conv_forward(
    x: PointerIf16.element, weight: Pointer.weight, bias: Pointer.bias, state: Pointer.element, places: Pointer.int32,
    y_0: PointerIf16.element, y_1: PointerIf16.element, y_2: PointerIf16.element, y_3: PointerIf16.element,
    tokens: Int32, time: Int32, run: Int32, aligned_run: Int32If16, tiles: Int32, first_tiles: Int32 * 4,
    begins: Int32If16 * 5, x_row: Int64If16, x_step: Int64If16, weight_channel: Int64, weight_tap: Int64,
    bias_step: Int64, state_sequence: Int64, state_channel: Int64, state_column: Int64,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, TIME_ADJACENT: tl.constexpr, PACKED: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr,
    DOUBLE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, EDGE_ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    """y of some blocks of tokens. `run` tokens are as far from each other as two of a row; see `Shape.strides`."""
    COMPUTED: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BEFORE: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0) % tiles
    stretch = tl.program_id(0) // tiles
    first, begin, end = part_of(tile, first_tiles, begins, PARTS)
    y = of_part((y_0, y_1, y_2, y_3), tile, first_tiles, PARTS)
    size = (end - begin).to(tl.int64)
    column = (tile - first) * CHANNELS + tl.arange(0, CHANNELS)
    inside = in_part(column, size, WHOLE)
    channel = (begin + column).to(tl.int64)
    offset = channel * x_step if TIME_ADJACENT else channel
    x_token = 1 if TIME_ADJACENT else x_step
    taps = load_taps(weight, channel, inside, weight_channel, weight_tap, WIDTH, COMPUTED)
    start = load_bias(bias, channel, inside, bias_step, HAS_BIAS, COMPUTED)
    for block in range(0, tl.minimum(BLOCKS, tl.cdiv(tokens, ROWS) - stretch * BLOCKS)):
        token = (stretch * BLOCKS + block) * ROWS
        _, sequence_begin, sequence_end = sequence_of(token, places, tokens, time, PACKED)
        out = y + token * size + column
        if (token - sequence_begin >= BEFORE) & (token + ROWS <= sequence_end):
            at = x + place_of(token, run, aligned_run, x_row, x_token, TIME_ADJACENT)
            write_within(
                at, out, size, taps, start, offset, inside, x_token, WIDTH, SILU, NARROW, NATIVE, TIME_ADJACENT,
                CHANNELS, ROWS, LEVELS,
            )  # fmt: skip
        else:
            for part in range(0, ROWS // EDGE_ROWS):
                later = part * EDGE_ROWS
                write_at_edges(
                    x, out + later * size, size, taps, start, offset, inside, state, places, token + later, tokens,
                    time, run, x_row, x_token, channel * state_channel, state_sequence, state_column, WIDTH, PACKED,
                    HAS_STATE, SILU, NARROW, NATIVE, EDGE_ROWS,
                )  # fmt: skip


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("CHANNELS",))
@triton.jit
def conv_final_states(
    x: Pointer.element, state: Pointer.element, cu_seqlens: Pointer.bound, final: Pointer.element, tokens: Int32,
    time: Int32, channels: Int32, tiles: Int32, bound_step: Int64, x_row: Int64, x_token: Int64, x_channel: Int64,
    state_sequence: Int64, state_channel: Int64, state_column: Int64,
    WIDTH: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """The last W − 1 tokens of a sequence, those of its initial state included."""
    sequence = tl.program_id(0) // tiles
    channel = ((tl.program_id(0) % tiles) * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    inside = channel < channels
    begin, length = bounds_of(sequence, cu_seqlens, bound_step, tokens, time, PACKED)
    run = tl.maximum(time, 1)
    for column in tl.static_range(WIDTH - 1):
        position = length - (WIDTH - 1) + column
        at = begin + position
        place = x + (at // run) * x_row + (at % run) * x_token + channel * x_channel
        value = tl.load(place, inside & (position >= 0), other=0)
        if HAS_STATE:
            before = state + sequence.to(tl.int64) * state_sequence + channel * state_channel
            before += (length + column).to(tl.int64) * state_column
            value = tl.where(position >= 0, value, tl.load(before, inside & (position < 0), other=0))
        tl.store(final + (sequence.to(tl.int64) * channels + channel) * (WIDTH - 1) + column, value, inside)


def forward(setup: Setup) -> Execute:
    """The parts of y, and the final states where they are asked for."""
    shape, schedule = Shape.of(setup.problem), setup.schedule
    part_count = len(shape.parts)
    block, rows, blocks = shape.channel_block(schedule["channels"]), schedule["rows"], schedule["blocks"]
    packed, keeps_states, warps = shape.is_packed, setup.problem.options[1], shape.warps(block, schedule["warps"])
    bound = setup.either(
        conv_forward, **shape.types, **shape.constants(setup.nvidia), PARTS=part_count, WHOLE=shape.fills(block),
        PACKED=packed, TIME_ADJACENT=shape.is_time_adjacent, CHANNELS=block, ROWS=rows, LEVELS=rows.bit_length() - 1,
        EDGE_ROWS=min(rows, schedule["edge_rows"]),
        BLOCKS=blocks, num_warps=warps,
    )  # fmt: skip
    if packed:
        places = setup.kernel(conv_places, bound=shape.bound, RAISE=True)
        setup.scratch(places=(torch.int32, PLACE_ROWS.value * shape.tokens))
    if keeps_states:
        final_states = setup.kernel(
            conv_final_states, element=shape.element, bound=shape.bound, WIDTH=shape.width, PACKED=packed,
            HAS_STATE=shape.has_state, CHANNELS=block, num_warps=warps,
        )  # fmt: skip
    shape.add_copies(setup)
    tiles, first_tiles = shape.tiles(block)
    grid = (tiles * -(-shape.tokens // (rows * blocks)),)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, weight, bias, state, cu_seqlens, *_ = arguments
        memory = setup.memory(workspace)
        x = memory.contiguous("x", x)
        *parts, final = outputs
        y = [*parts, *parts[:1] * (MAX_PARTS - part_count)]
        if packed:
            launch_places(places, cu_seqlens, memory.get("places", cu_seqlens), shape)
        row, step, run = shape.strides(x)
        strides = named_strides("state", state, "sequence", "channel", "column")
        bound[shape.is_aligned((x, *parts), (row, step), run)].launch(
            grid, x=x, weight=weight, bias=weight if bias is None else bias, state=x if state is None else state,
            places=memory.get("places", x), y_0=y[0], y_1=y[1], y_2=y[2], y_3=y[3], tokens=shape.tokens,
            time=shape.time, run=run, aligned_run=shape.aligned_run(run), tiles=tiles, first_tiles=first_tiles,
            begins=shape.begins, x_row=row, x_step=step, bias_step=0 if bias is None else bias.stride(0),
            **named_strides("weight", weight, "channel", "tap"), **strides,
        )  # fmt: skip
        if keeps_states and final.numel():
            x_row, x_token, x_channel = x.stride()
            tiles_of_row = -(-shape.channels // block)
            final_states.launch(
                (shape.sequences * tiles_of_row,), x=x, state=x if state is None else state,
                cu_seqlens=cu_seqlens if packed else final, final=final, tokens=shape.tokens, time=shape.time,
                channels=shape.channels, tiles=tiles_of_row, bound_step=cu_seqlens.stride(0) if packed else 0,
                x_row=x_row, x_token=x_token, x_channel=x_channel, **strides,
            )  # fmt: skip
        if packed and setup.device.type == "cpu":
            check()

    return execute
