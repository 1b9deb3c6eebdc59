"""The forward for Hopper: the state scan and the outputs in one kernel.

What `rule_state_scan` and `rule_output` compute; v' meets the decayed scores P in two parts. A program scans 64 columns
of V of a sequence or segment, with three warpgroups. One has Sᵀ in the accumulators of the tensor cores, and as their
left operand too, rounded in registers; it does what the next chunk waits for and nothing else, and leaves Sᵀ and v'ᵀ in
shared memory. One computes the outputs from them. One copies q, k, v, T, P and the gates of the chunks to come.

    predicted = Sᵀ kᵀ          beside it: Sᵀ goes to shared memory, v is read      seen = Sᵀ qᵀ
    v' = r + r T°ᵀ             beside it: S decays
    Sᵀ += w k                  beside it: v'ᵀ goes to shared memory                oᵀ = seen + v'ᵀ Pᵀ
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

from adjoint.core.kernels import Float32, Int32, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Setup, is_aligned
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, TILE, V_BLOCK
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS

NEVER = 2**30
"""More chunks than a sequence has."""

Chunks = device.fields("qs ks vs Ts Ps gates ring")
"""The chunks in shared memory, a stage each: q, k, v, T, P and the gates."""

Staged = device.fields("Ss highs lows of_S of_new")
"""What the state scan leaves for the outputs: Sᵀ, and v'ᵀ in two parts, and a handoff of either."""


