"""What the kernels of the convolution are made of: tiles of channels, rows of tokens, and what precedes a sequence.

A program has a tile of channels, each of which is a problem of its own, and rows: the numbers of one token. All tokens
lie on one axis, row after row of the batch. Where every token of a block, and every one its taps or its gradients
reach, is of one sequence, rows are loaded without a question; a block with an edge asks for each of its tokens how many
of its sequence come before (`age`). Both compute the same, in the same order.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import status_word
from adjoint.core.kernels import Budget, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Launch
from adjoint.device.faults import record
from adjoint.ops.conv.arguments import SEQUENCES_OUT_OF_ORDER
from adjoint.ops.conv.shape import Shape
from adjoint.ops.norm.kernels import silu_and_slope

PLACE_SEQUENCE, PLACE_BEGIN, PLACE_END, PLACE_ROWS = map(tl.constexpr, range(4))
"""Rows of `places`, [3, tokens]: of each token the sequence, and the first token of that and of the next."""

PLACES_BLOCK = tl.constexpr(256)
"""Tokens, and bounds, of a program that looks up sequences."""


@triton.jit
def zeros(COUNT: tl.constexpr, CHANNELS: tl.constexpr, COMPUTED: tl.constexpr):
    """COUNT vectors of zeros."""
    vectors = ()
    for _ in tl.static_range(COUNT):
        vectors = vectors + (tl.zeros([CHANNELS], COMPUTED),)
    return vectors


@triton.jit
def part_of(tile, first_tiles, begins, PARTS: tl.constexpr):
    """The first tile of the part that a tile belongs to, and that part's first and last channel: no tile has two."""
    zero = tl.zeros((), tl.int32)
    first, begin, end = zero, zero, zero + begins[1]
    for part in tl.static_range(1, PARTS):
        reached = tile >= first_tiles[part]
        first = tl.where(reached, first_tiles[part], first)
        begin = tl.where(reached, begins[part], begin)
        end = tl.where(reached, begins[part + 1], end)
    return first, begin, end


@triton.jit
def of_part(values, tile, first_tiles, PARTS: tl.constexpr):
    """What the part of a tile has: an address, or a stride."""
    value = values[0]
    for part in tl.static_range(1, PARTS):
        value = tl.where(tile >= first_tiles[part], values[part], value)
    return value


@triton.jit
def in_part(column, size, WHOLE: tl.constexpr):
    """Which columns of a tile the part has; WHOLE: all of them, in every tile."""
    if WHOLE:
        return tl.full(column.shape, 1, tl.int1)
    else:
        return column < size


@triton.jit
def load_taps(weight, channel, inside, channel_step, tap_step, WIDTH: tl.constexpr, COMPUTED: tl.constexpr):
    """A vector for each tap, the one of the oldest token first."""
    taps = ()
    for tap in tl.static_range(WIDTH):
        place = weight + channel * channel_step + tap * tap_step
        taps = taps + (tl.load(place, inside, other=0).to(COMPUTED),)
    return taps


@triton.jit
def load_bias(bias, channel, inside, step, HAS_BIAS: tl.constexpr, COMPUTED: tl.constexpr):
    if HAS_BIAS:
        return tl.load(bias + channel * step, inside, other=0).to(COMPUTED)
    else:
        return tl.zeros(channel.shape, COMPUTED)


# ----------------------------------------------------------------------------------------------- rows


