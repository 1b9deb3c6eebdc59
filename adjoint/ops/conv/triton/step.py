"""Steps of decoding: a program takes a tile of channels of some rows through their tokens, and writes the states after.

The arithmetic of a token is that of `forward.py`, operation by operation.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, report, status_word
from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.device.faults import record
from adjoint.device.sequences import out_of_range, repeated
from adjoint.ops.conv.arguments import STATE_INDEX_OUT_OF_RANGE, STATE_INDEX_REPEATED
from adjoint.ops.conv.shape import Shape, named_strides
from adjoint.ops.conv.triton.rows import activate, convolve, load_bias, load_rows, load_taps


@triton.jit
def side_by_side(columns, ROWS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr):
    """Tiles along a last axis of 2^LEVELS; what it has more than those repeats the first."""
    for _ in tl.static_range(2**LEVELS - len(columns)):
        columns = columns + (columns[0],)
    for level in tl.static_range(LEVELS):
        joined = ()
        for number in tl.static_range(2 ** (LEVELS - 1 - level)):
            joined = joined + (tl.join(columns[number], columns[number + 2 ** (LEVELS - 1 - level)]),)
        columns = joined
    return tl.reshape(columns[0], (ROWS, CHANNELS, 2**LEVELS))


@triton.jit
def load_words(at, inside, COUNT: tl.constexpr):
    """2·COUNT adjacent numbers of a 16-bit type, by words of two."""
    KIND: tl.constexpr = at.dtype.element_ty
    words = at.to(tl.pointer_type(tl.int32), bitcast=True)
    numbers = ()
    for place in tl.static_range(COUNT):
        word = tl.load(words + place, inside, other=0)
        low = word.to(tl.int16).to(KIND, bitcast=True)
        high = (word >> 16).to(tl.int16).to(KIND, bitcast=True)
        numbers = numbers + (low, high)
    return numbers


@triton.jit
def store_words(at, numbers, inside, COUNT: tl.constexpr):
    """2·COUNT numbers of a 16-bit type beside each other, by words of two."""
    words = at.to(tl.pointer_type(tl.int32), bitcast=True)
    for place in tl.static_range(COUNT):
        low = numbers[2 * place].to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = numbers[2 * place + 1].to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(words + place, low | high, inside)


@triton.jit
def widened(numbers, FIRST: tl.constexpr, COUNT: tl.constexpr, COMPUTED: tl.constexpr):
    """COUNT of some numbers in the type of the sums."""
    wide = ()
    for place in tl.static_range(COUNT):
        wide = wide + (numbers[FIRST + place].to(COMPUTED),)
    return wide


@triton.jit
def step_pairs(
    x, state, y, taps, other_taps, start, other_start, live, inside, is_live, time, x_token,
    y_token, WIDTH: tl.constexpr, SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """What `conv_step` does for pairs of channels, whose numbers lie in words; the arithmetic is the same."""
    KIND: tl.constexpr = y.dtype.element_ty
    BEFORE: tl.constexpr = WIDTH - 1
    both = load_words(state, live, BEFORE)
    window = both[:BEFORE]
    other_window = both[BEFORE:]
    for t in range(0, time):
        value, other_value = load_words(x + t * x_token, live, 1)
        rows = window + (value,)
        other_rows = other_window + (other_value,)
        result = activate(convolve(rows, taps, start, 0, WIDTH), SILU, NARROW, NATIVE)
        other_result = activate(convolve(other_rows, other_taps, other_start, 0, WIDTH), SILU, NARROW, NATIVE)
        result = tl.where(is_live, result, 0.0).to(KIND)
        other_result = tl.where(is_live, other_result, 0.0).to(KIND)
        store_words(y + t * y_token, (result, other_result), inside, 1)
        window = rows[1:]
        other_window = other_rows[1:]
    return window + other_window


@kernel(budget=Budget(registers=168, shared_bytes=32_768), schedule=("CHANNELS", "ROWS"))
@triton.jit
def conv_step(
    x: PointerIf16.element, weight: Pointer.weight, bias: Pointer.bias, state: Pointer.element, indices: Pointer.index,
    y: PointerIf16.element, new_state: PointerIf16.element, status_word: Pointer.int64, fault: Int32, batch: Int32,
    time: Int32, channels: Int32If16, tiles: Int32, states: Int64, x_row: Int64If16, x_token: Int64If16,
    x_channel: Int64, weight_channel: Int64, weight_tap: Int64, bias_step: Int64, state_sequence: Int64,
    state_channel: Int64, state_column: Int64, index_step: Int64,
    WIDTH: tl.constexpr, INDEXED: tl.constexpr, IN_PLACE: tl.constexpr, ADJACENT: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, DOUBLE: tl.constexpr, CHANNELS: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """y of some rows' tokens, and their states after them, in their own places or in the rows'. ADJACENT: x_channel is
    1. The columns of a state, 2^LEVELS at most, lie side by side, and are written so: a column alone would touch all of
    the memory that its neighbours do.

    WORDS, a thread has pairs of channels of a 16-bit type, whose tokens, taps and states are words: x_channel and the
    columns' and taps' strides are 1, channels and all other strides even, and every address a multiple of 4 bytes."""
    COMPUTED: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BEFORE: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    STEP: tl.constexpr = 2 if WORDS else 1
    channel = (tile * CHANNELS + tl.arange(0, CHANNELS // STEP)[None, :] * STEP).to(tl.int64)
    inside = (row < batch) & (channel < channels)
    if ADJACENT:
        x_channel = 1
    place = row
    if INDEXED:
        index = tl.load(indices + row * index_step, row < batch, other=-1).to(tl.int64)
        wrong = (index < -1) | (index >= states)
        record(status_word, fault, row, index, wrong & (tile == 0))
        place = tl.where(wrong, -1, index)
    live = inside & (place >= 0)
    at = place * state_sequence + channel * state_channel
    if WORDS:
        in_tile = channel < channels
        pairs = load_words(weight + channel * WIDTH, in_tile, WIDTH)
        start = load_bias(bias, channel, in_tile, bias_step, HAS_BIAS, COMPUTED)
        other_start = load_bias(bias, channel + 1, in_tile, bias_step, HAS_BIAS, COMPUTED)
        after = step_pairs(
            x + row * x_row + channel, state + at, y + row * time * channels + channel,
            widened(pairs, 0, WIDTH, COMPUTED), widened(pairs, WIDTH, WIDTH, COMPUTED), start, other_start, live,
            inside, place >= 0, time, x_token, channels, WIDTH, SILU, NARROW, NATIVE,
        )  # fmt: skip
        if IN_PLACE:
            store_words(state + at, after, live, BEFORE)
        else:
            store_words(new_state + (row * channels + channel) * BEFORE, after, inside, BEFORE)
    else:
        window = load_rows(state, at, live, state_column, 0, BEFORE)
        taps = load_taps(weight, channel, channel < channels, weight_channel, weight_tap, WIDTH, COMPUTED)
        start = load_bias(bias, channel, channel < channels, bias_step, HAS_BIAS, COMPUTED)
        for t in range(0, time):
            value = tl.load(x + row * x_row + t * x_token + channel * x_channel, live, other=0)
            rows = window + (value,)
            result = activate(convolve(rows, taps, start, 0, WIDTH), SILU, NARROW, NATIVE)
            result = tl.where(place >= 0, result, 0.0)
            tl.store(y + (row * time + t) * channels + channel, result.to(y.dtype.element_ty), inside)
            window = rows[1:]
        if BEFORE > 0:
            column = tl.arange(0, 2**LEVELS)[None, None, :]
            out = new_state + (row * channels + channel) * BEFORE
            if IN_PLACE:
                out, inside = state + at, live
            out = out[:, :, None] + column * (state_column if IN_PLACE else 1)
            tl.store(out, side_by_side(window, ROWS, CHANNELS, LEVELS), inside[:, :, None] & (column < BEFORE))


def _in_words(width: int, weight: Tensor, state: Tensor) -> bool:
    """Whether the taps, and the states, of two channels lie beside each other, at a multiple of 4 bytes."""
    columns = width - 1
    is_dense = weight.stride() == (width, 1) and (columns == 0 or state.stride()[1:] == (columns, 1))
    return is_dense and state.stride(0) % 2 == 0 and weight.data_ptr() % 4 == 0 and state.data_ptr() % 4 == 0


def step(setup: Setup) -> Execute:
    """y, and the rows' new states or, in place, the pool's own."""
    shape, schedule, device = Shape.of(setup.problem), setup.schedule, setup.device
    block, in_place = shape.channel_block(schedule["channels"]), setup.problem.op.endswith("in_place")
    constants = {name: value for name, value in shape.constants(setup.nvidia).items() if name != "HAS_STATE"}
    indexed = shape.is_indexed
    rows = schedule["rows"]
    adjacent = not shape.is_time_adjacent and "x" not in shape.copied
    settings: dict[str, Any] = {
        **shape.types, **constants, "index": shape.index, "INDEXED": indexed, "IN_PLACE": in_place,
        "ADJACENT": adjacent, "CHANNELS": block, "ROWS": rows, "LEVELS": max(0, shape.width - 2).bit_length(),
    }  # fmt: skip
    warps = shape.warps(block * rows, schedule["warps"])
    bound = setup.either(conv_step, **settings, WORDS=False, num_warps=warps)
    # Two channels a word, which takes half the instructions; whether the tensors lie so is seen in a run.
    may_pair = adjacent and block > 1 and shape.element.itemsize == 2 and shape.weight == shape.element
    if may_pair:
        by_words = setup.kernel(conv_step, aligned=True, **settings, WORDS=True, num_warps=warps)
    tiles = -(-shape.channels // block)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, weight, bias, state, indices, _silu, checking = arguments
        y = outputs[0]
        if checking and indices is not None:
            report(STATE_INDEX_REPEATED, indices, repeated(indices))
        if y.numel() == 0 and indices is not None:
            report(STATE_INDEX_OUT_OF_RANGE, indices, out_of_range(indices, len(state)))
        x_row, x_token, x_channel = x.stride()
        aligned = is_aligned(x, y, outputs[-1]) and not any(n % 16 for n in (x_row, x_token, shape.channels))
        pairs = may_pair and aligned and _in_words(shape.width, weight, state)
        (by_words if pairs else bound[aligned]).launch(
            (-(-shape.batch // rows) * tiles,), x=x, weight=weight, bias=weight if bias is None else bias, state=state,
            indices=indices if indexed else x, y=y, new_state=y if in_place else outputs[1],
            status_word=status_word(device), fault=STATE_INDEX_OUT_OF_RANGE.row, batch=shape.batch,
            time=shape.time, channels=shape.channels, tiles=tiles, states=shape.sequences, x_row=x_row, x_token=x_token,
            x_channel=x_channel, bias_step=0 if bias is None else bias.stride(0),
            index_step=indices.stride(0) if indexed else 0, **named_strides("weight", weight, "channel", "tap"),
            **named_strides("state", state, "sequence", "channel", "column"),
        )  # fmt: skip
        if indexed and device.type == "cpu":
            check()

    return execute