@gluon.jit
def _producer(
    q, k, v, T, P, gates, tiles, count, chunks,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """Copies a chunk as soon as there is room for it; rows past the end of its sequence are zeros."""
    q_rows = device.Rows.of(CHUNK, K, Q_STRIDE)
    k_rows = device.Rows.of(CHUNK, K, K_STRIDE)
    v_rows = device.Rows.of(CHUNK, V_BLOCK, V_STRIDE)
    square_rows = device.Rows.of(CHUNK, CHUNK, CHUNK)
    remaining = count
    stage = 0
    phase = 1
    pending = 0
    for chunk in range(chunks):
        mbarrier.wait(tiles.ring.empty.index(stage), phase)
        k_rows.fetch_tokens(tiles.ks.index(stage), k, remaining)
        v_rows.fetch_tokens(tiles.vs.index(stage), v, remaining)
        tiles.gates.fetch(stage, gates)
        square_rows.fetch(tiles.Ts.index(stage), T)
        q_rows.fetch_tokens(tiles.qs.index(stage), q, remaining)
        square_rows.fetch(tiles.Ps.index(stage), P)
        async_copy.commit_group()
        if chunk > 0:
            async_copy.wait_group(1)
            tiles.ring.fill(pending)
            pending = stage
        q += CHUNK * Q_STRIDE
        k += CHUNK * K_STRIDE
        v += CHUNK * V_STRIDE
        T += HEADS * (CHUNK * CHUNK)
        P += HEADS * (CHUNK * CHUNK)
        gates += HEADS * (GATE_ROWS * CHUNK)
        remaining -= CHUNK
        stage, phase = tiles.ring.after(stage, phase)
    async_copy.wait_group(0)
    if chunks > 0:
        tiles.ring.fill(pending)


@gluon.jit
def _output_consumer(out, tiles, staged, outs, count, chunks, scale, HEADS: gl.constexpr, V: gl.constexpr):
    """The outputs of every chunk, from its state and v'."""
    kind: gl.constexpr = tiles.qs.dtype
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    out_rows = device.Rows.of(CHUNK, V_BLOCK, HEADS * V)
    nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
    remaining = count
    stage = 0
    phase = 0
    phase_staged = 0
    for _ in range(chunks):
        mbarrier.wait(tiles.ring.full.index(stage), phase)
        mbarrier.wait(staged.of_S.staged, phase_staged)
        fence_async_shared()
        seen = device.start_product(staged.Ss, tiles.qs.index(stage).permute((1, 0)), nothing)
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        seen = warpgroup_mma_wait(0, deps=[seen])
        device.thread_barrier()
        mbarrier.arrive(staged.of_S.drained)
        seen = seen * (from_start * scale)[None, :]
        scores = tiles.Ps.index(stage).permute((1, 0))
        mbarrier.wait(staged.of_new.staged, phase_staged)
        fence_async_shared()
        total = warpgroup_mma(staged.highs, scores, seen, is_async=True)
        total = warpgroup_mma(staged.lows, scores, total, is_async=True)
        total = warpgroup_mma_wait(0, deps=[total])
        device.thread_barrier()
        mbarrier.arrive(staged.of_new.drained)
        mbarrier.arrive(tiles.ring.empty.index(stage))
        outs.permute((1, 0)).store(total.to(kind))
        device.thread_barrier()
        inside = out_rows.inside(remaining)
        gl.store(out + out_rows.offset, outs.load(device.row_layout(V_BLOCK)), mask=inside)
        out += (CHUNK * V) * HEADS
        remaining -= CHUNK
        phase_staged ^= 1
        stage, phase = tiles.ring.after(stage, phase)


@gluon.jit
def _state_consumer(
    source, source_rows, saved, final_state, tiles, staged, chunks, save_every, ends_here,
    HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SEGMENTED: gl.constexpr, FINAL: gl.constexpr,
):  # fmt: skip
    """The products from chunk to chunk."""
    kind: gl.constexpr = tiles.ks.dtype
    STATE: gl.constexpr = device.product_layout(K)
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, STATE)).to(gl.int64)
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE)).to(gl.int64)
    first_place = source + v_row[:, None] + (k_column * V)[None, :]
    S = gl.load(first_place, mask=(v_row < source_rows)[:, None] & (k_column < K)[None, :], other=0.0)
    nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
    until_saved = save_every
    before = 0
    stage = 0
    phase = 0
    drained = 1
    for chunk in range(chunks):
        rounded = S.to(kind)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        mbarrier.wait(tiles.ring.full.index(stage), phase)
        predicted = device.start_product(narrow, tiles.ks.index(stage).permute((1, 0)), nothing)
        values = tiles.vs.index(stage).permute((1, 0)).load(VALUES)
        strength = tiles.gates.strengths.index(stage).load(COLUMNS)
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        staged.of_S.put(staged.Ss, rounded, drained)
        if chunk > 0:
            mbarrier.arrive(tiles.ring.empty.index(before))  # whose last product all warps have waited for
        predicted = warpgroup_mma_wait(0, deps=[predicted])
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * predicted
        operand = gl.convert_layout(residual.to(kind), BY_CHUNK)
        v_new = warpgroup_mma(operand, tiles.Ts.index(stage).permute((1, 0)), residual, is_async=True)
        S = S * tiles.gates.starts.index(stage).slice(CHUNK - 1, 1).load(gl.SliceLayout(0, STATE))[None, :]
        to_end = tiles.gates.ends.index(stage).load(COLUMNS)
        v_new = warpgroup_mma_wait(0, deps=[v_new])
        carried = gl.convert_layout((to_end[None, :] * v_new).to(kind), BY_KEYS)
        S = warpgroup_mma(carried, tiles.ks.index(stage), S, is_async=True)
        high = v_new.to(kind)
        low = (v_new - high.to(gl.float32)).to(kind)
        mbarrier.wait(staged.of_new.drained, drained)
        staged.highs.store(high)
        staged.lows.store(low)
        device.thread_barrier()
        mbarrier.arrive(staged.of_new.staged)
        S = warpgroup_mma_wait(0, deps=[S])
        if SEGMENTED:
            if FINAL:  # noqa: SIM102  (a constant, and what only the GPU knows)
                if (chunk + 1 == chunks) & ends_here:
                    # 0, and known in the loop alone: or the places would stay in registers through it.
                    place = final_state + (chunk + 1 - chunks)
                    gl.store(place + v_row[:, None] + (k_column * V)[None, :], S)
        else:
            until_saved -= 1
            place = saved
            stores = (until_saved == 0) & (chunk + 1 < chunks)
            if until_saved == 0:
                until_saved = save_every
                saved += HEADS * (K * V)
            if FINAL:  # noqa: SIM102
                if chunk + 1 == chunks:
                    place = final_state
                    stores = chunk + 1 == chunks
            if stores:
                gl.store(place + v_row[:, None] + (k_column * V)[None, :], S)
        drained ^= 1
        before = stage
        stage, phase = tiles.ring.after(stage, phase)


