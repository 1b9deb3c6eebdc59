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

from adjoint.core.kernels import Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, TILE
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS

Chunks = device.fields("ks vs highs lows gates ring")
"""The chunks in shared memory, a stage each: k, v, both parts of T and the gates."""

Results = device.fields("Ss news of_S of_new")
"""What a chunk leaves in shared memory: Sᵀ and v'ᵀ, and a handoff of either."""


@gluon.jit
def _producer(
    k, v, T, gates, states, new_values, tiles, results, count, chunks,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Takes Sᵀ and v'ᵀ of a chunk out of shared memory, and copies another into the room the chunk leaves."""
    of_state = device.Rows.of(V, K, K).offset
    of_new = device.Rows.of(V, CHUNK, CHUNK).offset
    stage = 0
    stage_phase = 1
    phase = 0
    for step in range(chunks + STAGES):
        if step >= STAGES:
            rows = results.of_S.take(results.Ss, phase)
            gl.store(states + of_state, rows)
            rows = results.of_new.take(results.news, phase)
            gl.store(new_values + of_new, rows)
            states += HEADS * (V * K)
            new_values += HEADS * (V * CHUNK)
            phase ^= 1
        if step < chunks:
            mbarrier.wait(tiles.ring.empty.index(stage), stage_phase)
            remaining = count - step * CHUNK
            device.fetch_tokens(tiles.ks.index(stage), k, K_STRIDE, remaining)
            device.fetch_tokens(tiles.vs.index(stage), v, V_STRIDE, remaining)
            T_rows = device.Rows.of(CHUNK, CHUNK, CHUNK)
            T_rows.fetch(tiles.highs.index(stage), T)
            T_rows.fetch(tiles.lows.index(stage), T + CHUNK * CHUNK)
            tiles.gates.fetch(stage, gates)
            async_copy.mbarrier_arrive(tiles.ring.full.index(stage), increment_count=False)
            k += CHUNK * K_STRIDE
            v += CHUNK * V_STRIDE
            T += HEADS * (2 * CHUNK * CHUNK)
            gates += HEADS * (GATE_ROWS * CHUNK)
            stage += 1
            if stage == STAGES:
                stage = 0
                stage_phase ^= 1
    async_copy.wait_group(0)


@gluon.jit
def _consumer(state, source_rows, tiles, results, chunks, K: gl.constexpr, V: gl.constexpr):
    """The products, from chunk to chunk."""
    kind: gl.constexpr = tiles.ks.dtype
    STATE: gl.constexpr = device.product_layout(K, gl.num_warps())
    VALUES: gl.constexpr = device.product_layout(CHUNK, gl.num_warps())
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, V, gl.SliceLayout(1, STATE))
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE))
    place = state + v_row.to(gl.int64)[:, None] + (k_column.to(gl.int64) * V)[None, :]
    S = gl.load(place, mask=(v_row < source_rows)[:, None] & (k_column < K)[None, :], other=0.0)
    nothing = gl.zeros([V, CHUNK], gl.float32, VALUES)
    stage = 0
    phase = 0
    out_phase = 1
    for _ in range(chunks):
        rounded = S.to(kind)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        mbarrier.wait(tiles.ring.full.index(stage), phase)
        fence_async_shared()
        predicted = device.start_product(narrow, tiles.ks.index(stage).permute((1, 0)), nothing)
        values = tiles.vs.index(stage).permute((1, 0)).load(VALUES)
        results.of_S.put(results.Ss, rounded, out_phase)
        predicted = warpgroup_mma_wait(0, deps=[predicted])
        strength = tiles.gates.strengths.index(stage).load(COLUMNS)  # not before, when S in 16 bits takes registers too
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * predicted
        operand = gl.convert_layout(residual.to(kind), BY_CHUNK)
        v_new = warpgroup_mma(operand, tiles.highs.index(stage).permute((1, 0)), residual, is_async=True)
        v_new = warpgroup_mma(operand, tiles.lows.index(stage).permute((1, 0)), v_new, is_async=True)
        S = S * tiles.gates.starts.index(stage).slice(CHUNK - 1, 1).load(gl.SliceLayout(0, STATE))[None, :]
        to_end = tiles.gates.ends.index(stage).load(COLUMNS)
        v_new = warpgroup_mma_wait(0, deps=[v_new])
        carried = gl.convert_layout((to_end[None, :] * v_new).to(kind), BY_KEYS)
        S = warpgroup_mma(carried, tiles.ks.index(stage), S, is_async=True)
        results.of_new.put(results.news, v_new, out_phase)
        S = warpgroup_mma_wait(0, deps=[S])
        tiles.ring.release(stage)
        out_phase ^= 1
        stage, phase = tiles.ring.after(stage, phase)


@kernel(budget=device.BUDGET, targets=("sm_90",), numeric=("SEGMENT",), schedule=("STAGES",))
@gluon.jit
def rule_state_scan_hopper(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    initial_state: Pointer.float32, saved: Pointer.float32, states: Pointer16.element, new_values: Pointer16.element,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, INITIAL: gl.constexpr,
    SEGMENT: gl.constexpr,
):  # fmt: skip
    """The state at the start of every chunk, and v' of every chunk, of one segment and value head; both transposed.

    For 16-bit types, K and V of 64 or 128. A segment begins with the state that was saved at its start, the first of a
    sequence with an initial one, where there is one (INITIAL), or 0. A warpgroup scans every 64 columns of V.
    """
    kind: gl.constexpr = k.dtype.element_ty

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
    tile_gates = device.Gates.allocate(STAGES)
    Ss = gl.allocate_shared_memory(kind, [V, K], TILE)
    news = gl.allocate_shared_memory(kind, [V, CHUNK], TILE)
    # Each thread that copies arrives when its copies have.
    tiles = Chunks(ks, vs, highs, lows, tile_gates, device.Ring.allocate(STAGES, 128, 1))
    results = Results(Ss, news, device.Handoff.allocate(), device.Handoff.allocate())
    gl.warp_specialize(
        [
            (_consumer, (state, source_rows, tiles, results, chunks, K, V)),
            (_producer, (
                k, v, T, gates, states, new_values, tiles, results, count, chunks,
                HEADS, K_STRIDE, V_STRIDE, K, V, STAGES,
            )),
        ],
        worker_num_warps=[4], worker_num_regs=[120],
    )  # fmt: skip


def bind_segment_states(setup: Setup, shape: Shape, initial: bool) -> Callable[..., None]:
    """States and new values of every chunk, over segments: `launch(memory, k, v, initial_state, saved)`."""
    scan = device.ByStrides(
        setup, shape, rule_state_scan_hopper, "K V", HEADS=shape.heads, STAGES=setup.schedule["hopper_scan_stages"],
        INITIAL=initial, SEGMENT=packing.SEGMENT, num_warps=shape.V // 16,
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
