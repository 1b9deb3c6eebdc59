"""The scan of the state from chunk to chunk, and what a segment makes of any state.

One chunk of 64 tokens of one value head, `S` the state it begins with:

    r = β ⊙ (v − e^G ⊙ (k S)),  v' = T r
    S ← e^Γ S + kᵀ (e^{Γ−G} ⊙ v')

Where few heads would leave most of a card idle, segments of a long sequence are scanned at once. A segment makes M S +
B of a state S it begins with: this kernel gives M and B, `compose_transitions.py` the state at the start of every
segment, and this kernel then scans each from there. Cuts are at fixed positions from the start of a sequence.

Only the scan goes from chunk to chunk, so it is three products and little else. It computes with everything transposed:
an accumulator then becomes the left operand of the next product where it is, in registers. A chunk's products read k
and v past the end of a sequence as 0, its β as 0 and its T as I.

A dot adds its terms in an order that is fixed by its instruction; nothing else here adds along an axis.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Budget, Int32, Int64x16, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Launch, Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule import shape as sizes
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, clamp_tile, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import fits
from adjoint.ops.gated_delta.rule.triton.gates import (
    GATE_DECAY,
    GATE_FROM_START,
    GATE_ROWS,
    GATE_STRENGTH,
    GATE_TO_END,
)


@kernel(
    budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=64), targets=NVIDIA,
    numeric=("PARTS", "SEGMENT", "PRECISION"), schedule=("V_BLOCK",),
)  # fmt: skip
@triton.jit
def rule_state_scan(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    initial_state: PointerIf16.float32, saved: PointerIf16.float32, states: Pointer16.element,
    new_values: Pointer16.element, final_state: PointerIf16.float32, heads: Int32, k_token_stride: Int64x16,
    k_head_stride: Int64x16, v_token_stride: Int64x16, v_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, PARTS: tl.constexpr, SEGMENTED: tl.constexpr, INITIAL: tl.constexpr,
    SAVE: tl.constexpr, FINAL: tl.constexpr, TRANSITION: tl.constexpr, SEGMENT: tl.constexpr,
    REVERSE_SEGMENT: tl.constexpr, UNSPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the start of every chunk, and v' of every chunk, of one span; both transposed, [V, ...].

    A span is a whole sequence, or (SEGMENTED) a segment of one, which begins with a saved state unless it is the first.
    With TRANSITION it is what a segment makes of any state, M S + B: the columns of M, from those of the identity and
    without values, then those of B, from 0. Their transposes, [K + V, K] in float32, are all that is stored: in the
    place of final states. With V = 0 there is M alone, for the reverse scan: of segments of REVERSE_SEGMENT tokens of
    sequences of more than UNSPLIT, but for the first and the last of each.
    K and V are the widths of rows in memory, K_SIZE and V_SIZE those of states.
    """
    CHUNK: tl.constexpr = 64
    LINES: tl.constexpr = K + V if TRANSITION else V
    blocks: tl.constexpr = (LINES + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    span = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    if SEGMENTED:
        count = tl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT)
        if count == 0:
            return
        first = tl.load(segment_indices + span * INDEX_WIDTH).to(tl.int64)
        sequence = tl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(tl.int64)
        index = tl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
        if TRANSITION and V == 0:
            length = tl.load(sequence_begins + sequence + 1) - tl.load(sequence_begins + sequence)
            is_between = (index > 0) & (length - index * SEGMENT > REVERSE_SEGMENT)
            if (length <= UNSPLIT) | (index % (REVERSE_SEGMENT // SEGMENT) != 0) | (not is_between):
                return
            # From SEGMENT to REVERSE_SEGMENT, as a number the compiler does not know: it would unroll the loop.
            count *= REVERSE_SEGMENT // SEGMENT
    else:
        sequence = span
        first = tl.load(sequence_begins + span).to(tl.int64)
        count = tl.load(sequence_begins + span + 1) - tl.load(sequence_begins + span)
        index = 0
    slot = (tl.load(first_chunks + sequence) + index * (SEGMENT // CHUNK)).to(tl.int64)
    begin = tl.load(sequence_begins + sequence)
    saved_slot = (begin // SEGMENT + index).to(tl.int64) - 1  # where the state at its start is saved
    if TRANSITION and V == 0:
        saved_slot = (begin // REVERSE_SEGMENT + index // (REVERSE_SEGMENT // SEGMENT)).to(tl.int64) - 1
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    row = tl.arange(0, CHUNK)
    kind = k.dtype.element_ty

    size: tl.constexpr = K_SIZE * V_SIZE
    in_state = fits(k_column, K_SIZE, K_BLOCK)[:, None] & fits(v_row, V_SIZE, V_BLOCK)[None, :]
    state_place = k_column[:, None] * V_SIZE + v_row[None, :]
    S = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    if INITIAL:
        start = initial_state + (sequence * heads + head) * size
        S = tl.trans(tl.load(start + state_place, in_state & (index == 0), other=0.0))
    if TRANSITION:
        unit = (v_row[:, None] == k_column[None, :]) & (v_row < K)[:, None]
        S = tl.where(unit, 1.0, 0.0)
    elif SEGMENTED:  # noqa: SIM102  (a constant, and what only the GPU knows)
        if index > 0:
            S = tl.trans(tl.load(saved + (saved_slot * heads + head) * size + state_place, in_state, other=0.0))

    # Bases move from chunk to chunk, and offsets stay: 32 bits each.
    k += first * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
    v += first * v_token_stride + head.to(tl.int64) * v_head_stride
    lane = slot * heads + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (PARTS * CHUNK * CHUNK)
    new_values += lane * (V * CHUNK)
    states += lane * (V * K)
    k_offset = row[:, None] * k_token_stride.to(tl.int32) + k_column[None, :]
    in_keys = fits(k_column, K, K_BLOCK)
    if TRANSITION:
        v_column = v_row - K
        in_values = (v_column >= 0) & (v_column < V)
    else:
        v_column = v_row
        in_values = fits(v_row, V, V_BLOCK)
    v_offset = row[:, None] * v_token_stride.to(tl.int32) + v_column[None, :]
    T_offset = row[:, None] * CHUNK + row[None, :]
    new_offset = v_row[:, None] * CHUNK + row[None, :]
    states_offset = v_row[:, None] * K + k_column[None, :]
    stored = in_values[:, None] & in_keys[None, :]
    decay = tl.load(gates + GATE_DECAY, mask=count > 0)
    next_decay = tl.load(gates + heads * (GATE_ROWS * CHUNK) + GATE_DECAY, mask=count > CHUNK)
    for chunk in range(tl.cdiv(count, CHUNK)):
        if SAVE:  # noqa: SIM102
            if (chunk > 0) & (chunk % (SEGMENT // CHUNK) == 0):
                place = saved + ((saved_slot + chunk // (SEGMENT // CHUNK)) * heads + head) * size
                tl.store(place + state_place, tl.trans(S), in_state)
        narrow = S.to(kind)
        if not TRANSITION:
            tl.store(states + states_offset, narrow, stored)
        remaining = count - chunk * CHUNK
        keys = tl.load(k + k_offset, (row < remaining)[:, None] & in_keys[None, :], other=0)
        values = tl.load(v + v_offset, (row < remaining)[:, None] & in_values[None, :], other=0)
        strength = tl.load(gates + GATE_STRENGTH * CHUNK + row)
        from_start = tl.load(gates + GATE_FROM_START * CHUNK + row)
        inverse = tl.load(T + T_offset)
        fresh = strength[None, :] * tl.trans(values).to(tl.float32)
        old = (strength * from_start)[None, :]
        predicted = tl.dot(narrow, tl.trans(keys), input_precision=PRECISION)
        residual = fresh - old * predicted
        rounded = residual.to(kind)
        v_new = tl.dot(rounded, tl.trans(inverse), residual, input_precision=PRECISION)
        if PARTS == 2:
            inverse_low = tl.load(T + CHUNK * CHUNK + T_offset)
            v_new = tl.dot(rounded, tl.trans(inverse_low), v_new, input_precision=PRECISION)
        to_end = tl.load(gates + GATE_TO_END * CHUNK + row)
        S = tl.dot((to_end[None, :] * v_new).to(kind), keys, S * decay, input_precision=PRECISION)
        if not TRANSITION:
            tl.store(new_values + new_offset, v_new.to(kind), in_values[:, None] & tl.full([1, CHUNK], 1, tl.int1))
        k += CHUNK * k_token_stride
        v += CHUNK * v_token_stride
        gates += heads * (GATE_ROWS * CHUNK)
        T += heads * (PARTS * CHUNK * CHUNK)
        new_values += heads * (V * CHUNK)
        states += heads * (V * K)
        # Two chunks ahead, because the next chunk would wait for it.
        decay = next_decay + 0.0  # an operation: loops that pass a value on as it is are not pipelined
        next_decay = tl.load(gates + heads * (GATE_ROWS * CHUNK) + GATE_DECAY, mask=remaining > 2 * CHUNK)
    if TRANSITION:
        place = final_state + ((saved_slot if V == 0 else span) * heads + head) * (LINES * K)
        place = place + v_row[:, None] * K + k_column[None, :]
        tl.store(place, S, fits(v_row, LINES, V_BLOCK)[:, None] & in_keys[None, :])
    elif FINAL:
        if SEGMENTED:  # the last of its sequence
            in_state &= first + count == tl.load(sequence_begins + sequence + 1)
        tl.store(final_state + (sequence * heads + head) * size + state_place, tl.trans(S), in_state)


def scan_regions(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """Sᵀ at the start of every chunk [chunks, H, V, K], and its v'ᵀ [chunks, H, V, 64]."""
    K, V = pad_to_16(shape.K), pad_to_16(shape.V)
    return {"states": (shape.element, shape.lanes * V * K), "new_values": (shape.element, shape.lanes * V * CHUNK)}


def _bind(setup: Setup, shape: Shape, parts: int, lines: int, **constants: Any) -> tuple[dict[bool, Launch], int]:
    """The variants of the scan by alignment, and how many blocks of so many lines each span has."""
    schedule, columns = setup.schedule, shape.K if constants.get("V") == 0 else shape.V
    block = clamp_tile(schedule["scan_block"], columns)
    settings = shape.constants | dict.fromkeys(("INITIAL", "SAVE", "FINAL", "TRANSITION"), False)
    settings |= {"REVERSE_SEGMENT": 0, "UNSPLIT": 0, **constants}
    bound = {
        aligned: setup.kernel(
            rule_state_scan, element=shape.element, K_SIZE=shape.K, V_SIZE=shape.V, K_BLOCK=next_power_of_two(shape.K),
            V_BLOCK=block, PARTS=parts, SEGMENT=packing.SEGMENT, PRECISION="ieee", aligned=aligned,
            num_warps=schedule["scan_warps"], num_stages=schedule["scan_stages"], **settings,
        )
        for aligned in ((True,) if settings["TRANSITION"] else (True, False))
    }  # fmt: skip
    return bound, -(-lines // block)


def bind_state_scan(
    setup: Setup, shape: Shape, parts: int, *, segmented: bool, initial: bool, saves: bool, final: bool
) -> Callable[..., None]:
    """States and new values of every chunk: `launch(memory, k, v, initial_state, saved, final_state)`.

    Args:
        parts: those of T.
        segmented: over segments, from the states in `saved`; otherwise over whole sequences, and `saves` says whether
            states between segments are written there.
        initial: whether there is an initial state.
        final: whether final states are written.
    """
    scan, blocks = _bind(
        setup, shape, parts, pad_to_16(shape.V), SEGMENTED=segmented, INITIAL=initial, SAVE=saves, FINAL=final
    )
    grid = ((shape.segments if segmented else shape.sequences) * shape.heads * blocks,)
    fills = segmented and final and shape.is_packed
    spans_of = "segment_indices" if segmented else "sequence_begins"

    def launch(
        memory: Memory, k: TokenRows, v: TokenRows, initial_state: Tensor | None, saved: Tensor | None = None,
        final_state: Tensor | None = None,
    ) -> None:  # fmt: skip
        if fills and final_state is not None:  # for sequences without a segment
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        absent = memory["gates"]  # stands for a pointer that no variant reads
        scan[is_aligned(initial_state, saved, final_state)].launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"], segment_indices=memory[spans_of],
            sequence_begins=memory["sequence_begins"], first_chunks=memory["first_chunks"],
            initial_state=absent if initial_state is None else initial_state, saved=absent if saved is None else saved,
            states=memory["states"], new_values=memory["new_values"],
            final_state=absent if final_state is None else final_state, heads=shape.heads,
            k_token_stride=k.token_stride, k_head_stride=k.head_stride, v_token_stride=v.token_stride,
            v_head_stride=v.head_stride,
        )  # fmt: skip

    return launch


def bind_transitions(setup: Setup, shape: Shape, parts: int, **constants: Any) -> Callable[..., None]:
    """What every segment makes of a state, M S + B: `launch(memory, k, v)`, Mᵀ and Bᵀ into `transitions`."""
    lines = pad_to_16(shape.K) + constants.get("V", pad_to_16(shape.V))
    transition, blocks = _bind(setup, shape, parts, lines, SEGMENTED=True, TRANSITION=True, **constants)
    grid = (shape.segments * shape.heads * blocks,)

    def launch(memory: Memory, k: TokenRows, v: TokenRows) -> None:
        absent = memory["gates"]  # stands for a pointer that is neither read nor written
        transition[True].launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory["segment_indices"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], initial_state=absent, saved=absent, states=memory["T"],
            new_values=memory["T"], final_state=memory["transitions"], heads=shape.heads,
            k_token_stride=k.token_stride, k_head_stride=k.head_stride, v_token_stride=v.token_stride,
            v_head_stride=v.head_stride,
        )  # fmt: skip

    return launch


def bind_reverse_transitions(setup: Setup, shape: Shape, parts: int) -> Callable[..., None]:
    """Mᵀ of the segments that gradients pass through, into `transitions`: `launch(memory, k)`.

    These are the segments of the reverse scan that are neither the first nor the last of a sequence that it splits.
    """
    reverse = {"V": 0, "REVERSE_SEGMENT": sizes.REVERSE_SEGMENT, "UNSPLIT": shape.unsplit_reverse}
    launch = bind_transitions(setup, shape, parts, **reverse)
    return lambda memory, k: launch(memory, k, k)
