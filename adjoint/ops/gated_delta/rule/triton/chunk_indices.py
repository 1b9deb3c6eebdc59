"""Where sequences, their chunks and their segments lie, and zeros where no sequence lies.

Everything is on one flat token axis. A span is CHUNK tokens for the kernels that work chunk by chunk, or the SEGMENT
tokens between two saved states; spans are counted from a sequence's own start, and numbered sequence by sequence. How
many there are is data; there are slots for as many as there can be, and the slots past the last have no tokens.

    sequence_begins   [N + 1] the first token of each sequence
    first_chunks      [N + 1] the number of its first chunk; first_segments likewise
    chunk_indices     [slots, 4] first token, number of tokens, sequence, number within the sequence; segment_indices
                      likewise

Where every row of a batch is a sequence nothing has to be looked up, and `gates.py` writes all of that.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import status_word
from adjoint.core.kernels import NVIDIA, Budget, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Setup
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.arguments import SEQUENCES_OUT_OF_ORDER
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import Shape

INDEX_COUNT, INDEX_SEQUENCE, INDEX_NUMBER, INDEX_WIDTH = map(tl.constexpr, range(1, 5))
"""Columns of an index after the first token, and how many there are."""

BOUNDS_BLOCK, SLOTS_BLOCK = tl.constexpr(1024), tl.constexpr(256)
"""Sequences that are scanned at a time, and slots that a program looks up."""

FEW_SLOTS, FEW_BOUNDS = tl.constexpr(16), tl.constexpr(128)
"""Slots of a program that goes through all sequences, and the sequences it compares with them at a time."""

FEW_SEQUENCES = 2 * FEW_BOUNDS.value - 1
"""Up to so many, every program goes through all of them: two blocks of bounds."""

CLEARED_ROWS, CLEARED_COLUMNS, CLEARED_ELEMENTS = tl.constexpr(64), tl.constexpr(128), tl.constexpr(2048)
"""Tokens of a program that clears them, columns that it clears at a time, and numbers of a state."""

SMALL = Budget(registers=168, shared_bytes=16384)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _scan_bounds(bound, before, inside, number, last_bound, last_before, total, span):
    """The bounds of some sequences, put in order, and the number of spans before each; `before` has the bounds of the
    sequences one earlier, and the last three what came before them all."""
    bound = tl.maximum(tl.associative_scan(bound, 0, _larger), last_bound)
    before = tl.maximum(tl.associative_scan(before, 0, _larger), last_before)
    spans = tl.where(inside & (number > 0), tl.cdiv(bound - before, span), 0)
    return bound, total + tl.cumsum(spans, 0), tl.max(bound, 0), tl.max(before, 0), total + tl.sum(spans, 0)


@triton.jit
def _load_bounds(cu_seqlens, number, status_word, fault, sequences, tokens, RAISE: tl.constexpr):
    """Some bounds of the caller, and those one earlier; within the tokens there are. Wrong ones are reported."""
    inside = number <= sequences
    bound = tl.load(cu_seqlens + number, inside, other=0).to(tl.int64)
    before = tl.load(cu_seqlens + number - 1, inside & (number > 0), other=0).to(tl.int64)
    if RAISE:
        wrong = (bound < 0) | (bound > tokens) | (bound < before)
        wrong |= ((number == 0) & (bound != 0)) | ((number == sequences) & (bound != tokens))
        record(status_word, fault, number, bound, inside & wrong)
    bound = tl.minimum(tl.maximum(bound, 0), tokens).to(tl.int32)
    return bound, tl.minimum(tl.maximum(before, 0), tokens).to(tl.int32)


@kernel(budget=SMALL, targets=NVIDIA)
@triton.jit
def rule_sequence_bounds(
    cu_seqlens: Pointer.bound, sequence_begins: Pointer.int32, first_spans: Pointer.int32, status_word: Pointer.int64,
    fault: Int32, sequences: Int32, tokens: Int64, RAISE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Sums over all sequences, by one program: cu_seqlens that descend are taken as their running maximum."""
    zero = tl.zeros([], tl.int32)
    last_bound, last_before, total = zero, zero, zero
    for start in range(0, sequences + 1, BOUNDS_BLOCK):
        number = start + tl.arange(0, BOUNDS_BLOCK)
        inside = number <= sequences
        bound, before = _load_bounds(cu_seqlens, number, status_word, fault, sequences, tokens, RAISE)
        bound, first, last_bound, last_before, total = _scan_bounds(
            bound, before, inside, number, last_bound, last_before, total, SPAN
        )
        tl.store(sequence_begins + number, bound, inside)
        tl.store(first_spans + number, first, inside)


