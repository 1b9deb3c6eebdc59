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
from adjoint.ops.gated_delta.rule.hopper.device import ByStrides
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_DECAY, GATE_FROM_START, GATE_ROWS, GATE_STRENGTH, GATE_TO_END


@gluon.jit
def _fetch(
    k, v, T, gates, ks, vs, Ts, strengths, starts, ends, stage, remaining, v_remaining,
    K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk; rows past the end of its sequence are zeros."""
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GATES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    inside = (row < remaining)[:, None] & (column < K)[None, :]
    place = k + (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(ks.index(stage), place, mask=inside)
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    inside = (row < v_remaining)[:, None] & (column < 64)[None, :]
    place = v + (row.to(gl.int64) * V_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(vs.index(stage), place, mask=inside)
    offset = (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(Ts.index(stage), T + offset)
    lane = gl.arange(0, 64, GATES)
    async_copy.async_copy_global_to_shared(strengths.index(stage), gates + GATE_STRENGTH * 64 + lane)
    async_copy.async_copy_global_to_shared(starts.index(stage), gates + GATE_FROM_START * 64 + lane)
    async_copy.async_copy_global_to_shared(ends.index(stage), gates + GATE_TO_END * 64 + lane)
    async_copy.commit_group()


@kernel(budget=Budget(registers=255, shared_bytes=115712), targets=("sm_90",), numeric=("SEGMENT",))
@gluon.jit
def rule_transitions_hopper(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32,
    sequence_begins: Pointer.int32, first_chunks: Pointer.int32, transitions: Pointer.float32,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """64 columns of M or B of a segment and value head: M S + B is what it makes of a state S.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. Mᵀ and Bᵀ go to `transitions`, [segments, H, K + V, K].
    """
    CHUNK: gl.constexpr = 64
    STAGES: gl.constexpr = 2  # chunks in shared memory: the one that is worked on, and the next
    LINES: gl.constexpr = 64
    blocks: gl.constexpr = (K + V) // LINES
    kind: gl.constexpr = k.dtype.element_ty
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

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
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    ends = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)

    chunks = (count + CHUNK - 1) // CHUNK
    valued = (first_row >= K).to(gl.int32)
    decay = 0.0
    if count > 0:
        decay = gl.load(gates + GATE_DECAY)
        _fetch(
            k, v, T, gates, ks, vs, Ts, strengths, starts, ends, 0, count, count * valued, K_STRIDE, V_STRIDE, K
        )  # fmt: skip
    for chunk in range(chunks):
        narrow = gl.convert_layout(S.to(kind), BY_CHUNK)
        stage = chunk % STAGES
        async_copy.wait_group(0)
        fence_async_shared()
        nothing = gl.zeros([LINES, CHUNK], gl.float32, VALUES)
        predicted = warpgroup_mma(narrow, ks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if chunk + 1 < chunks:  # the last chunk is followed by itself, without tokens
            T += HEADS * (CHUNK * CHUNK)
            gates += HEADS * (GATE_ROWS * CHUNK)
        remaining = count - (chunk + 1) * CHUNK
        k += CHUNK * K_STRIDE
        v += CHUNK * V_STRIDE
        _fetch(
            k, v, T, gates, ks, vs, Ts, strengths, starts, ends, (chunk + 1) % STAGES, remaining, remaining * valued,
            K_STRIDE, V_STRIDE, K,
        )  # fmt: skip
        next_decay = gl.load(gates + GATE_DECAY)
        strength = strengths.index(stage).load(COLUMNS)
        from_start = starts.index(stage).load(COLUMNS)
        values = vs.index(stage).permute((1, 0)).load(VALUES)
        predicted = warpgroup_mma_wait(0, deps=[predicted])
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * predicted
        rounded = gl.convert_layout(residual.to(kind), BY_CHUNK)
        v_new = warpgroup_mma(rounded, Ts.index(stage).permute((1, 0)), residual, is_async=True)
        S = S * decay
        to_end = ends.index(stage).load(COLUMNS)
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
    transition = ByStrides(
        setup, shape, rule_transitions_hopper, "K V", element=shape.element, HEADS=shape.heads, GROUP=shape.group,
        K=shape.K, V=shape.V, SEGMENT=packing.SEGMENT,
    )  # fmt: skip
    grid = (shape.segments * shape.heads * ((shape.K + shape.V) // 64),)

    def launch(memory: Mapping[str, Any], k: TokenRows, v: TokenRows) -> None:
        transition.of(k, v).launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory["segment_indices"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], transitions=memory["transitions"],
        )  # fmt: skip

    return launch
