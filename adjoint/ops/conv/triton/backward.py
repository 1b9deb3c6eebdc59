"""The gradients: dx and a stretch's share of dweight and dbias in one pass over x and dy, then small sums.

    dz_t = dy_t·act'(z_t)        dx_s = Σ_k weight[:, W−1−k]·dz_{s+k}
    dbias = Σ_t dz_t             dweight_j = Σ_t dz_t·x_{t−W+1+j}

z is computed again from x. A program has a tile of channels and a stretch of tokens, whose length follows from the
number of all tokens. It goes through each sequence in the stretch, ROWS tokens at a time, with x and dz of the last
W − 1 tokens in registers: every number is loaded once, and every exponential computed once, but for the W − 1 tokens
before and after the stretch. Of a sequence's last tokens, few are computed at a time, with a question for each whether
it is there.

dweight and dbias have one order for each number of tokens: a stretch adds its tokens one after the other, and
`conv_add_stretches` adds the stretches, 2^RUN_LEVELS of them by halves, and such runs one after the other.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import (
    Budget,
    Int32,
    Int32If16,
    Int32x16,
    Int64,
    Int64If16,
    Pointer,
    Pointer16,
    PointerIf16,
    kernel,
)
from adjoint.core.launch import Execute, Setup
from adjoint.device.row_tiles import halves
from adjoint.ops.conv.arguments import MAX_PARTS, NEED_BIAS, NEED_STATE, NEED_WEIGHT, NEED_X
from adjoint.ops.conv.plans import LONGEST_STRETCH, MOST_STRETCHES, RUN_LEVELS, stretch_of
from adjoint.ops.conv.shape import Shape, named_strides
from adjoint.ops.conv.triton.rows import (
    PLACE_ROWS,
    bounds_of,
    conv_places,
    convolve,
    in_part,
    last_of,
    launch_places,
    load_bias,
    load_rows,
    load_taps,
    load_tokens,
    load_window,
    of_part,
    part_of,
    place_of,
    pool_place,
    sequence_of,
    through_activation,
    zeros,
)
from adjoint.ops.gated_delta.step.kernels import gated_delta_step_backward_places

POOL_BLOCK = 1024
"""Numbers of a state that a program adds up over the rows that read it."""


@triton.jit
def add_token(sums, dz, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, NEED_WEIGHT: tl.constexpr,
              NEED_BIAS: tl.constexpr):  # fmt: skip
    """The sums of a stretch and one more token: those of the taps first, that of the bias last."""
    added = ()
    if NEED_WEIGHT:
        for tap in tl.static_range(WIDTH):
            added = added + (tl.fma(dz, rows[FIRST + tap].to(dz.dtype), sums[tap]),)
    if NEED_BIAS:
        added = added + (sums[len(sums) - 1] + dz,)
    return added


@triton.jit
def add_if(condition, sums, added):
    """The added sums under a condition, or those before."""
    chosen = ()
    for number in tl.static_range(len(sums)):
        chosen = chosen + (tl.where(condition, added[number], sums[number]),)
    return chosen


@triton.jit
def correlate(slopes, taps, total, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """total + Σ_k weight[:, W−1−k]·dz_{s+k}, over the slopes from FIRST on."""
    for k in tl.static_range(WIDTH):
        total = tl.fma(taps[WIDTH - 1 - k], slopes[FIRST + k], total)
    return total


@triton.jit
def differentiate_block(
    window, slopes, sums, rows, upstream, out, channels, taps, start, in_dy, inside, earlier, WIDTH: tl.constexpr,
    EVERY_DY: tl.constexpr, NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr,
    SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dz of ROWS tokens, the sums with them, and dx of as many tokens, which end W − 1 before those.

    `window` and `slopes` are x and dz of the W − 1 tokens before the block; those of its last ones are returned. Of the
    sequence, `earlier` tokens of the stretch lie before the block.
    """
    BEFORE: tl.constexpr = WIDTH - 1
    for row in tl.static_range(ROWS):
        window = window + (rows[row].to(start.dtype),)
        gradient = through_activation(upstream[row], convolve(window, taps, start, row, WIDTH), SILU, NARROW, NATIVE)
        if not EVERY_DY:
            gradient = tl.where(in_dy, gradient, 0.0)
        slopes = slopes + (gradient,)
        sums = add_token(sums, gradient, window, row, WIDTH, NEED_WEIGHT, NEED_BIAS)
        if NEED_X:
            total = correlate(slopes, taps, tl.zeros(start.shape, start.dtype), row, WIDTH)
            is_own = inside
            if row < BEFORE:
                is_own = inside & (earlier + row >= BEFORE)
            tl.store(out + (row - BEFORE) * channels.to(tl.int64), total.to(out.dtype.element_ty), is_own)
    return last_of(window, ROWS, BEFORE), last_of(slopes, ROWS, BEFORE), sums


