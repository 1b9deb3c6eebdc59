"""The state, and its gradient, from segment to segment of the sequences that are split.

Few heads would leave most of a card idle in a scan from chunk to chunk, so the segments of a long sequence are scanned
at once. A segment makes M S + B of the state S it begins with; and of the gradient dS of the state it ends with it
makes Mᵀ dS + B', by the M of the forward. The forward:

    transitions          M and B of every segment
    compose_transitions  the state at the start of every segment
    state scan           every segment from there

and the backward:

    transitions                  M of every segment but the first and the last of a sequence
    reverse scan                 B' of every segment but the first: from 0, the last from the final state's gradient
    compose_reverse_transitions  the gradient of the state that every segment but the first begins with
    reverse scan                 every segment from the gradient that the one after it begins with

Segments of the reverse scan have REVERSE_SEGMENT tokens, more than those between saved states: these kernels go through
them one after the other. A sequence of up to UNSPLIT tokens is scanned in one, by programs that have fewer columns of
V.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Budget, Int32, Pointer, Pointer16, kernel
from adjoint.core.launch import Launch, Setup
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule import shape as sizes
from adjoint.ops.gated_delta.rule.shape import Shape, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import fits

_BUDGET = Budget(registers=255, shared_bytes=232448)
_NUMERIC = {"compose_precision": "PRECISION"}
_REVERSE_NUMERIC = {"reverse_segment": "REVERSE_SEGMENT", "unsplit_reverse": "UNSPLIT", **_NUMERIC}


@kernel(budget=_BUDGET, targets=NVIDIA, numeric={"segment": "SEGMENT", **_NUMERIC}, schedule=("STAGES",))
@triton.jit
def rule_compose_transitions(
    transitions: Pointer16.float32, sequence_begins: Pointer.int32, first_segments: Pointer.int32,
    initial_state: Pointer.float32, saved: Pointer.float32, heads: Int32,
    K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    INITIAL: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the start of every segment but the first: S ← M S + B, in float32; one program per sequence, head
    and block of V."""
    V_BLOCK: tl.constexpr = 16  # what sizes are padded to, and the fewest of a product
    blocks: tl.constexpr = V // V_BLOCK
    LINES: tl.constexpr = K + V
    size: tl.constexpr = K_SIZE * V_SIZE
    program = tl.program_id(0)
    sequence = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    begin = tl.load(sequence_begins + sequence)
    count = tl.load(sequence_begins + sequence + 1) - begin
    if count <= SEGMENT:
        return
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    in_keys = fits(k_column, K, K_BLOCK)
    in_state = fits(k_column, K_SIZE, K_BLOCK)[:, None] & fits(v_row, V_SIZE, V_BLOCK)[None, :]
    state_place = k_column[:, None] * V_SIZE + v_row[None, :]
    S = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    if INITIAL:
        start = initial_state + (sequence * heads + head) * size
        S = tl.trans(tl.load(start + state_place, in_state, other=0.0))
    segment = tl.load(first_segments + sequence).to(tl.int64)
    transitions += (segment * heads + head) * (LINES * K)
    saved += ((begin // SEGMENT).to(tl.int64) * heads + head) * size
    M_offset = k_column[:, None] * K + k_column[None, :]
    B_offset = (K + v_row)[:, None] * K + k_column[None, :]
    for _ in tl.range(0, tl.cdiv(count, SEGMENT) - 1, num_stages=STAGES):
        M = tl.load(transitions + M_offset, in_keys[:, None] & in_keys[None, :], other=0.0)
        B = tl.load(transitions + B_offset, fits(v_row, V, V_BLOCK)[:, None] & in_keys[None, :], other=0.0)
        S = tl.dot(S, M, B, input_precision=PRECISION)
        tl.store(saved + state_place, tl.trans(S), in_state)
        transitions += heads * (LINES * K)
        saved += heads * size


@kernel(budget=_BUDGET, targets=NVIDIA, numeric=_REVERSE_NUMERIC, schedule=("STAGES",))
@triton.jit
def rule_compose_reverse_transitions(
    transitions: Pointer16.float32, sequence_begins: Pointer.int32, dsegment_states: Pointer16.float32, heads: Int32,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, REVERSE_SEGMENT: tl.constexpr, UNSPLIT: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state at the start of every segment but the first, in float32; one program per sequence, head
    and block of V, which V is a multiple of.

    `transitions` has Mᵀ, [places, H, K, K]; `dsegment_states` B', and then the result in its place, transposed,
    [places, H, V, K]: that of the last segment is complete as it is.
    """
    V_BLOCK: tl.constexpr = 16
    blocks: tl.constexpr = V // V_BLOCK
    program = tl.program_id(0)
    sequence = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    begin = tl.load(sequence_begins + sequence)
    count = tl.load(sequence_begins + sequence + 1) - begin
    if count <= UNSPLIT:
        return
    segments = tl.cdiv(count, REVERSE_SEGMENT)
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    in_keys = (k_column < K)[None, :]
    in_M = (k_column < K)[:, None] & in_keys
    last = (begin // REVERSE_SEGMENT + segments).to(tl.int64) - 2
    transitions += ((last - 1) * heads + head) * (K * K)
    dsegment_states += (last * heads + head) * (V * K)
    M_offset = k_column[:, None] * K + k_column[None, :]
    offset = v_row[:, None] * K + k_column[None, :]
    dS = tl.load(dsegment_states + offset, in_keys, other=0.0)
    for _ in tl.range(0, segments - 2, num_stages=STAGES):
        dsegment_states -= heads * (V * K)
        M_transposed = tl.load(transitions + M_offset, in_M, other=0.0)
        segment_term = tl.load(dsegment_states + offset, in_keys, other=0.0)
        dS = tl.dot(dS, tl.trans(M_transposed), segment_term, input_precision=PRECISION)
        tl.store(dsegment_states + offset, dS, in_keys)
        transitions -= heads * (K * K)


def transition_region(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """Mᵀ and Bᵀ [segments, H, K + V, K], of the forward."""
    K, V = pad_to_16(shape.K), pad_to_16(shape.V)
    return {"transitions": (torch.float32, shape.segments * shape.heads * (K + V) * K)}


def reverse_transition_regions(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """Mᵀ [places, H, K, K] and the gradients dSᵀ [places, H, V, K] between segments of the reverse scan.

    A sequence has a place for each of its segments but the first, and no two meet: see `saved_states`.
    """
    places, K, V = (shape.tokens - 1) // sizes.REVERSE_SEGMENT, pad_to_16(shape.K), pad_to_16(shape.V)
    return {
        "transitions": (torch.float32, places * shape.heads * K * K),
        "dsegment_states": (torch.float32, places * shape.heads * V * K),
    }


def _bind(setup: Setup, shape: Shape, kernel: Any, **constants: Any) -> tuple[Launch, tuple[int]]:
    """One of these kernels, and its grid."""
    stages, V = setup.schedule["compose_stages"], pad_to_16(shape.V)
    bound = setup.kernel(
        kernel, K=pad_to_16(shape.K), V=V, K_BLOCK=next_power_of_two(shape.K), STAGES=stages, PRECISION="tf32x3",
        num_warps=setup.schedule["compose_warps"], num_stages=stages, **constants,
    )  # fmt: skip
    return bound, (shape.sequences * shape.heads * (V // 16),)


def bind_compose_transitions(setup: Setup, shape: Shape, initial: bool) -> Callable[..., None]:
    """The state at the start of every segment but a sequence's first: `launch(memory, initial_state, saved)`."""
    compose, grid = _bind(
        setup, shape, rule_compose_transitions, K_SIZE=shape.K, V_SIZE=shape.V, INITIAL=initial,
        SEGMENT=packing.SEGMENT,
    )  # fmt: skip

    def launch(memory: Memory, initial_state: Tensor | None, saved: Any) -> None:
        compose.launch(
            grid, transitions=memory["transitions"], sequence_begins=memory["sequence_begins"],
            first_segments=memory["first_segments"],
            initial_state=memory["gates"] if initial_state is None else initial_state, saved=saved, heads=shape.heads,
        )  # fmt: skip

    return launch


def bind_compose_reverse_transitions(setup: Setup, shape: Shape) -> Callable[..., None]:
    """The gradient of the state that every segment but a sequence's first begins with: `launch(memory)`, into
    `dsegment_states`."""
    compose, grid = _bind(
        setup, shape, rule_compose_reverse_transitions, REVERSE_SEGMENT=sizes.REVERSE_SEGMENT,
        UNSPLIT=shape.unsplit_reverse,
    )  # fmt: skip

    def launch(memory: Memory) -> None:
        compose.launch(
            grid, transitions=memory["transitions"], sequence_begins=memory["sequence_begins"],
            dsegment_states=memory["dsegment_states"], heads=shape.heads,
        )  # fmt: skip

    return launch
