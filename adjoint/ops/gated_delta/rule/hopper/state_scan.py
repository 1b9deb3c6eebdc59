"""The state scan of the backward for Hopper: what `rule_state_scan` computes of segments, bit for bit.

Nearly all it does is to move memory: Sᵀ and v'ᵀ of a chunk leave, k, v, both parts of T and the gates of the next come.
So a warpgroup of its own takes what leaves out of shared memory, and copies what comes into it. The others have 64
columns of V each: Sᵀ in the accumulators of the tensor cores, and as their left operand too, rounded in registers.

    predicted = Sᵀ kᵀ                  beside it: Sᵀ goes to shared memory, v is read
    v' = r + r T°ᵀ, in two parts       beside them: S decays
    Sᵀ += w k                          beside it: v'ᵀ goes to shared memory
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from adjoint.core.kernels import Budget, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper.device import ByStrides, ScanBarriers, aggregate, thread_barrier
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_FROM_START, GATE_ROWS, GATE_STRENGTH, GATE_TO_END


@aggregate
class ChunkTiles:
    """The chunks in shared memory, a stage each: k, v, both parts of T, β, e^G and e^{Γ−G}."""

    ks: gl.shared_memory_descriptor
    vs: gl.shared_memory_descriptor
    highs: gl.shared_memory_descriptor
    lows: gl.shared_memory_descriptor
    strengths: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor
    ends: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, ks, vs, highs, lows, strengths, starts, ends):
        self.ks = ks
        self.vs = vs
        self.highs = highs
        self.lows = lows
        self.strengths = strengths
        self.starts = starts
        self.ends = ends


@gluon.jit
def _fetch(
    k, v, T, gates, tiles, stage, remaining,
    K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk; rows past the end of its sequence are zeros."""
    KEY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    VALUE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GATES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    row = gl.arange(0, 64, gl.SliceLayout(1, KEY_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, KEY_ROWS))
    place = k + (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    inside = (row < remaining)[:, None] & (column < K)[None, :]
    async_copy.async_copy_global_to_shared(tiles.ks.index(stage), place, mask=inside)
    row = gl.arange(0, 64, gl.SliceLayout(1, VALUE_ROWS))
    column = gl.arange(0, V, gl.SliceLayout(0, VALUE_ROWS))
    place = v + (row.to(gl.int64) * V_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    inside = (row < remaining)[:, None] & (column < V)[None, :]
    async_copy.async_copy_global_to_shared(tiles.vs.index(stage), place, mask=inside)
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    offset = (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(tiles.highs.index(stage), T + offset)
    async_copy.async_copy_global_to_shared(tiles.lows.index(stage), T + 64 * 64 + offset)
    lane = gl.arange(0, 64, GATES)
    async_copy.async_copy_global_to_shared(tiles.strengths.index(stage), gates + GATE_STRENGTH * 64 + lane)
    async_copy.async_copy_global_to_shared(tiles.starts.index(stage), gates + GATE_FROM_START * 64 + lane)
    async_copy.async_copy_global_to_shared(tiles.ends.index(stage), gates + GATE_TO_END * 64 + lane)


@gluon.jit
def _producer(
    k, v, T, gates, states, new_values, tiles, barriers, Ss, news, count, chunks,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Takes Sᵀ and v'ᵀ of a chunk out of shared memory, and copies another into the room the chunk leaves."""
    KEY_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, V, gl.SliceLayout(1, KEY_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, KEY_ROWS))
    of_state = (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    row = gl.arange(0, V, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    of_new = (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    stage = 0
    stage_phase = 1
    phase = 0
    for step in range(chunks + STAGES):
        if step >= STAGES:
            mbarrier.wait(barriers.S_staged, phase)
            rows = Ss.load(KEY_ROWS)
            thread_barrier()
            mbarrier.arrive(barriers.S_drained)
            gl.store(states + of_state, rows)
            mbarrier.wait(barriers.new_staged, phase)
            rows = news.load(ROWS)
            thread_barrier()
            mbarrier.arrive(barriers.new_drained)
            gl.store(new_values + of_new, rows)
            states += HEADS * (V * K)
            new_values += HEADS * (V * 64)
            phase ^= 1
        if step < chunks:
            mbarrier.wait(barriers.empty.index(stage), stage_phase)
            _fetch(
                k, v, T, gates, tiles, stage, count - step * 64,
                K_STRIDE, V_STRIDE, K, V,
            )  # fmt: skip
            async_copy.mbarrier_arrive(barriers.full.index(stage), increment_count=False)
            k += 64 * K_STRIDE
            v += 64 * V_STRIDE
            T += HEADS * (2 * 64 * 64)
            gates += HEADS * (GATE_ROWS * 64)
            stage += 1
            if stage == STAGES:
                stage = 0
                stage_phase ^= 1
    async_copy.wait_group(0)


@gluon.jit
def _consumer(
    state, source_rows, tiles, barriers, Ss, news, chunks,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The products, from chunk to chunk."""
    kind: gl.constexpr = tiles.ks.dtype
    WARPS: gl.constexpr = V // 16
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, V, gl.SliceLayout(1, STATE))
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE))
    place = state + v_row.to(gl.int64)[:, None] + (k_column.to(gl.int64) * V)[None, :]
    S = gl.load(place, mask=(v_row < source_rows)[:, None] & (k_column < K)[None, :], other=0.0)
    nothing = gl.zeros([V, 64], gl.float32, VALUES)
    stage = 0
    phase = 0
    out_phase = 1
    for _ in range(chunks):
        rounded = S.to(kind)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        mbarrier.wait(barriers.full.index(stage), phase)
        fence_async_shared()
        predicted = warpgroup_mma(narrow, tiles.ks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        values = tiles.vs.index(stage).permute((1, 0)).load(VALUES)
        mbarrier.wait(barriers.S_drained, out_phase)
        Ss.store(rounded)
        thread_barrier()
        mbarrier.arrive(barriers.S_staged)
        predicted = warpgroup_mma_wait(0, deps=[predicted])
        strength = tiles.strengths.index(stage).load(COLUMNS)  # not before, when S in 16 bits takes registers too
        from_start = tiles.starts.index(stage).load(COLUMNS)
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * predicted
        operand = gl.convert_layout(residual.to(kind), BY_CHUNK)
        v_new = warpgroup_mma(operand, tiles.highs.index(stage).permute((1, 0)), residual, is_async=True)
        v_new = warpgroup_mma(operand, tiles.lows.index(stage).permute((1, 0)), v_new, is_async=True)
        S = S * tiles.starts.index(stage).slice(63, 1).load(gl.SliceLayout(0, STATE))[None, :]
        to_end = tiles.ends.index(stage).load(COLUMNS)
        v_new = warpgroup_mma_wait(0, deps=[v_new])
        carried = gl.convert_layout((to_end[None, :] * v_new).to(kind), BY_KEYS)
        S = warpgroup_mma(carried, tiles.ks.index(stage), S, is_async=True)
        mbarrier.wait(barriers.new_drained, out_phase)
        news.store(v_new.to(kind))
        thread_barrier()
        mbarrier.arrive(barriers.new_staged)
        S = warpgroup_mma_wait(0, deps=[S])
        thread_barrier()
        mbarrier.arrive(barriers.empty.index(stage))
        out_phase ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@kernel(
    budget=Budget(registers=255, shared_bytes=232448), targets=("sm_90",), numeric=("SEGMENT",), schedule=("STAGES",)
)
@gluon.jit
def rule_state_scan_hopper(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32,
    sequence_begins: Pointer.int32, first_chunks: Pointer.int32, initial_state: Pointer.float32, saved: Pointer.float32,
    states: Pointer16.element, new_values: Pointer16.element,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, INITIAL: gl.constexpr,
    SEGMENT: gl.constexpr,
):  # fmt: skip
    """The state at the start of every chunk, and v' of every chunk, of one segment and value head; both transposed.

    For 16-bit types, K and V of 64 or 128. A segment begins with the state that was saved at its start, the first of a
    sequence with an initial one, where there is one (INITIAL), or 0. A warpgroup scans every 64 columns of V.
    """
    CHUNK: gl.constexpr = 64
    kind: gl.constexpr = k.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    span = (program // HEADS).to(gl.int64)
    head = program % HEADS
    first = gl.load(segment_indices + span * INDEX_WIDTH).to(gl.int64)
    count = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT)  # 0 where there is no segment
    sequence = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(gl.int64)
    index = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
    chunks = (count + CHUNK - 1) // CHUNK
    saved_slot = (gl.load(sequence_begins + sequence) // SEGMENT + index).to(gl.int64) - 1
    state = initial_state + (sequence * HEADS + head) * (K * V)
    source_rows = V if INITIAL else 0  # rows of Sᵀ
    if index > 0:
        state = saved + (saved_slot * HEADS + head) * (K * V)
        source_rows = V
    source_rows = gl.where(count > 0, source_rows, 0)
    k += first * K_STRIDE + (head // GROUP).to(gl.int64) * K_HEAD
    v += first * V_STRIDE + head.to(gl.int64) * V_HEAD
    lane = (gl.load(first_chunks + sequence) + index * (SEGMENT // CHUNK)).to(gl.int64) * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (2 * CHUNK * CHUNK)
    states += lane * (V * K)
    new_values += lane * (V * CHUNK)

    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    vs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V], TILE)
    highs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    lows = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    ends = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    Ss = gl.allocate_shared_memory(kind, [V, K], TILE)
    news = gl.allocate_shared_memory(kind, [V, CHUNK], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    S_staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    S_drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    new_staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    new_drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=128)  # each thread that copies arrives when its copies have
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(S_staged, count=1)
    mbarrier.init(S_drained, count=1)
    mbarrier.init(new_staged, count=1)
    mbarrier.init(new_drained, count=1)
    tiles = ChunkTiles(ks, vs, highs, lows, strengths, starts, ends)
    barriers = ScanBarriers(full, empty, S_staged, S_drained, new_staged, new_drained)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    state, source_rows, tiles, barriers, Ss, news, chunks, K, V, STAGES,
                ),
            ),
            (
                _producer,
                (
                    k, v, T, gates, states, new_values, tiles, barriers, Ss, news, count, chunks,
                    HEADS, K_STRIDE, V_STRIDE, K, V, STAGES,
                ),
            ),
        ],
        [4],
        [120],
    )  # fmt: skip


def bind_segment_states(setup: Setup, shape: Shape, initial: bool) -> Callable[..., None]:
    """States and new values of every chunk, over segments: `launch(memory, k, v, initial_state, saved)`."""
    scan = ByStrides(
        setup, shape, rule_state_scan_hopper, "K V", element=shape.element, HEADS=shape.heads, GROUP=shape.group,
        K=shape.K, V=shape.V, STAGES=setup.schedule["hopper_scan_stages"], INITIAL=initial, SEGMENT=packing.SEGMENT,
        num_warps=shape.V // 16,
    )  # fmt: skip
    grid = (shape.segments * shape.heads,)

    def launch(
        memory: Mapping[str, Any], k: TokenRows, v: TokenRows, initial_state: Tensor | None, saved: Tensor
    ) -> None:
        scan.of(k, v).launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory["segment_indices"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"],
            initial_state=memory["gates"] if initial_state is None else initial_state, saved=saved,
            states=memory["states"], new_values=memory["new_values"],
        )  # fmt: skip

    return launch