@triton.jit
def differentiate_rest(
    window, slopes, sums, at, dy_at, out, channels, taps, start, offset, column, in_dy, inside, x_token, dy_token,
    dfinal, dfinal_column, token, begin, stop, end, WIDTH: tl.constexpr, HAS_DFINAL: tl.constexpr, NEED_X: tl.constexpr,
    NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr, SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The same of ROWS tokens from `token` on, where the sequence may end at `end`, and this part of it at `stop`: the
    sums have tokens before `stop`, and dx is written from `begin` to `stop`."""
    BEFORE: tl.constexpr = WIDTH - 1
    rows = ()
    upstream = ()
    for row in tl.static_range(ROWS):
        exists = token + row < end
        rows = rows + (tl.load(at + row * x_token + offset, inside & exists, other=0),)
        upstream = upstream + (tl.load(dy_at + row * dy_token + column, in_dy & exists, other=0),)
    for row in tl.static_range(ROWS):
        window = window + (rows[row].to(start.dtype),)
        gradient = through_activation(upstream[row], convolve(window, taps, start, row, WIDTH), SILU, NARROW, NATIVE)
        gradient = tl.where(in_dy & (token + row < end), gradient, 0.0)
        slopes = slopes + (gradient,)
        added = add_token(sums, gradient, window, row, WIDTH, NEED_WEIGHT, NEED_BIAS)
        sums = add_if(token + row < stop, sums, added)
        if NEED_X:
            total = tl.zeros(start.shape, start.dtype)
            own = token + row - BEFORE
            if HAS_DFINAL:  # of the last W − 1 tokens of a sequence
                final = own - end + BEFORE
                is_kept = (final >= 0) & (final < BEFORE) & (own >= begin)
                total = tl.load(dfinal + final.to(tl.int64) * dfinal_column, inside & is_kept, other=0).to(start.dtype)
            total = correlate(slopes, taps, total, row, WIDTH)
            is_own = inside & (own >= begin) & (own < stop)
            tl.store(out + (row - BEFORE) * channels.to(tl.int64), total.to(out.dtype.element_ty), is_own)
    return last_of(window, ROWS, BEFORE), last_of(slopes, ROWS, BEFORE), sums


@kernel(
    budget=Budget(registers=255, shared_bytes=131_072), schedule=("CHANNELS", "ROWS", "LEVELS", "REST_ROWS", "STAGES")
)
@triton.jit
def conv_backward(
    x: PointerIf16.element, weight: Pointer.weight, bias: Pointer.bias, state: Pointer.element, indices: Pointer.index,
    places: Pointer.int32, dy_0: PointerIf16.element, dy_1: PointerIf16.element, dy_2: PointerIf16.element,
    dy_3: PointerIf16.element, dfinal: Pointer.element, dx: PointerIf16.element, shares: Pointer16.computed,
    tokens: Int32, time: Int32, run: Int32, aligned_run: Int32If16, stretch: Int32x16, channels: Int32If16,
    tiles: Int32, states: Int64, first_tiles: Int32 * 4, begins: Int32If16 * 5, x_row: Int64If16, x_step: Int64If16,
    dy_runs: Int32 * 4, dy_rows: Int64If16 * 4, dy_tokens: Int64If16 * 4, weight_channel: Int64, weight_tap: Int64,
    bias_step: Int64, state_sequence: Int64, state_channel: Int64, state_column: Int64, dfinal_sequence: Int64,
    dfinal_channel: Int64, dfinal_column: Int64, index_step: Int64,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, WHOLE: tl.constexpr, TIME_ADJACENT: tl.constexpr, PACKED: tl.constexpr,
    INDEXED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_DFINAL: tl.constexpr,
    HAS_DY_0: tl.constexpr, HAS_DY_1: tl.constexpr, HAS_DY_2: tl.constexpr, HAS_DY_3: tl.constexpr,
    NEED_X: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr, SILU: tl.constexpr, NARROW: tl.constexpr,
    NATIVE: tl.constexpr, DOUBLE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    REST_ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx of a stretch, and its share of dweight and dbias. HAS_DY_n: whether part n has a gradient."""
    COMPUTED: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BEFORE: tl.constexpr = WIDTH - 1
    AFTER: tl.constexpr = BEFORE if NEED_X else 0
    EVERY_DY: tl.constexpr = HAS_DY_0 and HAS_DY_1 and HAS_DY_2 and HAS_DY_3
    SUMS: tl.constexpr = (WIDTH if NEED_WEIGHT else 0) + (1 if NEED_BIAS else 0)
    tile = tl.program_id(0) % tiles
    number = tl.program_id(0) // tiles
    first, begin, end = part_of(tile, first_tiles, begins, PARTS)
    dy = of_part((dy_0, dy_1, dy_2, dy_3), tile, first_tiles, PARTS)
    dy_run = of_part(dy_runs, tile, first_tiles, PARTS)
    dy_row = of_part(dy_rows, tile, first_tiles, PARTS)
    dy_token = of_part(dy_tokens, tile, first_tiles, PARTS)
    column = (tile - first) * CHANNELS + tl.arange(0, CHANNELS)
    inside = in_part(column, end - begin, WHOLE)
    in_dy = inside
    if not EVERY_DY:
        in_dy = inside & of_part((HAS_DY_0, HAS_DY_1, HAS_DY_2, HAS_DY_3), tile, first_tiles, PARTS)
    channel = (begin + column).to(tl.int64)
    offset = channel * x_step if TIME_ADJACENT else channel
    x_token = 1 if TIME_ADJACENT else x_step
    taps = load_taps(weight, channel, inside, weight_channel, weight_tap, WIDTH, COMPUTED)
    start = load_bias(bias, channel, inside, bias_step, HAS_BIAS, COMPUTED)
    sums = zeros(SUMS, CHANNELS, COMPUTED)
    token = number * stretch
    last = tl.minimum(token + stretch, tokens)
    while token < last:  # for each sequence that has tokens in the stretch
        sequence, sequence_begin, sequence_end = sequence_of(token, places, tokens, time, PACKED)
        place = pool_place(sequence, indices, index_step, states, INDEXED)
        stop = tl.maximum(tl.minimum(sequence_end, last), token + 1)  # whatever the bounds are, there is an end
        if TIME_ADJACENT:  # blocks begin at multiples of ROWS
            stop = tl.where(token % ROWS == 0, stop, tl.minimum(stop, tl.cdiv(token, ROWS) * ROWS))
            blocks = tl.where(token % ROWS == 0, (stop - token) // ROWS, 0)
        else:
            blocks = (stop - token) // ROWS
        if INDEXED:  # a row that is skipped has no tokens
            blocks = tl.where(place >= 0, blocks, 0)
            sequence_end = tl.where(place >= 0, sequence_end, token)
        at = x + place_of(token, run, run, x_row, x_token, TIME_ADJACENT)
        dy_at = dy + place_of(token, dy_run, dy_run, dy_row, dy_token, False)
        out = dx + token.to(tl.int64) * channels + channel
        window = load_window(
            at, offset, inside & (place >= 0), x_token, state + place * state_sequence + channel * state_channel,
            state_column, token - sequence_begin, WIDTH, HAS_STATE, COMPUTED,
        )  # fmt: skip
        slopes = zeros(BEFORE, CHANNELS, COMPUTED)
        for block in tl.range(0, blocks, num_stages=STAGES):
            if TIME_ADJACENT:
                block_token = tl.multiple_of(token + block * ROWS, ROWS)
                block_at = x + place_of(block_token, run, aligned_run, x_row, x_token, TIME_ADJACENT)
            else:
                block_at = at + block * ROWS * x_token
            rows = load_tokens(block_at, offset, inside, x_token, 0, ROWS, LEVELS, TIME_ADJACENT, CHANNELS)
            upstream = load_rows(dy_at + block * ROWS * dy_token, column, in_dy, dy_token, 0, ROWS)
            window, slopes, sums = differentiate_block(
                window, slopes, sums, rows, upstream, out + block * ROWS * channels.to(tl.int64), channels, taps, start,
                in_dy, inside, block * ROWS, WIDTH, EVERY_DY, NEED_X, NEED_WEIGHT, NEED_BIAS, SILU, NARROW, NATIVE,
                ROWS,
            )  # fmt: skip
        finals = dfinal + sequence.to(tl.int64) * dfinal_sequence + channel * dfinal_channel
        for rest in range(blocks * ROWS, stop - token + AFTER, REST_ROWS):
            window, slopes, sums = differentiate_rest(
                window, slopes, sums, at + rest * x_token, dy_at + rest * dy_token,
                out + rest * channels.to(tl.int64), channels, taps, start, offset, column, in_dy, inside, x_token,
                dy_token, finals, dfinal_column, token + rest, token, stop, sequence_end, WIDTH, HAS_DFINAL, NEED_X,
                NEED_WEIGHT, NEED_BIAS, SILU, NARROW, NATIVE, REST_ROWS,
            )  # fmt: skip
        token = stop
    for share in tl.static_range(SUMS):
        at = (number.to(tl.int64) * SUMS + share) * channels + channel
        tl.store(shares + at, sums[share], inside)


@kernel(budget=Budget(registers=128, shared_bytes=16_384), numeric=("RUN_LEVELS",), schedule=("COLUMNS",))
@triton.jit
def conv_add_stretches(
    shares: Pointer16.computed, dweight: Pointer.weight, dbias: Pointer.bias, stretches: Int32, channels: Int32,
    WIDTH: tl.constexpr, NEED_WEIGHT: tl.constexpr, NEED_BIAS: tl.constexpr, RUN_LEVELS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """dweight and dbias of some columns: runs of 2^RUN_LEVELS stretches by halves, one run after the other."""
    TAPS: tl.constexpr = WIDTH if NEED_WEIGHT else 0
    SUMS: tl.constexpr = TAPS + (1 if NEED_BIAS else 0)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    count = channels.to(tl.int64) * SUMS
    total = tl.zeros([1, COLUMNS], shares.dtype.element_ty)
    for first in range(0, stretches, 2**RUN_LEVELS):
        number = first + tl.arange(0, 2**RUN_LEVELS)[:, None]
        at = number.to(tl.int64) * count + column[None, :]
        terms = tl.load(shares + at, (number < stretches) & (column < count)[None, :], other=0)
        total += halves(terms, 1, RUN_LEVELS, COLUMNS)
    total = tl.reshape(total, (COLUMNS,))
    tap = column // channels
    channel = column % channels
    if NEED_WEIGHT:
        tl.store(dweight + channel * WIDTH + tap, total.to(dweight.dtype.element_ty), tap < WIDTH)
    if NEED_BIAS:
        tl.store(dbias + channel, total.to(dbias.dtype.element_ty), tap == TAPS)


@kernel(budget=Budget(registers=255, shared_bytes=16_384), schedule=("CHANNELS",))
@triton.jit
def conv_backward_states(
    x: Pointer.element, weight: Pointer.weight, bias: Pointer.bias, state: Pointer.element, indices: Pointer.index,
    cu_seqlens: Pointer.bound, dy_0: Pointer.element, dy_1: Pointer.element, dy_2: Pointer.element,
    dy_3: Pointer.element, dfinal: Pointer.element, dstate: Pointer.dstate, tokens: Int32, time: Int32, run: Int32,
    channels: Int32, tiles: Int32, states: Int64, bound_step: Int64, first_tiles: Int32 * 4, begins: Int32 * 5,
    x_row: Int64, x_token: Int64, x_channel: Int64, dy_runs: Int32 * 4, dy_rows: Int64 * 4, dy_tokens: Int64 * 4,
    weight_channel: Int64, weight_tap: Int64, bias_step: Int64, state_sequence: Int64, state_channel: Int64,
    state_column: Int64, dfinal_sequence: Int64, dfinal_channel: Int64, dfinal_column: Int64, index_step: Int64,
    WIDTH: tl.constexpr, PARTS: tl.constexpr, PACKED: tl.constexpr, INDEXED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_DFINAL: tl.constexpr, HAS_DY_0: tl.constexpr, HAS_DY_1: tl.constexpr, HAS_DY_2: tl.constexpr,
    HAS_DY_3: tl.constexpr, SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, DOUBLE: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """The gradient of a sequence's initial state: its first W − 1 tokens reach back to it, and a final state may."""
    COMPUTED: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BEFORE: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0) % tiles
    sequence = tl.program_id(0) // tiles
    first, begin, end = part_of(tile, first_tiles, begins, PARTS)
    dy = of_part((dy_0, dy_1, dy_2, dy_3), tile, first_tiles, PARTS)
    dy_run = of_part(dy_runs, tile, first_tiles, PARTS)
    dy_row = of_part(dy_rows, tile, first_tiles, PARTS)
    dy_token = of_part(dy_tokens, tile, first_tiles, PARTS)
    column = (tile - first) * CHANNELS + tl.arange(0, CHANNELS)
    inside = column < end - begin
    in_dy = inside & of_part((HAS_DY_0, HAS_DY_1, HAS_DY_2, HAS_DY_3), tile, first_tiles, PARTS)
    channel = (begin + column).to(tl.int64)
    token, length = bounds_of(sequence, cu_seqlens, bound_step, tokens, time, PACKED)
    place = pool_place(sequence, indices, index_step, states, INDEXED)
    length = tl.where(place >= 0, length, 0)
    taps = load_taps(weight, channel, inside, weight_channel, weight_tap, WIDTH, COMPUTED)
    start = load_bias(bias, channel, inside, bias_step, HAS_BIAS, COMPUTED)
    values = load_rows(
        state, place * state_sequence + channel * state_channel, inside & (place >= 0), state_column, 0, BEFORE
    )
    dz = ()
    for row in tl.static_range(BEFORE):
        at = token + row
        lies = (at // run).to(tl.int64) * x_row + (at % run).to(tl.int64) * x_token
        values = values + (tl.load(x + lies + channel * x_channel, inside & (row < length), other=0),)
        dy_lies = (at // dy_run).to(tl.int64) * dy_row + (at % dy_run).to(tl.int64) * dy_token
        upstream = tl.load(dy + dy_lies + column, in_dy & (row < length), other=0)
        z = convolve(values, taps, start, row, WIDTH)
        gradient = through_activation(upstream, z, SILU, NARROW, NATIVE)
        dz = dz + (tl.where(in_dy & (row < length), gradient, 0.0),)
    for back in tl.static_range(BEFORE):
        total = tl.zeros([CHANNELS], COMPUTED)
        if HAS_DFINAL:
            is_kept = (back >= length) & (place >= 0)
            at = dfinal + sequence.to(tl.int64) * dfinal_sequence + channel * dfinal_channel
            at += (back - length).to(tl.int64) * dfinal_column
            total = tl.load(at, inside & is_kept, other=0).to(COMPUTED)
        for row in tl.static_range(back + 1):
            total = tl.where(row < length, tl.fma(taps[back - row], dz[row], total), total)
        at = (sequence.to(tl.int64) * channels + channel) * BEFORE + back
        tl.store(dstate + at, total.to(dstate.dtype.element_ty), inside)


def backward(setup: Setup) -> Execute:
    """The gradients that are needed, of x, weight, bias and the initial states, or the pool's."""
    shape, schedule, need = Shape.of(setup.problem), setup.schedule, setup.problem.options[-1]
    part_count = len(shape.parts)
    block, rows = shape.channel_block(schedule["channels"]), schedule["rows"]
    indexed, packed = shape.is_indexed, shape.is_packed
    need_x, need_weight, need_bias = bool(need & NEED_X), bool(need & NEED_WEIGHT), bool(need & NEED_BIAS)
    need_state = bool(need & NEED_STATE) and shape.width > 1
    names = shape.part_names("dy")
    facts = shape.constants(setup.nvidia) | {
        "PARTS": part_count, "PACKED": packed, "INDEXED": indexed, "HAS_DFINAL": shape.has_final_gradient,
        **{f"HAS_DY_{n}": n >= part_count or names[n] not in shape.absent for n in range(MAX_PARTS)},
    }  # fmt: skip
    stretch, warps = stretch_of(shape.tokens), shape.warps(block, schedule["warps"])
    stretches, sums = -(-shape.tokens // stretch), shape.width * need_weight + need_bias
    types = {**shape.types, "index": shape.index, "computed": shape.computed}
    bound = setup.either(
        conv_backward, **types, **facts, WHOLE=shape.fills(block), TIME_ADJACENT=shape.is_time_adjacent, NEED_X=need_x,
        NEED_WEIGHT=need_weight, NEED_BIAS=need_bias, CHANNELS=block, ROWS=rows, LEVELS=rows.bit_length() - 1,
        REST_ROWS=schedule["rest_rows"], STAGES=schedule["stages"], num_warps=warps,
    )  # fmt: skip
    setup.add_numeric(most_stretches=MOST_STRETCHES, longest_stretch=LONGEST_STRETCH)
    if sums:
        columns = schedule["columns"]
        add_stretches = setup.kernel(
            conv_add_stretches, weight=shape.weight, bias=shape.bias, computed=shape.computed, WIDTH=shape.width,
            NEED_WEIGHT=need_weight, NEED_BIAS=need_bias, RUN_LEVELS=RUN_LEVELS, COLUMNS=columns, num_warps=8,
        )  # fmt: skip
        setup.scratch(shares=(shape.computed, stretches * sums * shape.channels))
    if packed:
        places = setup.kernel(conv_places, bound=shape.bound, RAISE=False)
        setup.scratch(places=(torch.int32, PLACE_ROWS.value * shape.tokens))
    if need_state:
        states_kernel = setup.kernel(
            conv_backward_states, **shape.types, **{x: value for x, value in facts.items() if x != "HAS_STATE"},
            index=shape.index, bound=shape.bound, dstate=shape.computed if indexed else shape.element, CHANNELS=block,
            num_warps=warps,
        )  # fmt: skip
        if indexed:
            pool = setup.kernel(
                gated_delta_step_backward_places, index=shape.index, computed=shape.computed, state=shape.element,
                BLOCK=POOL_BLOCK, DOUBLE=shape.computed == torch.float64,
            )  # fmt: skip
            setup.scratch(drows=(shape.computed, shape.batch * shape.channels * (shape.width - 1)))
    shape.add_copies(setup)
    tiles, first_tiles = shape.tiles(block)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        *upstream, dfinal, x, weight, bias, state, numbers = arguments[: part_count + 6]
        dx, dweight, dbias, dstate = outputs
        if not shape.tokens or not shape.channels:
            _without_tokens(outputs, dfinal, numbers if indexed else None, shape)
            return
        memory = setup.memory(workspace)
        x = memory.contiguous("x", x)
        dys = [x if dy is None else memory.contiguous(name, dy) for name, dy in zip(names, upstream, strict=True)]
        lies = [shape.upstream_strides(dy) for dy in dys]
        spare = MAX_PARTS - part_count
        dy_rows, dy_steps, dy_runs = ((*values, *values[:1] * spare) for values in zip(*lies, strict=True))
        dy = [*dys, *dys[:1] * spare]
        common: dict[str, Any] = {
            "weight": weight, "bias": weight if bias is None else bias, "state": x if state is None else state,
            "dfinal": x if dfinal is None else dfinal, "dy_0": dy[0], "dy_1": dy[1], "dy_2": dy[2], "dy_3": dy[3],
            "tokens": shape.tokens, "time": shape.time, "tiles": tiles, "first_tiles": first_tiles,
            "begins": shape.begins, "states": shape.sequences, "dy_runs": dy_runs, "dy_rows": dy_rows,
            "dy_tokens": dy_steps, "indices": numbers if indexed else x,
            "index_step": numbers.stride(0) if indexed else 0, "bias_step": 0 if bias is None else bias.stride(0),
            **named_strides("weight", weight, "channel", "tap"),
            **named_strides("state", state, "sequence", "channel", "column"),
            **named_strides("dfinal", dfinal, "sequence", "channel", "column"),
        }  # fmt: skip
        row, step, run = shape.strides(x)
        if packed:
            launch_places(places, numbers, memory["places"], shape)
        if need_x or sums:
            aligned = shape.is_aligned((x, *dys, dx), (row, step, *dy_rows, *dy_steps, shape.channels), run)
            bound[aligned].launch(
                (tiles * stretches,), x=x, places=memory["places"] if packed else x, dx=dx if need_x else x,
                shares=memory["shares"] if sums else dx, run=run, aligned_run=shape.aligned_run(run), stretch=stretch,
                channels=shape.channels, x_row=row, x_step=step, **common,
            )  # fmt: skip
        if sums:
            add_stretches.launch(
                (-(-shape.channels * sums // columns),), shares=memory["shares"],
                dweight=dweight if need_weight else dx, dbias=dbias if need_bias else dx, stretches=stretches,
                channels=shape.channels,
            )  # fmt: skip
        if need_state:
            x_row, x_token, x_channel = x.stride()
            states_kernel.launch(
                (tiles * (shape.batch if indexed else shape.sequences),), x=x,
                cu_seqlens=numbers if packed else x, bound_step=numbers.stride(0) if packed else 0,
                dstate=memory["drows"] if indexed else dstate, run=shape.time, channels=shape.channels, x_row=x_row,
                x_token=x_token, x_channel=x_channel, **common,
            )  # fmt: skip
            if indexed:
                size = shape.channels * (shape.width - 1)
                programs = -(-size // POOL_BLOCK)
                pool.launch(
                    (shape.sequences * programs,), indices=numbers, drows=memory["drows"], dpool=dstate,
                    rows=shape.batch, index_step=numbers.stride(0), size=size, tiles=programs,
                )  # fmt: skip

    return execute


def _without_tokens(outputs: tuple[Tensor, ...], dfinal: Tensor | None, indices: Tensor | None, shape: Shape) -> None:
    """The gradients of a problem without a number to convolve: a final state is its initial state."""
    for gradient in outputs:
        gradient.zero_()
    dstate = outputs[3]
    if dstate.numel() and dfinal is not None and indices is None:
        dstate.copy_(dfinal)
