"""What the gates of a chunk are, [chunks, heads, 5, 64]: G, what G lost in rounding, β, e^G, e^{Γ−G}.

G is the running sum of g within a chunk, and Γ its last. Where every row of a batch is a sequence, the same kernel also
writes where chunks and segments lie, as `chunk_indices.py` does for packed sequences.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import status_word
from adjoint.core.kernels import NVIDIA, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Setup
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.arguments import POSITIVE_GATE, RESET
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.chunk_indices import (
    INDEX_COUNT,
    INDEX_NUMBER,
    INDEX_SEQUENCE,
    INDEX_WIDTH,
    SMALL,
    bind_chunk_indices,
)

GATE_LOW, GATE_STRENGTH, GATE_FROM_START, GATE_TO_END, GATE_ROWS = map(tl.constexpr, range(1, 6))
"""Rows of a chunk's gates after G, each of 64 numbers, and how many there are."""

GATE_DECAY = tl.constexpr(4 * 64 - 1)
"""Where e^Γ lies: the last of e^G."""

LEAST = tl.constexpr(RESET[torch.float32])
"""What a lower g counts as in running sums."""

HEADS = tl.constexpr(8)
"""Value heads of a program."""


@triton.jit
def _write_index(
    sequence_begins, first_chunks, chunk_indices, first_segments, segment_indices, slot, first, count, row, number,
    rows, time, SEGMENTS: tl.constexpr, CHUNK: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The index of a chunk, of the row and of the segment that begin with it, and after the last chunk of all rows."""
    index = chunk_indices + slot.to(tl.int64) * INDEX_WIDTH
    tl.store(index, first)
    tl.store(index + INDEX_COUNT, count)
    tl.store(index + INDEX_SEQUENCE, row)
    tl.store(index + INDEX_NUMBER, number)
    tl.store(sequence_begins + row, first, number == 0)
    tl.store(first_chunks + row, slot, number == 0)
    chunks = rows * tl.cdiv(time, CHUNK)
    is_last = slot + 1 == chunks
    tl.store(sequence_begins + rows, rows * time, is_last)
    tl.store(first_chunks + rows, chunks, is_last)
    if SEGMENTS:
        each = tl.cdiv(time, SEGMENT)
        segment = number // (SEGMENT // CHUNK)
        begins_segment = number % (SEGMENT // CHUNK) == 0
        index = segment_indices + (row * each + segment).to(tl.int64) * INDEX_WIDTH
        tl.store(index, first, begins_segment)
        tl.store(index + INDEX_COUNT, tl.minimum(time - number * CHUNK, SEGMENT), begins_segment)
        tl.store(index + INDEX_SEQUENCE, row, begins_segment)
        tl.store(index + INDEX_NUMBER, segment, begins_segment)
        tl.store(first_segments + row, row * each + segment, number == 0)
        tl.store(first_segments + rows, rows * each, is_last)


@kernel(budget=SMALL, targets=NVIDIA, numeric=("SEGMENT",))
@triton.jit
def rule_gates(
    g: Pointer.gate, beta: Pointer.strength, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    chunk_indices: Pointer.int32, first_segments: Pointer.int32, segment_indices: Pointer.int32,
    gates: Pointer.float32, status_word: Pointer.int64, fault: Int32, heads: Int32, rows: Int64, time: Int32,
    g_batch_stride: Int64, g_token_stride: Int64, g_head_stride: Int64,
    beta_batch_stride: Int64, beta_token_stride: Int64, beta_head_stride: Int64,
    RAISE: tl.constexpr, INDEX: tl.constexpr, SEGMENTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """The running sum of g in float64, and what is computed from it; tokens past the end have g = 0 and β = 0.

    A g that resets the state counts as LEAST: e^{G_i−G_j} is 0 across it, and sums stay small enough for the others.
    Its own e^G is −0, by which kernels whose sums are not exactly 0 there know that its gradient is.

    With INDEX the sequences are the rows of a batch, and where they lie is written here, with SEGMENTS of segments too.
    No argument of this kernel is promised to be aligned, so its sums have one layout and one order.
    """
    CHUNK: tl.constexpr = 64
    blocks = tl.cdiv(heads, HEADS)
    slot = tl.program_id(0) // blocks
    head = (tl.program_id(0) % blocks) * HEADS + tl.arange(0, HEADS)
    if INDEX:
        chunks_of_row = tl.cdiv(time, CHUNK)
        row_of_batch, number = slot // chunks_of_row, slot % chunks_of_row
        begin = number * CHUNK
        first = row_of_batch * time + begin
        count = tl.minimum(time - number * CHUNK, CHUNK)
        if tl.program_id(0) % blocks == 0:
            _write_index(
                sequence_begins, first_chunks, chunk_indices, first_segments, segment_indices, slot, first, count,
                row_of_batch, number, rows, time, SEGMENTS, CHUNK, SEGMENT,
            )  # fmt: skip
    else:
        count = tl.load(chunk_indices + slot.to(tl.int64) * INDEX_WIDTH + INDEX_COUNT)
        if count == 0:
            return
        first = tl.load(chunk_indices + slot.to(tl.int64) * INDEX_WIDTH)
        row_of_batch, begin = 0, first  # packed sequences lie in one row
    row = tl.arange(0, CHUNK)
    token = (first + row).to(tl.int64)
    inside = (row < count)[:, None] & (head < heads)[None, :]
    wide_head = head.to(tl.int64)[None, :]
    batch = tl.cast(row_of_batch, tl.int64)
    token_of_row = (begin + row).to(tl.int64)
    g_row = (g + batch * g_batch_stride) + (token_of_row * g_token_stride)[:, None]
    decay = tl.load(g_row + wide_head * g_head_stride, inside, other=0).to(tl.float32)
    if RAISE:
        record(status_word, fault, token[:, None] * heads + wide_head, decay.to(tl.int64), inside & (decay > 0))
    is_reset = decay < LEAST
    decay = tl.where(is_reset, LEAST, decay)
    G = tl.cumsum(decay.to(tl.float64), 0)
    high = G.to(tl.float32)
    low = (G - high.to(tl.float64)).to(tl.float32)
    end = tl.sum(tl.where(row[:, None] == CHUNK - 1, G, 0.0), 0)
    beta_row = (beta + batch * beta_batch_stride) + (token_of_row * beta_token_stride)[:, None]
    strength = tl.load(beta_row + wide_head * beta_head_stride, inside, other=0).to(tl.float32)
    place = gates + (slot.to(tl.int64) * heads + wide_head) * (GATE_ROWS * CHUNK) + row[:, None]
    stored = (head < heads)[None, :] & (row < CHUNK)[:, None]
    from_start = tl.exp(high)
    from_start = tl.where(is_reset, from_start * -1.0, from_start + from_start * low)
    tl.store(place, high, stored)
    tl.store(place + GATE_LOW * CHUNK, low, stored)
    tl.store(place + GATE_STRENGTH * CHUNK, strength, stored)
    tl.store(place + GATE_FROM_START * CHUNK, from_start, stored)
    tl.store(place + GATE_TO_END * CHUNK, tl.exp((end[None, :] - G).to(tl.float32)), stored)


def gate_region(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    return {"gates": (torch.float32, shape.lanes * GATE_ROWS.value * packing.CHUNK)}


def bind_gates(setup: Setup, shape: Shape, segments: tuple[bool, ...], raises: bool) -> Callable[..., None]:
    """Where chunks lie, and their gates: `launch(memory, cu_seqlens, g, beta)`. One launch for the rows of a batch.

    Arguments as in `bind_chunk_indices`; a positive g is reported too.
    """
    index = bind_chunk_indices(setup, shape, segments, raises) if shape.is_packed else None
    variants = {
        also: setup.kernel(
            rule_gates, gate=shape.gate, strength=shape.strength, RAISE=raises, INDEX=not shape.is_packed,
            SEGMENTS=also, SEGMENT=packing.SEGMENT,
        )
        for also in ((False,) if shape.is_packed else segments)
    }  # fmt: skip
    grid = (shape.chunks * -(-shape.heads // HEADS.value),)

    def launch(memory: Memory, cu_seqlens: Tensor | None, g: Tensor, beta: Tensor) -> None:
        if index and cu_seqlens is not None:
            index(memory, cu_seqlens)
        absent = memory["sequence_begins"]  # stands for a pointer that no variant writes
        g_batch, g_token, g_head = g.stride()
        beta_batch, beta_token, beta_head = beta.stride()
        variants[index is None and "segment_indices" in memory].launch(
            grid, g=g, beta=beta, sequence_begins=memory["sequence_begins"], first_chunks=memory["first_chunks"],
            chunk_indices=memory["chunk_indices"], first_segments=memory.get("first_segments", absent),
            segment_indices=memory.get("segment_indices", absent), gates=memory["gates"],
            status_word=status_word(setup.device), fault=POSITIVE_GATE.row, heads=shape.heads, rows=shape.rows,
            time=shape.time, g_batch_stride=g_batch, g_token_stride=g_token, g_head_stride=g_head,
            beta_batch_stride=beta_batch, beta_token_stride=beta_token, beta_head_stride=beta_head,
        )  # fmt: skip

    return launch
