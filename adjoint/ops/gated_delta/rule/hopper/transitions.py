"""What a segment makes of any state, for Hopper: `rule_state_scan` with TRANSITION.

One warpgroup scans 64 columns of M, from those of the identity and without values, or of B, from 0. They stay in the
accumulators of the tensor cores and are their left operand too, rounded in registers; k, v, T and the gates of the
chunk to come are copied into shared memory meanwhile. Each product is started before what can be done beside it.

    predicted = Sᵀ kᵀ     beside it: copies start, v is read
    v' = r + r T°ᵀ        beside it: S decays
    Sᵀ += w k
"""

from collections.abc import Callable, Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from adjoint.core.kernels import Budget, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, TILE
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_DECAY, GATE_ROWS

LINES = gl.constexpr(64)
"""Columns of M or B of a program."""

BUDGET = Budget(registers=255, shared_bytes=113 * 1024)
"""Of shared memory half of what a multiprocessor has: two programs run on it."""

Chunks = device.fields("ks vs Ts gates")
"""The chunks in shared memory, a stage each: k, v, T and the gates."""


@gluon.jit
def _fetch(tiles, stage, k, v, T, gates, count, value_count, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr):
    """Starts the copies of a chunk; rows past the end of its sequence are zeros."""
    device.fetch_tokens(tiles.ks.index(stage), k, K_STRIDE, count)
    device.fetch_tokens(tiles.vs.index(stage), v, V_STRIDE, value_count)
    device.Rows.of(CHUNK, CHUNK, CHUNK).fetch(tiles.Ts.index(stage), T)
    tiles.gates.fetch(stage, gates)
    async_copy.commit_group()


@kernel(budget=BUDGET, targets=("sm_90",), numeric=("SEGMENT",))
@gluon.jit
def rule_transitions_hopper(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    transitions: Pointer.float32,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """64 columns of M or B of a segment and value head: M S + B is what it makes of a state S.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. Mᵀ and Bᵀ go to `transitions`, [segments, H, K + V, K].
    """
    STAGES: gl.constexpr = 2  # chunks in shared memory: the one that is worked on, and the next
    blocks: gl.constexpr = (K + V) // LINES
    kind: gl.constexpr = k.dtype.element_ty
    STATE: gl.constexpr = device.product_layout(K)
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)

    program = gl.program_id(0)
    span = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * LINES
    sequence = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(gl.int64)
    index = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
    begin = gl.load(sequence_begins + sequence)
    first = begin.to(gl.int64) + index * SEGMENT
    count = gl.load(sequence_begins + sequence + 1) - begin - index * SEGMENT
    count = gl.minimum(gl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT), count)
    slot = (gl.load(first_chunks + sequence) + index * (SEGMENT // CHUNK)).to(gl.int64)
    line = first_row + gl.arange(0, LINES, gl.SliceLayout(1, STATE))
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE))
    S = gl.where(line[:, None] == k_column[None, :], 1.0, 0.0)

    key_head = (head // GROUP).to(gl.int64)
    k += first * K_STRIDE + key_head * K_HEAD
    v += first * V_STRIDE + head.to(gl.int64) * V_HEAD + gl.maximum(first_row - K, 0)
    lane = slot * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (CHUNK * CHUNK)

    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    vs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, LINES], TILE)
    Ts = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    tiles = Chunks(ks, vs, Ts, device.Gates.allocate(STAGES))

    chunks = (count + CHUNK - 1) // CHUNK
    valued = (first_row >= K).to(gl.int32)
    decay = 0.0
    if count > 0:
        decay = gl.load(gates + GATE_DECAY)
        _fetch(tiles, 0, k, v, T, gates, count, count * valued, K_STRIDE, V_STRIDE)
    for chunk in range(chunks):
        narrow = gl.convert_layout(S.to(kind), BY_CHUNK)
        stage = chunk % STAGES
        async_copy.wait_group(0)
        fence_async_shared()
        nothing = gl.zeros([LINES, CHUNK], gl.float32, VALUES)
        predicted = device.start_product(narrow, ks.index(stage).permute((1, 0)), nothing)
        if chunk + 1 < chunks:  # the last chunk is followed by itself, without tokens
            T += HEADS * (CHUNK * CHUNK)
            gates += HEADS * (GATE_ROWS * CHUNK)
        remaining = count - (chunk + 1) * CHUNK
        k += CHUNK * K_STRIDE
        v += CHUNK * V_STRIDE
        next_stage = (chunk + 1) % STAGES
        _fetch(tiles, next_stage, k, v, T, gates, remaining, remaining * valued, K_STRIDE, V_STRIDE)
        next_decay = gl.load(gates + GATE_DECAY)
        strength = tiles.gates.strengths.index(stage).load(COLUMNS)
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        values = vs.index(stage).permute((1, 0)).load(VALUES)
        predicted = warpgroup_mma_wait(0, deps=[predicted])
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * predicted
        rounded = gl.convert_layout(residual.to(kind), BY_CHUNK)
        v_new = warpgroup_mma(rounded, Ts.index(stage).permute((1, 0)), residual, is_async=True)
        S = S * decay
        to_end = tiles.gates.ends.index(stage).load(COLUMNS)
        v_new = warpgroup_mma_wait(0, deps=[v_new])
        carried = gl.convert_layout((to_end[None, :] * v_new).to(kind), BY_KEYS)
        S = warpgroup_mma(carried, ks.index(stage), S, is_async=True)
        decay = next_decay
        S = warpgroup_mma_wait(0, deps=[S])
    async_copy.wait_group(0)
    place = (line.to(gl.int64) * K)[:, None] + k_column.to(gl.int64)[None, :]
    gl.store(transitions + (span * HEADS + head) * (K * (K + V)) + place, S)


def bind_transitions(setup: Setup, shape: Shape) -> Callable[[Mapping[str, Any], TokenRows, TokenRows], None]:
    """What every segment makes of a state, M S + B: `launch(memory, k, v)`, Mᵀ and Bᵀ into `transitions`."""
    transition = device.ByStrides(
        setup, shape, rule_transitions_hopper, "K V", HEADS=shape.heads, SEGMENT=packing.SEGMENT,
    )  # fmt: skip
    grid = (shape.segments * shape.heads * ((shape.K + shape.V) // LINES.value),)

    def launch(memory: Mapping[str, Any], k: TokenRows, v: TokenRows) -> None:
        transition.of(k, v).launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory["segment_indices"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], transitions=memory["transitions"],
        )  # fmt: skip

    return launch
