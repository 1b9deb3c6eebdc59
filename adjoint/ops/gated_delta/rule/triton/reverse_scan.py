"""The scan of the state's gradient from chunk to chunk, last to first.

    Y = Tᵀ Pᵀ do + W dS⁺
    dS = e^Γ dS⁺ + qᵀ (scale·e^G ⊙ do) − kᵀ (β e^G ⊙ Y)

Only this goes from chunk to chunk, so it is two products, one after the other, and two beside them. It computes with
dSᵀ, as the forward's scan does with Sᵀ: what a product gives becomes the left operand of the next where it is, in
registers. It leaves Yᵀ [chunks, H, V, 64] and dS⁺ᵀ [chunks, H, V, K]; where a forward scans segments of a sequence at
once, so does this, see `compose_transitions.py`. A forward cannot put T before the state like this, as w and u do,
because v − k S cancels; nothing does here.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Budget, Float32, Int32, Int64x16, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import shape as sizes
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, clamp_tile, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_DECAY, GATE_FROM_START, GATE_ROWS, GATE_STRENGTH


@kernel(
    budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=64), targets=NVIDIA,
    numeric=("SEGMENT", "PRECISION"), schedule=("V_BLOCK", "STAGES"),
)  # fmt: skip
@triton.jit
def rule_reverse_scan(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32, W: Pointer16.element,
    local_gradients: Pointer16.element, segment_indices: Pointer.int32, sequence_begins: Pointer.int32,
    first_chunks: Pointer.int32, dfinal_state: PointerIf16.float32, dinitial_state: PointerIf16.float32,
    dsegment_states: Pointer16.float32, Y: Pointer16.element, dstates: Pointer16.element, heads: Int32, scale: Float32,
    q_token_stride: Int64x16, q_head_stride: Int64x16, k_token_stride: Int64x16, k_head_stride: Int64x16,
    do_token_stride: Int64x16, do_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, FINAL: tl.constexpr,
    INITIAL: tl.constexpr, SEGMENTED: tl.constexpr, TRANSITION: tl.constexpr, SEGMENT: tl.constexpr,
    REVERSE_SEGMENT: tl.constexpr, UNSPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one span and value head, for V_BLOCK columns of V and all of K; transposed.

    A span is a whole sequence, of up to UNSPLIT tokens where that is not 0, or (SEGMENTED) a segment of REVERSE_SEGMENT
    tokens of a longer one: the last ends with the gradient of the final state, any other with what `dsegment_states`,
    [places, H, V, K] in float32, has of the segment after it. With TRANSITION the others end with 0, and what every
    segment but the first then begins with is all that is stored: in `dsegment_states`. `segment_indices` are of SEGMENT
    tokens. UPSTREAM, FINAL: whether there is a gradient of the outputs, of the final state. INITIAL: whether that of
    the initial state is needed.
    """
    CHUNK: tl.constexpr = 64
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    span = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    if SEGMENTED:
        if tl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT) == 0:
            return
        sequence = tl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(tl.int64)
        index = tl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
        begin = tl.load(sequence_begins + sequence)
        count = tl.load(sequence_begins + sequence + 1) - begin
        if (count <= UNSPLIT) | (index % (REVERSE_SEGMENT // SEGMENT) != 0):
            return
        if TRANSITION:  # noqa: SIM102  (a constant, and what only the GPU knows)
            if index == 0:
                return
        first = (begin + index * SEGMENT).to(tl.int64)
        ends_here = count - index * SEGMENT <= REVERSE_SEGMENT
        count = tl.minimum(count - index * SEGMENT, REVERSE_SEGMENT)
        slot = tl.load(first_chunks + sequence) + index * (SEGMENT // CHUNK)
        # A sequence has a place for each of its segments but the first, and no two meet: see `saved_states`.
        after = (begin // REVERSE_SEGMENT + index // (REVERSE_SEGMENT // SEGMENT)).to(tl.int64)
    else:
        sequence = span
        first = tl.load(sequence_begins + span).to(tl.int64)
        count = tl.load(sequence_begins + span + 1) - tl.load(sequence_begins + span)
        slot = tl.load(first_chunks + span)
        if UNSPLIT > 0:  # noqa: SIM102
            if count > UNSPLIT:
                return
    chunks = tl.cdiv(count, CHUNK)
    last = tl.maximum(chunks - 1, 0)
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    row = tl.arange(0, CHUNK)
    kind = k.dtype.element_ty

    state_place = (sequence * heads + head) * (K_SIZE * V_SIZE)
    dS = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    if FINAL:
        in_state = (k_column < K_SIZE)[:, None] & (v_row < V_SIZE)[None, :]
        if SEGMENTED:
            in_state &= ends_here
        source = dfinal_state + state_place + (k_column[:, None] * V_SIZE + v_row[None, :])
        dS = tl.trans(tl.load(source, in_state, other=0.0))
    if SEGMENTED and not TRANSITION:  # noqa: SIM102
        if not ends_here:
            end = dsegment_states + (after * heads + head) * (V * K)
            stored = (v_row < V)[:, None] & (k_column < K)[None, :]
            dS = tl.load(end + (v_row[:, None] * K + k_column[None, :]), stored, other=0.0)

    # Bases move from chunk to chunk, and offsets stay: 32 bits each.
    token = first + last.to(tl.int64) * CHUNK
    q += token * q_token_stride + (head // GROUP).to(tl.int64) * q_head_stride
    k += token * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
    do += token * do_token_stride + head.to(tl.int64) * do_head_stride
    lane = (slot + last).to(tl.int64) * heads + head
    gates += lane * (GATE_ROWS * CHUNK)
    W += lane * (CHUNK * K)
    local_gradients += lane * (V * CHUNK)
    Y += lane * (V * CHUNK)
    dstates += lane * (V * K)
    q_offset = row[:, None] * q_token_stride.to(tl.int32) + k_column[None, :]
    k_offset = row[:, None] * k_token_stride.to(tl.int32) + k_column[None, :]
    W_offset = row[:, None] * K + k_column[None, :]
    do_offset = row[None, :] * do_token_stride.to(tl.int32) + v_row[:, None]
    values_offset = v_row[:, None] * CHUNK + row[None, :]
    dstates_offset = v_row[:, None] * K + k_column[None, :]
    in_keys = (k_column < K)[None, :]
    in_values = (v_row < V)[:, None]
    in_chunk = row < CHUNK
    if K % K_BLOCK == 0 and V % V_BLOCK == 0:  # masks for what is there always cost registers
        in_keys = tl.full([1, K_BLOCK], 1, tl.int1)
        in_values = tl.full([V_BLOCK, 1], 1, tl.int1)
        in_chunk = tl.full([CHUNK], 1, tl.int1)
    rows = count - last * CHUNK
    decay = tl.load(gates + GATE_DECAY, mask=count > 0, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        narrow = dS.to(kind)
        if not TRANSITION:
            tl.store(dstates + dstates_offset, narrow, in_values & in_keys)
        W_tile = tl.load(W + W_offset, in_chunk[:, None] & in_keys, other=0)
        keys = tl.load(k + k_offset, (row < rows)[:, None] & in_keys, other=0)
        strength = tl.load(gates + GATE_STRENGTH * CHUNK + row)
        from_start = tl.load(gates + GATE_FROM_START * CHUNK + row)
        Y_tile = tl.zeros([V_BLOCK, CHUNK], tl.float32)
        if kind != tl.float32:
            Y_tile = tl.dot((dS - narrow.to(tl.float32)).to(kind), tl.trans(W_tile), input_precision=PRECISION)
        Y_tile = tl.dot(narrow, tl.trans(W_tile), Y_tile, input_precision=PRECISION)
        dS *= decay
        if UPSTREAM:
            local = tl.load(local_gradients + values_offset, in_values & in_chunk[None, :], other=0)
            Y_tile += local.to(tl.float32)
            upstream = tl.load(do + do_offset, in_values & (row < rows)[None, :], other=0)
            queries = tl.load(q + q_offset, (row < rows)[:, None] & in_keys, other=0)
            scaled_upstream = upstream.to(tl.float32) * (from_start * scale)[None, :]
            high = scaled_upstream.to(kind)
            if kind != tl.float32:
                dS = tl.dot((scaled_upstream - high.to(tl.float32)).to(kind), queries, dS, input_precision=PRECISION)
            dS = tl.dot(high, queries, dS, input_precision=PRECISION)
        if not TRANSITION:
            tl.store(Y + values_offset, Y_tile.to(kind), in_values & in_chunk[None, :])
        dS = tl.dot((Y_tile * -(strength * from_start)[None, :]).to(kind), keys, dS, input_precision=PRECISION)
        rows = CHUNK
        q -= CHUNK * q_token_stride
        k -= CHUNK * k_token_stride
        gates -= heads * (GATE_ROWS * CHUNK)
        W -= heads * (CHUNK * K)
        local_gradients -= heads * (V * CHUNK)
        do -= CHUNK * do_token_stride
        Y -= heads * (V * CHUNK)
        dstates -= heads * (V * K)
        # A chunk ahead, because the next product would wait for it.
        decay = tl.load(gates + GATE_DECAY, mask=step + 1 < chunks, other=0.0)
    # 0, and known after the loop alone: or places would stay in registers through it.
    zero = tl.minimum(rows, 0)
    if TRANSITION:
        place = dsegment_states + ((after - 1) * heads + head) * (V * K) + zero
        tl.store(place + (v_row[:, None] * K + k_column[None, :]), dS, (v_row < V)[:, None] & (k_column < K)[None, :])
    elif INITIAL:
        program += zero
        head = (program // blocks) % heads
        sequence = (program // (heads * blocks)).to(tl.int64)
        in_state = (k_column < K_SIZE)[None, :] & (v_row < V_SIZE)[:, None]
        if SEGMENTED:
            span = sequence
            sequence = tl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(tl.int64)
            in_state &= tl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER) == 0
        place = dinitial_state + (sequence * heads + head) * (K_SIZE * V_SIZE)
        tl.store(place + (k_column[None, :] * V_SIZE + v_row[:, None]), dS, in_state)


def reverse_scan_regions(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """Yᵀ [chunks, H, V, 64] and dS⁺ᵀ [chunks, H, V, K]."""
    K, V = pad_to_16(shape.K), pad_to_16(shape.V)
    return {"Y": (shape.element, shape.lanes * V * CHUNK), "dstates": (shape.element, shape.lanes * V * K)}


class Upstream(NamedTuple):
    """What every reverse scan reads: tokens, and the gradients of what came of them; None where there is none."""

    q: TokenRows
    k: TokenRows
    do: TokenRows | None
    dfinal_state: Tensor | None
    scale: float


ReverseScan = Callable[..., None]
"""`launch(memory, upstream, dinitial_state)`."""


def bind_reverse_scan(setup: Setup, shape: Shape, *, upstream: bool, final: bool, initial: bool) -> ReverseScan:
    """Y and dS⁺ of every chunk, and the initial states' gradient; but for sequences that are split.

    Args:
        upstream: whether there is a gradient of the outputs.
        final: whether there is one of the final states.
        initial: whether that of the initial states is needed.
    """
    spans = 0 if shape.is_split_in_reverse and not shape.is_packed else shape.sequences
    flags = {"UPSTREAM": upstream, "FINAL": final, "INITIAL": initial}
    return _bind(setup, shape, "reverse", spans, **flags, SEGMENTED=False, TRANSITION=False)


def bind_segment_scan(setup: Setup, shape: Shape, *, upstream: bool, final: bool, initial: bool) -> ReverseScan:
    """The same of the sequences that are split, all segments at once."""
    flags = {"UPSTREAM": upstream, "FINAL": final, "INITIAL": initial}
    return _bind(setup, shape, "segment", shape.segments, **flags, SEGMENTED=True, TRANSITION=False)


def bind_segment_terms(setup: Setup, shape: Shape, *, upstream: bool, final: bool) -> ReverseScan:
    """What segments make of a gradient 0 of the state they end with, the last of the final state's, into
    `dsegment_states`."""
    flags = {"UPSTREAM": upstream, "FINAL": final, "INITIAL": False}
    return _bind(setup, shape, "segment", shape.segments, **flags, SEGMENTED=True, TRANSITION=True)


def _bind(setup: Setup, shape: Shape, part: str, spans: int, **flags: bool) -> ReverseScan:
    """A scan under the `part` of the schedule that is for whole sequences, or for segments."""
    schedule = setup.schedule
    block, stages = clamp_tile(schedule[f"{part}_block"], shape.V), schedule[f"{part}_stages"]
    scan = setup.either(
        rule_reverse_scan, element=shape.element, K_SIZE=shape.K, V_SIZE=shape.V, K_BLOCK=next_power_of_two(shape.K),
        V_BLOCK=block, STAGES=stages, SEGMENT=packing.SEGMENT, REVERSE_SEGMENT=sizes.REVERSE_SEGMENT,
        UNSPLIT=shape.unsplit_reverse, PRECISION="ieee", num_warps=schedule[f"{part}_warps"], num_stages=stages,
        **shape.constants, **flags,
    )  # fmt: skip
    grid = (spans * shape.heads * -(-pad_to_16(shape.V) // block),)

    def launch(memory: Memory, upstream: Upstream, dinitial_state: Tensor | None) -> None:
        q, k, do, dfinal_state, scale = upstream
        gradient, absent = do or q, memory["gates"]  # stands for a pointer that no variant reads
        scan[is_aligned(dfinal_state, dinitial_state)].launch(
            grid, q=q.start, k=k.start, do=gradient.start, gates=memory["gates"], W=memory["W"],
            local_gradients=memory["local_gradients"], segment_indices=memory["segment_indices"],
            sequence_begins=memory["sequence_begins"], first_chunks=memory["first_chunks"],
            dfinal_state=absent if dfinal_state is None else dfinal_state,
            dinitial_state=absent if dinitial_state is None else dinitial_state,
            dsegment_states=memory.get("dsegment_states", absent), Y=memory["Y"], dstates=memory["dstates"],
            heads=shape.heads, scale=scale, q_token_stride=q.token_stride, q_head_stride=q.head_stride,
            k_token_stride=k.token_stride, k_head_stride=k.head_stride, do_token_stride=gradient.token_stride,
            do_head_stride=gradient.head_stride,
        )  # fmt: skip

    return launch
