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
from adjoint.ops.conv.triton.rows import activate, convolve, load_bias, load_rows, load_taps, unstack


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
def as_words(at):
    """An address of numbers of a 16-bit type as one of words of two."""
    return at.to(tl.pointer_type(tl.int32), bitcast=True)


@triton.jit
def numbers_of(words, COUNT: tl.constexpr, KIND: tl.constexpr):
    """The 2·COUNT numbers of a 16-bit type in COUNT words, the one in a word's lower half first."""
    numbers = ()
    for place in tl.static_range(COUNT):
        low = words[place].to(tl.int16).to(KIND, bitcast=True)
        numbers = numbers + (low, (words[place] >> 16).to(tl.int16).to(KIND, bitcast=True))
    return numbers


@triton.jit
def words_of(numbers, COUNT: tl.constexpr):
    """COUNT words of 2·COUNT numbers."""
    words = ()
    for place in tl.static_range(COUNT):
        low = numbers[2 * place].to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = words + (low | (numbers[2 * place + 1].to(tl.int16, bitcast=True).to(tl.int32) << 16),)
    return words


@triton.jit
def apart(flat, COUNT: tl.constexpr, PAIRS: tl.constexpr, LEVELS: tl.constexpr):
    """COUNT words of every pair, from words in the order of memory: those of the first pair, of the second, and on."""
    word = tl.arange(0, PAIRS * 2**LEVELS)
    if COUNT < 2**LEVELS:
        flat = tl.gather(flat, (word >> LEVELS) * COUNT + tl.minimum(word & (2**LEVELS - 1), COUNT - 1), 0)
    return unstack(tl.reshape(flat, (PAIRS, 2**LEVELS)), PAIRS, LEVELS)