@kernel(budget=SMALL, targets=NVIDIA)
@triton.jit
def rule_span_indices(
    sequence_begins: Pointer.int32, first_spans: Pointer.int32, span_indices: Pointer.int32, slots: Int32,
    sequences: Int32, steps: Int32, SPAN: tl.constexpr,
):  # fmt: skip
    """Searches the sequence of each slot: the last whose first span is not past it."""
    slot = tl.program_id(0) * SLOTS_BLOCK + tl.arange(0, SLOTS_BLOCK)
    low = tl.zeros([SLOTS_BLOCK], tl.int32)
    high = low + sequences
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        fits = tl.load(first_spans + middle) <= slot
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    used = low < sequences
    sequence = tl.minimum(low, sequences - 1)
    number = slot - tl.load(first_spans + sequence)
    begin = tl.load(sequence_begins + sequence) + number * SPAN
    end = tl.load(sequence_begins + sequence + 1)
    inside = slot < slots
    index = span_indices + slot.to(tl.int64) * INDEX_WIDTH
    tl.store(index, tl.where(used, begin, 0), inside)
    tl.store(index + INDEX_COUNT, tl.where(used, tl.minimum(end - begin, SPAN), 0), inside)
    tl.store(index + INDEX_SEQUENCE, sequence, inside)
    tl.store(index + INDEX_NUMBER, number, inside)


