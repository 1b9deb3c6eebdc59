"""Triton kernels that say where sequences and their chunks lie, and what the gates of a chunk are.

Everything is on one flat token axis. A span is CHUNK tokens for the kernels that work chunk by chunk, or the tokens
between two saved states; spans are counted from a sequence's own start, and numbered sequence by sequence. How many
there are is data; there are slots for as many as there can be, and the slots past the last have no tokens.

    bounds   begins[n] = the first token of sequence n, firsts[n] = its first span; [N + 1] of each
    places   [slots, 4] = first token, number of tokens, sequence, number within the sequence
    table    both in one launch, of chunks and of segments, where sequences are few
    gates    [chunks, heads, 5, 64] = G, what G lost in rounding, β, e^G, e^{Γ−G}; the table as well, where every row of
             a batch is a sequence and nothing has to be looked up
    clear    zeros for tokens of no sequence; clear_saved: for places of saved states that no sequence has
    normalize  x / sqrt(Σx² + ε), row by row
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _running(bound, before, inside, number, last_bound, last_before, total, span):
    """The bounds of some sequences, put in order, and the number of spans before each; what came before is given.

    `before` has the bounds of the sequences one earlier.
    """
    bound = tl.maximum(tl.associative_scan(bound, 0, _larger), last_bound)
    before = tl.maximum(tl.associative_scan(before, 0, _larger), last_before)
    spans = tl.where(inside & (number > 0), tl.cdiv(bound - before, span), 0)
    return bound, total + tl.cumsum(spans, 0), tl.max(bound, 0), tl.max(before, 0), total + tl.sum(spans, 0)


@triton.jit
def _given(cu_seqlens, number, status_word, fault, sequences, tokens, RAISE: tl.constexpr):
    """Some bounds as they were given, and those one earlier; within the tokens there are. Wrong ones are reported."""
    inside = number <= sequences
    bound = tl.load(cu_seqlens + number, inside, other=0).to(tl.int64)
    before = tl.load(cu_seqlens + number - 1, inside & (number > 0), other=0).to(tl.int64)
    if RAISE:
        wrong = (bound < 0) | (bound > tokens) | (bound < before)
        wrong |= ((number == 0) & (bound != 0)) | ((number == sequences) & (bound != tokens))
        record(status_word, fault, number, bound, inside & wrong)
    bound = tl.minimum(tl.maximum(bound, 0), tokens).to(tl.int32)
    before = tl.minimum(tl.maximum(before, 0), tokens).to(tl.int32)
    return bound, before


@triton.jit
def rule_bounds(
    cu_seqlens, begins, firsts, status_word, fault, sequences, tokens, time,
    PACKED: tl.constexpr, RAISE: tl.constexpr, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over all sequences, by one program: cu_seqlens that descend are taken as their running maximum."""
    each = tl.cdiv(time, SPAN)
    last_bound = tl.zeros([], tl.int32)
    last_before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    for start in range(0, sequences + 1, BLOCK):
        number = start + tl.arange(0, BLOCK)
        inside = number <= sequences
        if PACKED:
            bound, before = _given(cu_seqlens, number, status_word, fault, sequences, tokens, RAISE)
            bound, first, last_bound, last_before, total = _running(
                bound, before, inside, number, last_bound, last_before, total, SPAN
            )
            tl.store(begins + number, bound, inside)
            tl.store(firsts + number, first, inside)
        else:
            tl.store(begins + number, (number.to(tl.int64) * time).to(tl.int32), inside)
            tl.store(firsts + number, number * each, inside)