@triton.jit
def together(words, COUNT: tl.constexpr, PAIRS: tl.constexpr, LEVELS: tl.constexpr):
    """The other way round; what is past the last pair's words repeats some of them."""
    word = tl.arange(0, PAIRS * 2**LEVELS)
    flat = tl.reshape(side_by_side(words, 1, PAIRS, LEVELS), (PAIRS * 2**LEVELS,))
    if COUNT < 2**LEVELS:
        flat = tl.gather(flat, (tl.minimum(word // COUNT, PAIRS - 1) << LEVELS) + word % COUNT, 0)
    return flat


@triton.jit
def widened(numbers, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of some numbers in float32."""
    wide = ()
    for place in tl.static_range(COUNT):
        wide = wide + (numbers[FIRST + place].to(tl.float32),)
    return wide


@triton.jit
def step_pairs(
    x, y, token, window, other_window, taps, other_taps, start, other_start, live, inside, is_live, time, x_token,
    channels, WIDTH: tl.constexpr, SILU: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Takes pairs of channels of a row through its tokens, of which the first was loaded; gives the windows after."""
    KIND: tl.constexpr = y.dtype.element_ty
    for t in range(0, time):
        value, other_value = numbers_of((token,), 1, KIND)
        rows = window + (value,)
        other_rows = other_window + (other_value,)
        result = activate(convolve(rows, taps, start, 0, WIDTH), SILU, True, NATIVE)
        other_result = activate(convolve(other_rows, other_taps, other_start, 0, WIDTH), SILU, True, NATIVE)
        result = tl.where(is_live, result, 0.0).to(KIND)
        other_result = tl.where(is_live, other_result, 0.0).to(KIND)
        words = words_of((result, other_result), 1)
        tl.store(as_words(y + t * channels), words[0], inside)
        token = tl.load(as_words(x + (t + 1) * x_token), live & (t + 1 < time), other=0)
        window = rows[1:]
        other_window = other_rows[1:]
    return window + other_window


@kernel(budget=Budget(registers=128, shared_bytes=16_384), schedule=("CHANNELS", "ROWS"))
@triton.jit
def conv_step_words(
    x: PointerIf16.element, weight: Pointer.element, bias: Pointer.bias, state: PointerIf16.element,
    indices: Pointer.index, y: PointerIf16.element, new_state: PointerIf16.element, status_word: Pointer.int64,
    fault: Int32, batch: Int32, time: Int32, channels: Int32If16, tiles: Int32, states: Int64, x_row: Int64If16,
    x_token: Int64If16, bias_step: Int64, state_sequence: Int64If16, index_step: Int64,
    WIDTH: tl.constexpr, INDEXED: tl.constexpr, IN_PLACE: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
    NATIVE: tl.constexpr, CHANNELS: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """What `conv_step` does, of a 16-bit type whose pairs of channels are words, with the same arithmetic.

    The states of all rows are on their way before any is used. Their words are read and written in the order of memory
    and change places between threads: the words of a pair, one by one, would touch each sector as often as it has
    some. Channels, taps and columns are adjacent, a state's channels too.
    """
    KIND: tl.constexpr = y.dtype.element_ty
    BEFORE: tl.constexpr = WIDTH - 1
    PAIRS: tl.constexpr = CHANNELS // 2
    tile = tl.program_id(0) % tiles
    first = tile * CHANNELS
    channel = first + tl.arange(0, PAIRS) * 2
    inside = channel < channels
    word = tl.arange(0, PAIRS * 2**LEVELS)
    in_states = (word < PAIRS * BEFORE) & (word < (channels - first) // 2 * BEFORE)
    places = ()
    windows = ()
    tokens = ()
    for number in tl.static_range(ROWS):
        row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + number
        place = row
        if INDEXED:
            index = tl.load(indices + row * index_step, row < batch, other=-1).to(tl.int64)
            wrong = (index < -1) | (index >= states)
            record(status_word, fault, row, index, wrong & (tile == 0))
            place = tl.where(wrong, -1, index)
        place = tl.where(row < batch, place, -1)
        places = places + (place,)
        if BEFORE > 0:
            at = as_words(state + place * state_sequence + first * BEFORE)
            windows = windows + (tl.load(at + word, in_states & (place >= 0), other=0),)
        tokens = tokens + (tl.load(as_words(x + row * x_row + channel), inside & (place >= 0), other=0),)
    weights = ()
    for place in tl.static_range(WIDTH):
        weights = weights + (tl.load(as_words(weight + channel * WIDTH) + place, inside, other=0),)
    if IN_PLACE:
        tl.debug_barrier()  # a thread writes states that another has read
    numbers = numbers_of(weights, WIDTH, KIND)
    start = load_bias(bias, channel.to(tl.int64), inside, bias_step, HAS_BIAS, tl.float32)
    other_start = load_bias(bias, channel.to(tl.int64) + 1, inside, bias_step, HAS_BIAS, tl.float32)
    for number in tl.static_range(ROWS):
        row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + number
        live = inside & (places[number] >= 0)
        both = ()
        if BEFORE > 0:
            both = numbers_of(apart(windows[number], BEFORE, PAIRS, LEVELS), BEFORE, KIND)
        after = step_pairs(
            x + row * x_row + channel, y + row * time * channels + channel, tokens[number], both[:BEFORE],
            both[BEFORE:], widened(numbers, 0, WIDTH), widened(numbers, WIDTH, WIDTH), start, other_start, live,
            inside & (row < batch), places[number] >= 0, time, x_token, channels, WIDTH, SILU, NATIVE,
        )  # fmt: skip
        if BEFORE > 0:
            out, is_row = new_state + (row * channels + first) * BEFORE, row < batch
            if IN_PLACE:
                out, is_row = state + places[number] * state_sequence + first * BEFORE, places[number] >= 0
            flat = together(words_of(after, BEFORE), BEFORE, PAIRS, LEVELS)
            tl.store(as_words(out) + word, flat, in_states & is_row)


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
    ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """y of some rows' tokens, and their states after them, in their own places or in the rows'. ADJACENT: x_channel is
    1. The columns of a state, 2^LEVELS at most, lie side by side, and are written so: a column alone would touch all of
    the memory that its neighbours do."""
    COMPUTED: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BEFORE: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    channel = (tile * CHANNELS + tl.arange(0, CHANNELS)[None, :]).to(tl.int64)
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
    """Whether the taps of two channels are words, and the states of all channels lie beside each other, aligned."""
    columns = width - 1
    is_dense = weight.stride() == (width, 1) and (columns == 0 or state.stride()[1:] == (columns, 1))
    return is_dense and state.stride(0) % 16 == 0 and weight.data_ptr() % 4 == 0 and is_aligned(state)


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
    bound = setup.either(conv_step, **settings, num_warps=warps)
    tiles = -(-shape.channels // block)
    # Two channels a word, which takes half the instructions; whether the tensors lie so is seen in a run.
    may_pair = adjacent and shape.element.itemsize == 2 and shape.weight == shape.element
    word_rows = schedule["word_rows"]
    if may_pair:
        left_out = "weight", "ADJACENT", "NARROW", "DOUBLE"
        settings = {name: value for name, value in settings.items() if name not in left_out} | {"ROWS": word_rows}
        by_words = setup.kernel(
            conv_step_words, aligned=True, **settings, num_warps=shape.warps(block // 2, schedule["warps"])
        )

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, weight, bias, state, indices, _silu, checking = arguments
        y = outputs[0]
        if checking and indices is not None:
            report(STATE_INDEX_REPEATED, indices, repeated(indices))
        if y.numel() == 0 and indices is not None:
            report(STATE_INDEX_OUT_OF_RANGE, indices, out_of_range(indices, len(state)))
        x_row, x_token, x_channel = x.stride()
        aligned = is_aligned(x, y, outputs[-1]) and not any(n % 16 for n in (x_row, x_token, shape.channels))
        given: dict[str, Any] = {
            "x": x, "weight": weight, "bias": weight if bias is None else bias, "state": state,
            "indices": indices if indexed else x, "y": y, "new_state": y if in_place else outputs[1],
            "status_word": status_word(device), "fault": STATE_INDEX_OUT_OF_RANGE.row, "batch": shape.batch,
            "time": shape.time, "channels": shape.channels, "tiles": tiles, "states": shape.sequences, "x_row": x_row,
            "x_token": x_token, "bias_step": 0 if bias is None else bias.stride(0),
            "state_sequence": state.stride(0), "index_step": indices.stride(0) if indexed else 0,
        }  # fmt: skip
        if may_pair and aligned and _in_words(shape.width, weight, state):
            by_words.launch((-(-shape.batch // word_rows) * tiles,), **given)
        else:
            bound[aligned].launch(
                (-(-shape.batch // rows) * tiles,), x_channel=x_channel, state_channel=state.stride(1),
                state_column=state.stride(2), **named_strides("weight", weight, "channel", "tap"), **given,
            )  # fmt: skip
        if indexed and device.type == "cpu":
            check()

    return execute