@kernel(budget=SMALL, targets=NVIDIA, numeric=("SEGMENT",))
@triton.jit
def rule_chunk_indices(
    cu_seqlens: Pointer.bound, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    chunk_indices: Pointer.int32, first_segments: Pointer.int32, segment_indices: Pointer.int32,
    status_word: Pointer.int64, fault: Int32, sequences: Int32, tokens: Int64, slots: Int32, segment_slots: Int32,
    RAISE: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """What `rule_sequence_bounds` and `rule_span_indices` give, of chunks and then, with SEGMENTS, of segments.

    Every program goes through all sequences and compares them with its slots, so that none waits for another; the first
    of chunks and of segments writes what sequences have. Bounds in order and numbers of spans never descend: what the
    sequence of a slot has is the largest of those not past the slot, and where it ends the smallest past it.
    """
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    blocks = tl.cdiv(slots, FEW_SLOTS)
    span = tl.full([], CHUNK, tl.int32)
    out, out_first_spans, out_slots = chunk_indices, first_chunks, slots
    if SEGMENTS:  # noqa: SIM102  (a constant, and what only the GPU knows)
        if program >= blocks:
            span = tl.full([], SEGMENT, tl.int32)
            out, out_first_spans, out_slots = segment_indices, first_segments, segment_slots
            program -= blocks
    slot = program * FEW_SLOTS + tl.arange(0, FEW_SLOTS)
    zero, zeros = tl.zeros([], tl.int32), tl.zeros([FEW_SLOTS], tl.int32)
    last_bound, last_before, total = zero, zero, zero
    reached, begin, first_span, end = zeros, zeros, zeros, zeros + tokens.to(tl.int32)
    for start in range(0, sequences + 1, FEW_BOUNDS):
        number = start + tl.arange(0, FEW_BOUNDS)
        inside = number <= sequences
        bound, before = _load_bounds(cu_seqlens, number, status_word, fault, sequences, tokens, RAISE)
        bound, first, last_bound, last_before, total = _scan_bounds(
            bound, before, inside, number, last_bound, last_before, total, span
        )
        tl.store(sequence_begins + number, bound, inside & (tl.program_id(0) == 0))
        tl.store(out_first_spans + number, first, inside & (program == 0))
        begun = inside[None, :] & (first[None, :] <= slot[:, None])
        past = inside[None, :] & (first[None, :] > slot[:, None])
        reached += tl.sum(begun.to(tl.int32), 1)
        begin = tl.maximum(begin, tl.max(tl.where(begun, bound[None, :], 0), 1))
        first_span = tl.maximum(first_span, tl.max(tl.where(begun, first[None, :], 0), 1))
        end = tl.minimum(end, tl.min(tl.where(past, bound[None, :], tokens.to(tl.int32)), 1))
    used = reached <= sequences
    number = slot - first_span
    begin += number * span
    inside = slot < out_slots
    index = out + slot.to(tl.int64) * INDEX_WIDTH
    tl.store(index, tl.where(used, begin, 0), inside)
    tl.store(index + INDEX_COUNT, tl.where(used, tl.minimum(end - begin, span), 0), inside)
    tl.store(index + INDEX_SEQUENCE, tl.minimum(reached, sequences) - 1, inside)
    tl.store(index + INDEX_NUMBER, number, inside)


def index_regions(shape: Shape, segments: bool) -> dict[str, tuple[torch.dtype, int]]:
    """The memory of what lies where; without segments for problems that need none."""
    regions = {name: (torch.int32, shape.sequences + 1) for name in ("sequence_begins", "first_chunks")}
    if not shape.is_empty:
        regions["chunk_indices"] = (torch.int32, shape.chunks * INDEX_WIDTH.value)
    if segments:
        regions["first_segments"] = (torch.int32, shape.sequences + 1)
        regions["segment_indices"] = (torch.int32, shape.segments * INDEX_WIDTH.value)
    return regions


def bind_chunk_indices(setup: Setup, shape: Shape, segments: tuple[bool, ...], raises: bool) -> Callable[..., None]:
    """What says where packed sequences lie: `launch(memory, cu_seqlens)`, of segments too where the memory has them.

    Args:
        segments: without segments, with them, or both: what problems of other lengths may ask for.
        raises: whether bounds out of order are reported.
    """
    few = {
        with_segments: setup.kernel(
            rule_chunk_indices, bound=shape.ids, RAISE=raises, SEGMENTS=with_segments, SEGMENT=packing.SEGMENT
        )
        for with_segments in segments
    }
    of_chunks = _bind_spans(setup, shape, CHUNK, raises)
    of_segments = _bind_spans(setup, shape, packing.SEGMENT, False) if True in segments else None
    is_few = shape.sequences <= FEW_SEQUENCES
    programs, segment_programs = (-(-slots // FEW_SLOTS.value) for slots in (shape.chunks, shape.segments))

    def launch(memory: Memory, cu_seqlens: Tensor) -> None:
        with_segments = "segment_indices" in memory
        if is_few:
            few[with_segments].launch(
                (programs + segment_programs * with_segments,), cu_seqlens=cu_seqlens,
                sequence_begins=memory["sequence_begins"], first_chunks=memory["first_chunks"],
                chunk_indices=memory["chunk_indices"], first_segments=memory.get("first_segments", cu_seqlens),
                segment_indices=memory.get("segment_indices", cu_seqlens), status_word=status_word(setup.device),
                fault=SEQUENCES_OUT_OF_ORDER.row, sequences=shape.sequences, tokens=shape.tokens, slots=shape.chunks,
                segment_slots=shape.segments,
            )  # fmt: skip
            return
        of_chunks(memory, cu_seqlens, memory["first_chunks"], memory["chunk_indices"])
        if of_segments and with_segments:
            of_segments(memory, cu_seqlens, memory["first_segments"], memory["segment_indices"])

    return launch


def _bind_spans(setup: Setup, shape: Shape, span: int, raises: bool) -> Callable[..., None]:
    """The same of one kind of span, for any number of sequences."""
    bounds, indices = bind_bounds(setup, shape, span, raises), setup.kernel(rule_span_indices, SPAN=span)
    slots = shape.count_spans(span)

    def launch(memory: Memory, cu_seqlens: Tensor, first_spans: Any, span_indices: Any) -> None:
        bounds(memory, cu_seqlens, first_spans)
        indices.launch(
            (-(-slots // SLOTS_BLOCK.value),), sequence_begins=memory["sequence_begins"], first_spans=first_spans,
            span_indices=span_indices, slots=slots, sequences=shape.sequences, steps=shape.sequences.bit_length(),
        )  # fmt: skip

    return launch


def bind_bounds(setup: Setup, shape: Shape, span: int, raises: bool) -> Callable[..., None]:
    """Where packed sequences begin, and their first spans: all there is to say where there are no tokens."""
    bounds = setup.kernel(rule_sequence_bounds, bound=shape.ids, RAISE=raises, SPAN=span)

    def launch(memory: Memory, cu_seqlens: Tensor, first_spans: Any) -> None:
        bounds.launch(
            (1,), cu_seqlens=cu_seqlens, sequence_begins=memory["sequence_begins"], first_spans=first_spans,
            status_word=status_word(setup.device), fault=SEQUENCES_OUT_OF_ORDER.row, sequences=shape.sequences,
            tokens=shape.tokens,
        )  # fmt: skip

    return launch


# -------------------------------------------------------------------------------- where no sequence lies


@kernel(budget=SMALL, targets=NVIDIA)
@triton.jit
def rule_clear(sequence_begins: Pointer.int32, out: Pointer.element, sequences: Int32, tokens: Int64, width: Int64):
    """Zeros for rows of tokens that are before the first sequence or after the last."""
    first = tl.program_id(0) * CLEARED_ROWS
    begin = tl.load(sequence_begins)
    end = tl.load(sequence_begins + sequences)
    if (first >= begin) & (tl.minimum(first + CLEARED_ROWS, tokens) <= end):
        return
    token = first + tl.arange(0, CLEARED_ROWS)
    outside = (token < tokens) & ((token < begin) | (token >= end))
    place = out + token.to(tl.int64)[:, None] * width
    for start in range(0, width, CLEARED_COLUMNS):
        column = start + tl.arange(0, CLEARED_COLUMNS)
        tl.store(place + column[None, :], 0.0, outside[:, None] & (column < width)[None, :])


@kernel(budget=SMALL, targets=NVIDIA, numeric=("SEGMENT",))
@triton.jit
def rule_clear_saved(
    sequence_begins: Pointer.int32, saved: Pointer.float32, sequences: Int32, heads: Int32, steps: Int32,
    SIZE: tl.constexpr, SEGMENT: tl.constexpr,
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
        fits = tl.load(sequence_begins + middle) < (place + 1) * SEGMENT
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    begin = tl.load(sequence_begins + low)
    segment = place - begin // SEGMENT + 1
    if (segment > 0) & (tl.load(sequence_begins + low + 1) - begin > segment * SEGMENT):
        return
    out = saved + tl.program_id(0).to(tl.int64) * SIZE
    for start in range(0, SIZE, CLEARED_ELEMENTS):
        element = start + tl.arange(0, CLEARED_ELEMENTS)
        tl.store(out + element, 0.0, element < SIZE)


def bind_clear(setup: Setup, shape: Shape, *dtypes: torch.dtype) -> Callable[..., None]:
    """Zeros for the tokens of no sequence in contiguous tensors [B, T, ...]: `launch(memory, *outputs)`."""
    by_dtype = {dtype: setup.kernel(rule_clear, element=dtype) for dtype in dict.fromkeys(dtypes)}
    grid = (-(-shape.tokens // CLEARED_ROWS.value),)

    def launch(memory: Memory, *outputs: Tensor) -> None:
        for out in outputs:
            by_dtype[out.dtype].launch(
                grid, sequence_begins=memory["sequence_begins"], out=out, sequences=shape.sequences,
                tokens=shape.tokens, width=out.numel() // shape.tokens,
            )  # fmt: skip

    return launch


def bind_clear_saved(setup: Setup, shape: Shape) -> Callable[..., None]:
    """Zeros for the places of saved states that no sequence has: `launch(memory, saved)`."""
    clear = setup.kernel(rule_clear_saved, SIZE=shape.K * shape.V, SEGMENT=packing.SEGMENT)
    every_place = 0 if shape.is_packed else shape.rows * (-(-shape.time // packing.SEGMENT) - 1)

    def launch(memory: Memory, saved: Tensor) -> None:
        places = saved.shape[0]
        if places != every_place:
            clear.launch(
                (places * shape.heads,), sequence_begins=memory["sequence_begins"], saved=saved,
                sequences=shape.sequences, heads=shape.heads, steps=shape.sequences.bit_length(),
            )  # fmt: skip

    return launch