@triton.jit
def load_rows(at, offset, inside, step, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows, from FIRST tokens past an address on."""
    rows = ()
    for row in tl.static_range(COUNT):
        rows = rows + (tl.load(at + (FIRST + row) * step + offset, inside, other=0),)
    return rows


@triton.jit
def unstack(tile, CHANNELS: tl.constexpr, LEVELS: tl.constexpr):
    """[CHANNELS, 2^LEVELS] -> 2^LEVELS vectors."""
    parts = (tile,)
    for level in tl.static_range(LEVELS):
        smaller = ()
        for part in tl.static_range(2**level):
            halves = tl.reshape(parts[part], (CHANNELS, 2, 2 ** (LEVELS - 1 - level)))
            first, second = tl.split(tl.permute(halves, (0, 2, 1)))
            smaller = smaller + (first, second)
        parts = smaller
    vectors = ()
    for part in tl.static_range(2**LEVELS):
        vectors = vectors + (tl.reshape(parts[part], (CHANNELS,)),)
    return vectors


@triton.jit
def load_tokens(
    at, offset, inside, step, BEFORE: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr,
    TIME_ADJACENT: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """BEFORE rows, and the ROWS = 2^LEVELS of a block, which begins at an address.

    Where the tokens of a channel are adjacent, a thread reads several of them at once.
    """
    if TIME_ADJACENT:
        tile = tl.load(at + offset[:, None] + tl.arange(0, ROWS)[None, :], inside[:, None], other=0)
        return load_rows(at, offset, inside, step, -BEFORE, BEFORE) + unstack(tile, CHANNELS, LEVELS)
    else:
        return load_rows(at, offset, inside, step, -BEFORE, BEFORE + ROWS)


@triton.jit
def place_of(token, run, aligned_run, row_step, step, TIME_ADJACENT: tl.constexpr):
    """Where the row of a token lies. `aligned_run` is `run` where the tokens of a channel are adjacent: there the
    compiler is to know that a block begins at a multiple of 16 bytes, if it does."""
    if TIME_ADJACENT:
        row = token // aligned_run
        return row.to(tl.int64) * row_step + (token - row * aligned_run).to(tl.int64)
    else:
        return (token // run).to(tl.int64) * row_step + (token % run).to(tl.int64) * step


@triton.jit
def load_rows_at_edges(x, token, tokens, run, offset, inside, row_step, step, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT rows, from FIRST tokens past a token on; 0 where there is no token."""
    rows = ()
    for row in tl.static_range(COUNT):
        at = token + FIRST + row
        place = x + (at // run).to(tl.int64) * row_step + (at % run).to(tl.int64) * step
        rows = rows + (tl.load(place + offset, inside & (at >= 0) & (at < tokens), other=0),)
    return rows


@triton.jit
def sequence_of(token, places, tokens, time, PACKED: tl.constexpr):
    """The sequence of a token, and the first token of that and of the next; past the last token, those of the last."""
    token = tl.minimum(token, tokens - 1)
    if PACKED:
        at = places + token.to(tl.int64)
        rows = tokens.to(tl.int64)
        return tl.load(at), tl.load(at + PLACE_BEGIN * rows), tl.load(at + PLACE_END * rows)
    else:
        sequence = token // time
        return sequence, sequence * time, (sequence + 1) * time


@triton.jit
def pool_place(sequence, indices, index_step, states, INDEXED: tl.constexpr):
    """Which state a sequence has; −1 for a row that is skipped."""
    if INDEXED:
        place = tl.load(indices + sequence.to(tl.int64) * index_step).to(tl.int64)
        return tl.where(place < states, tl.maximum(place, -1), -1)
    else:
        return sequence.to(tl.int64)


@triton.jit
def tap_at_edge(
    row, age, back: tl.constexpr, state, place, offset, column_step, inside, WIDTH: tl.constexpr,
    HAS_STATE: tl.constexpr,
):  # fmt: skip
    """The token `back` tokens before one that has `age` others of its sequence before it: its row, or a column of the
    state, or 0."""
    if back == 0:
        return row
    before = tl.zeros(row.shape, row.dtype)
    if HAS_STATE:
        column = WIDTH - 1 + age - back
        reads = inside & (age >= 0) & (age < back) & (place >= 0)
        before = tl.load(state + offset + column.to(tl.int64) * column_step, reads, other=0)
    return tl.where(age >= back, row, before)


@triton.jit
def load_window(
    at, offset, inside, step, state, state_step, age, WIDTH: tl.constexpr, HAS_STATE: tl.constexpr,
    COMPUTED: tl.constexpr,
):  # fmt: skip
    """The W − 1 tokens before one that has `age` others of its sequence before it: rows, columns of the state, or 0."""
    rows = ()
    for column in tl.static_range(WIDTH - 1):
        position = age - (WIDTH - 1) + column
        row = tl.load(at + (column - (WIDTH - 1)) * step + offset, inside & (position >= 0), other=0)
        if HAS_STATE:
            before = state + (age + column).to(tl.int64) * state_step
            row = tl.where(position >= 0, row, tl.load(before, inside & (position < 0) & (age >= 0), other=0))
        rows = rows + (row.to(COMPUTED),)
    return rows


@triton.jit
def last_of(vectors, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """COUNT of some vectors, from number FIRST on."""
    chosen = ()
    for number in tl.static_range(COUNT):
        chosen = chosen + (vectors[FIRST + number],)
    return chosen


@triton.jit
def convolve(rows, taps, bias, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """bias + Σ tap·row, the oldest token first, over the rows from FIRST on; every product is added without rounding
    it first."""
    z = bias
    for tap in tl.static_range(WIDTH):
        z = tl.fma(taps[tap], rows[FIRST + tap].to(bias.dtype), z)
    return z


@triton.jit
def activate(z, SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    if SILU:
        return silu_and_slope(z, NARROW, NATIVE)[0]
    else:
        return z


@triton.jit
def through_activation(dy, z, SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """dz."""
    if SILU:
        return dy.to(z.dtype) * silu_and_slope(z, NARROW, NATIVE)[1]
    else:
        return dy.to(z.dtype)


# ---------------------------------------------------------------------------------------------- places


@triton.jit
def load_bound(cu_seqlens, number, step, tokens):
    """A bound of the caller, within the tokens there are."""
    bound = tl.load(cu_seqlens + number.to(tl.int64) * step).to(tl.int64)
    return tl.minimum(tl.maximum(bound, 0), tokens).to(tl.int32)


@triton.jit
def bounds_of(number, cu_seqlens, step, tokens, time, PACKED: tl.constexpr):
    """The first token of a sequence, and how many it has."""
    if PACKED:
        begin = load_bound(cu_seqlens, number, step, tokens)
        end = load_bound(cu_seqlens, number + 1, step, tokens)
        return begin, tl.maximum(end - begin, 0)
    else:
        return number * time, time


@kernel(budget=Budget(registers=64, shared_bytes=1024))
@triton.jit
def conv_places(
    cu_seqlens: Pointer.bound, places: Pointer.int32, status_word: Pointer.int64, fault: Int32, sequences: Int32,
    tokens: Int32, step: Int64, levels: Int32, RAISE: tl.constexpr,
):  # fmt: skip
    """Searches the sequence of each token, the last one that begins at it or before; reports bounds out of order.

    Whatever the bounds are, what is written stays within the tokens and the sequences there are.
    """
    number = tl.program_id(0) * PLACES_BLOCK + tl.arange(0, PLACES_BLOCK)
    if RAISE:
        inside = number <= sequences
        at = cu_seqlens + number.to(tl.int64) * step
        bound = tl.load(at, inside, other=0).to(tl.int64)
        before = tl.load(at - step, inside & (number > 0), other=0).to(tl.int64)
        wrong = (bound < 0) | (bound > tokens) | (bound < before)
        wrong |= ((number == 0) & (bound != 0)) | ((number == sequences) & (bound != tokens))
        record(status_word, fault, number, bound, inside & wrong)
    low = tl.zeros([PLACES_BLOCK], tl.int32)
    high = low + tl.maximum(sequences - 1, 0)
    for _ in range(levels):
        middle = (low + high + 1) >> 1
        begun = load_bound(cu_seqlens, middle, step, tokens) <= number
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, middle - 1)
    begin = load_bound(cu_seqlens, low, step, tokens)
    end = load_bound(cu_seqlens, tl.minimum(low + 1, sequences), step, tokens)
    inside = number < tokens
    at = places + number.to(tl.int64)
    rows = tokens.to(tl.int64)
    tl.store(at + PLACE_SEQUENCE * rows, tl.where(sequences > 0, low, -1), inside)
    tl.store(at + PLACE_BEGIN * rows, begin, inside)
    tl.store(at + PLACE_END * rows, end, inside)


def launch_places(bound: Launch, cu_seqlens: Tensor, places: Any, shape: Shape) -> None:
    """Looks up every token, and checks every bound."""
    bound.launch(
        (-(-max(shape.tokens, cu_seqlens.shape[0]) // PLACES_BLOCK.value),), cu_seqlens=cu_seqlens, places=places,
        status_word=status_word(cu_seqlens.device), fault=SEQUENCES_OUT_OF_ORDER.row, sequences=shape.sequences,
        tokens=shape.tokens, step=cu_seqlens.stride(0), levels=shape.sequences.bit_length(),
    )  # fmt: skip