@triton.jit
def rule_places(begins, firsts, places, slots, sequences, steps, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    """Finds the sequence of each slot: the last whose first span is not past it."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    low = tl.zeros([BLOCK], tl.int32)
    high = low + sequences
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        fits = tl.load(firsts + middle) <= slot
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    used = low < sequences
    sequence = tl.minimum(low, sequences - 1)
    index = slot - tl.load(firsts + sequence)
    begin = tl.load(begins + sequence) + index * SPAN
    end = tl.load(begins + sequence + 1)
    inside = slot < slots
    place = places + slot.to(tl.int64) * 4
    tl.store(place, tl.where(used, begin, 0), inside)
    tl.store(place + 1, tl.where(used, tl.minimum(end - begin, SPAN), 0), inside)
    tl.store(place + 2, sequence, inside)
    tl.store(place + 3, index, inside)


@triton.jit
def rule_table(
    cu_seqlens, begins, firsts, places, segment_firsts, segment_places, status_word, fault, sequences, tokens, slots,
    segment_slots, RAISE: tl.constexpr, SEGMENTS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What `rule_bounds` and `rule_places` give, of chunks and then, with SEGMENTS, of segments.

    Every program goes through all sequences and compares them with its slots, so that none waits for another; the first
    of chunks and of segments writes what sequences have. Bounds in order and numbers of spans never descend: what the
    sequence of a slot has is the largest of those not past the slot, and where it ends the smallest past it.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(slots, SLOTS)
    span = tl.full([], CHUNK, tl.int32)
    out, out_firsts, out_slots = places, firsts, slots
    if SEGMENTS:  # noqa: SIM102  (a constant, and what only the GPU knows)
        if program >= blocks:
            span = tl.full([], SEGMENT, tl.int32)
            out, out_firsts, out_slots = segment_places, segment_firsts, segment_slots
            program -= blocks
    slot = program * SLOTS + tl.arange(0, SLOTS)
    last_bound = tl.zeros([], tl.int32)
    last_before = tl.zeros([], tl.int32)
    total = tl.zeros([], tl.int32)
    reached = tl.zeros([SLOTS], tl.int32)
    begin = tl.zeros([SLOTS], tl.int32)
    first_span = tl.zeros([SLOTS], tl.int32)
    end = tl.zeros([SLOTS], tl.int32) + tokens.to(tl.int32)
    for start in range(0, sequences + 1, BLOCK):
        number = start + tl.arange(0, BLOCK)
        inside = number <= sequences
        bound, before = _given(cu_seqlens, number, status_word, fault, sequences, tokens, RAISE)
        bound, first, last_bound, last_before, total = _running(
            bound, before, inside, number, last_bound, last_before, total, span
        )
        tl.store(begins + number, bound, inside & (tl.program_id(0) == 0))
        tl.store(out_firsts + number, first, inside & (program == 0))
        known = inside[None, :] & (first[None, :] <= slot[:, None])
        past = inside[None, :] & (first[None, :] > slot[:, None])
        reached += tl.sum(known.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(known, bound[None, :], 0), 1))
        first_span = tl.maximum(first_span, tl.max(tl.where(known, first[None, :], 0), 1))
        end = tl.minimum(end, tl.min(tl.where(past, bound[None, :], tokens.to(tl.int32)), 1))
    used = reached <= sequences
    index = slot - first_span
    begin += index * span
    inside = slot < out_slots
    place = out + slot.to(tl.int64) * 4
    tl.store(place, tl.where(used, begin, 0), inside)
    tl.store(place + 1, tl.where(used, tl.minimum(end - begin, span), 0), inside)
    tl.store(place + 2, tl.minimum(reached, sequences) - 1, inside)
    tl.store(place + 3, index, inside)


@triton.jit
def _write_own_place(
    begins, firsts, places, segment_firsts, segment_places, slot, first, count, row, index, rows, time,
    SEGMENTS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The table of a chunk, of the row and of the segment that begin with it, and after the last chunk of all rows."""
    place = places + slot.to(tl.int64) * 4
    tl.store(place, first)
    tl.store(place + 1, count)
    tl.store(place + 2, row)
    tl.store(place + 3, index)
    tl.store(begins + row, first, index == 0)
    tl.store(firsts + row, slot, index == 0)
    chunks = rows * tl.cdiv(time, CHUNK)
    is_last = slot + 1 == chunks
    tl.store(begins + rows, rows * time, is_last)
    tl.store(firsts + rows, chunks, is_last)
    if SEGMENTS:
        each = tl.cdiv(time, SEGMENT)
        number = index // (SEGMENT // CHUNK)
        begins_segment = index % (SEGMENT // CHUNK) == 0
        place = segment_places + (row * each + number).to(tl.int64) * 4
        tl.store(place, first, begins_segment)
        tl.store(place + 1, tl.minimum(time - index * CHUNK, SEGMENT), begins_segment)
        tl.store(place + 2, row, begins_segment)
        tl.store(place + 3, number, begins_segment)
        tl.store(segment_firsts + row, row * each + number, index == 0)
        tl.store(segment_firsts + rows, rows * each, is_last)


@triton.jit
def rule_gates(
    g, beta, begins, firsts, places, segment_firsts, segment_places, gates, status_word, fault, heads, rows, time,
    g_batch_stride, g_token_stride, g_head_stride, beta_batch_stride, beta_token_stride, beta_head_stride,
    RAISE: tl.constexpr, TABLE: tl.constexpr, SEGMENTS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The running sum of g in float64, and what is made of it; tokens past the end have g = 0 and β = 0.

    With TABLE the sequences are the rows of a batch, and what lies where is written here, with SEGMENTS of segments
    too. No argument of this kernel is promised to be aligned, so its sums have one layout and one order.
    """
    blocks = tl.cdiv(heads, HEADS)
    slot = tl.program_id(0) // blocks
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    if TABLE:
        each = tl.cdiv(time, CHUNK)
        row_of, index = slot // each, slot % each
        first = row_of * time + index * CHUNK
        count = tl.minimum(time - index * CHUNK, CHUNK)
        if tl.program_id(0) % blocks == 0:
            _write_own_place(
                begins, firsts, places, segment_firsts, segment_places, slot, first, count, row_of, index, rows, time,
                SEGMENTS, CHUNK, SEGMENT,
            )  # fmt: skip
    else:
        count = tl.load(places + slot.to(tl.int64) * 4 + 1)
        if count == 0:
            return
        first = tl.load(places + slot.to(tl.int64) * 4)
    row = tl.arange(0, CHUNK)
    token = (first + row).to(tl.int64)
    inside = (row < count)[:, None] & (head < heads)[None, :]
    wide = head.to(tl.int64)[None, :]
    g_place = g + ((token // time) * g_batch_stride + (token % time) * g_token_stride)[:, None] + wide * g_head_stride
    decay = tl.load(g_place, inside, other=0).to(tl.float32)
    if RAISE:
        record(status_word, fault, token[:, None] * heads + wide, decay.to(tl.int64), inside & (decay > 0))
    G = tl.cumsum(decay.to(tl.float64), 0)
    high = G.to(tl.float32)
    low = (G - high.to(tl.float64)).to(tl.float32)
    end = tl.sum(tl.where(row[:, None] == CHUNK - 1, G, 0.0), 0)
    b_place = beta + ((token // time) * beta_batch_stride + (token % time) * beta_token_stride)[:, None]
    strength = tl.load(b_place + wide * beta_head_stride, inside, other=0).to(tl.float32)
    place = gates + (slot.to(tl.int64) * heads + wide) * (5 * CHUNK) + row[:, None]
    own = (head < heads)[None, :] & (row < CHUNK)[:, None]
    from_start = tl.exp(high)
    tl.store(place, high, own)
    tl.store(place + CHUNK, low, own)
    tl.store(place + 2 * CHUNK, strength, own)
    tl.store(place + 3 * CHUNK, from_start + from_start * low, own)
    tl.store(place + 4 * CHUNK, tl.exp((end[None, :] - G).to(tl.float32)), own)


@triton.jit
def rule_clear(begins, out, sequences, tokens, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for rows of tokens that are before the first sequence or after the last."""
    first = tl.program_id(0) * ROWS
    begin = tl.load(begins)
    end = tl.load(begins + sequences)
    if (first >= begin) & (tl.minimum(first + ROWS, tokens) <= end):
        return
    token = first + tl.arange(0, ROWS)
    outside = (token < tokens) & ((token < begin) | (token >= end))
    place = out + token.to(tl.int64)[:, None] * width
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(place + column[None, :], 0.0, outside[:, None] & (column < width)[None, :])


@triton.jit
def rule_clear_saved(
    begins, saved, sequences, heads, steps, SIZE: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Zeros for the places of saved states that no sequence writes; one program per place and head.

    A sequence that begins at b has the places from b // SEGMENT on, one for each segment but its first; the last
    sequence that begins before the end of a place's own SEGMENT tokens is the only one that may have it.
    """
    place = tl.program_id(0) // heads
    low = tl.zeros([], tl.int32)
    high = low + (sequences - 1)
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        fits = tl.load(begins + middle) < (place + 1) * SEGMENT
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    begin = tl.load(begins + low)
    segment = place - begin // SEGMENT + 1
    if (segment > 0) & (tl.load(begins + low + 1) - begin > segment * SEGMENT):
        return
    out = saved + tl.program_id(0).to(tl.int64) * SIZE
    for start in range(0, SIZE, BLOCK):
        element = start + tl.arange(0, BLOCK)
        tl.store(out + element, 0.0, element < SIZE)


@triton.jit
def rule_normalize(
    x, out, factors, rows, heads, time, batch_stride, token_stride, head_stride, column_stride,
    EPSILON: tl.constexpr, SIZE: tl.constexpr, PADDED: tl.constexpr, FACTORS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of SIZE numbers, divided by their norm in float32, into rows of PADDED; and 1 / norm, where FACTORS.

    As with the gates, nothing is promised to be aligned: the squares of a row are added in one order.
    """
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    token = row // heads
    place = x + (token // time) * batch_stride + (token % time) * token_stride + (row % heads) * head_stride
    value = tl.load(place + column.to(tl.int64) * column_stride, (row < rows) & (column < SIZE), other=0)
    value = value.to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value, 1) + EPSILON)
    value = (value * norm[:, None]).to(out.dtype.element_ty)
    tl.store(out + row * PADDED + column, value, (row < rows) & (column < PADDED))
    if FACTORS:
        tl.store(factors + row, norm[:, None], row < rows)


_SMALL = Budget(registers=168, shared_bytes=16384)

KERNELS = tuple(
    kernels.register(kernel, budget=_SMALL, targets=kernels.NVIDIA)
    for kernel in (rule_bounds, rule_places, rule_table, rule_gates, rule_clear, rule_clear_saved, rule_normalize)
)