@kernel(budget=device.BUDGET, targets=("sm_90",), numeric=("SEGMENT",), schedule=("STAGES",))
@gluon.jit
def rule_forward_scan_hopper(
    q: Pointer16.element, k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    P: Pointer16.element, segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    initial_state: Pointer.float32, saved: Pointer.float32, final_state: Pointer.float32, out: PointerIf16.element,
    scale: Float32, save_every: Int32,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, SEGMENTED: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr,
    SEGMENT: gl.constexpr,
):  # fmt: skip
    """o of a sequence and value head, 64 columns of V; for 16-bit types, K of 64 or 128 and V a multiple of 64.

    The state is saved after every `save_every` chunks but the last, and is final after the last. A sequence without
    tokens is left alone. Over segments (SEGMENTED) a program scans one, from the state that was saved at its start, and
    saves none.
    """
    blocks: gl.constexpr = V // V_BLOCK
    size: gl.constexpr = K * V
    kind: gl.constexpr = k.dtype.element_ty

    program = gl.program_id(0)
    span = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * V_BLOCK
    sequence = span
    index = 0
    if SEGMENTED:
        sequence = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(gl.int64)
        index = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
    begin = gl.load(sequence_begins + sequence)
    first = begin.to(gl.int64) + index * SEGMENT
    count = gl.load(sequence_begins + sequence + 1) - begin - index * SEGMENT
    ends_here = count <= SEGMENT
    if SEGMENTED:
        count = gl.minimum(gl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT), count)
    chunks = (count + CHUNK - 1) // CHUNK
    saved_slot = (begin // SEGMENT + index).to(gl.int64)
    of_sequence = (sequence * HEADS + head) * size + first_row
    source = initial_state + of_sequence
    source_rows = gl.where(count > 0, V_BLOCK if INITIAL else 0, 0)
    if SEGMENTED:  # noqa: SIM102
        if index > 0:
            source = saved + ((saved_slot - 1) * HEADS + head) * size + first_row
            source_rows = gl.where(count > 0, V_BLOCK, 0)
    saved += (saved_slot * HEADS + head) * size + first_row
    final_state += of_sequence

    key_head = (head // GROUP).to(gl.int64)
    q += first * Q_STRIDE + key_head * Q_HEAD
    k += first * K_STRIDE + key_head * K_HEAD
    v += first * V_STRIDE + head.to(gl.int64) * V_HEAD + first_row
    lane = (gl.load(first_chunks + sequence) + index * (SEGMENT // CHUNK)).to(gl.int64) * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (CHUNK * CHUNK)
    P += lane * (CHUNK * CHUNK)
    out += (first * HEADS + head) * V + first_row

    qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    vs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V_BLOCK], TILE)
    Ts = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    Ps = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    tile_gates = device.Gates.allocate(STAGES)
    Ss = gl.allocate_shared_memory(kind, [V_BLOCK, K], TILE)
    highs = gl.allocate_shared_memory(kind, [V_BLOCK, CHUNK], TILE)
    lows = gl.allocate_shared_memory(kind, [V_BLOCK, CHUNK], TILE)
    outs = gl.allocate_shared_memory(kind, [CHUNK, V_BLOCK], TILE)
    # The outputs and the state scan read every chunk.
    tiles = Chunks(qs, ks, vs, Ts, Ps, tile_gates, device.Ring.allocate(STAGES, 1, 2))
    staged = Staged(Ss, highs, lows, device.Handoff.allocate(), device.Handoff.allocate())
    gl.warp_specialize(
        [
            (_state_consumer, (
                source, source_rows, saved, final_state, tiles, staged, chunks, save_every, ends_here,
                HEADS, K, V, SEGMENTED, FINAL,
            )),
            (_output_consumer, (out, tiles, staged, outs, count, chunks, scale, HEADS, V)),
            (_producer, (q, k, v, T, P, gates, tiles, count, chunks, HEADS, Q_STRIDE, K_STRIDE, V_STRIDE, K)),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[144, 128],
    )  # fmt: skip


def bind_forward_scan(
    setup: Setup, shape: Shape, *, segmented: bool, initial: bool, final: bool
) -> Callable[..., None]:
    """o, and the states that are needed: `launch(memory, q, k, v, scale, initial_state, saved, final_state, out)`.

    Args:
        segmented: over segments, from the states in `saved`; otherwise over whole sequences, and states between
            segments are written there, unless it is None.
        initial: whether there is an initial state.
        final: whether final states are written.
    """
    scan = {
        aligned: device.ByStrides(
            setup, shape, rule_forward_scan_hopper, "Q K V", HEADS=shape.heads, STAGES=setup.schedule["scan_stages"],
            SEGMENTED=segmented, INITIAL=initial, FINAL=final, SEGMENT=packing.SEGMENT, aligned=aligned,
        )
        for aligned in (True, False)
    }  # fmt: skip
    grid = ((shape.segments if segmented else shape.sequences) * shape.heads * (shape.V // V_BLOCK.value),)
    spans_of = "segment_indices" if segmented else "sequence_begins"
    segment_chunks = packing.SEGMENT // packing.CHUNK

    def launch(
        memory: Mapping[str, Any], q: TokenRows, k: TokenRows, v: TokenRows, scale: float,
        initial_state: Tensor | None, saved: Tensor | None, final_state: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        if final_state is not None and shape.is_packed:  # for sequences without tokens, which no program scans
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        absent = memory["gates"]  # stands for a pointer that no variant reads
        scan[is_aligned(out)].of(q, k, v).launch(
            grid, q=q.start, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"], P=memory["P"],
            segment_indices=memory[spans_of], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], initial_state=absent if initial_state is None else initial_state,
            saved=absent if saved is None else saved, final_state=absent if final_state is None else final_state,
            out=out, scale=scale, save_every=NEVER if saved is None or segmented else segment_chunks,
        )  # fmt: skip

    return launch
