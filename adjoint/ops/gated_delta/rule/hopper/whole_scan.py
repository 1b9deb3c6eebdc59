"""The forward for Hopper with all of V in one program: scores, state scan and outputs in one kernel.

What `rule_forward_scan_hopper` computes of the scores that `rule_chunk_inverse_hopper` writes, bit for bit; here no
scores reach memory. A program scans 128 columns of V of a sequence or segment, with three warpgroups. Two have 64
columns each: Sᵀ in the accumulators of the tensor cores, and as their left operand too, rounded in registers. They
compute the outputs as well, so that neither S nor v' leaves a warpgroup. The third computes the scores of the next
chunk, and copies q, k, v, T and the gates of those after it.

    predicted = Sᵀ kᵀ          beside it: the outputs of the chunk before go out
    seen = Sᵀ qᵀ
    v' = r + r T°ᵀ             beside it: S decays
    Sᵀ += w k                  beside it: seen is scaled, v' is rounded
    oᵀ = seen + v'ᵀ Pᵀ         beside it: what v' lost in rounding, and S is rounded for the next chunk

The halves of V wait for each other nowhere: while one computes elements, the tensor cores work for the other. What a
chunk costs is counted in docs/gated-delta-kernels.md.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, GATE_SUM, LINE, TILE, V_BLOCK
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS

WIDTH = gl.constexpr(128)
"""Columns of V of a program."""

Chunks = device.fields("qs ks vs Ts sums gates ring")
"""The chunks in shared memory, a stage each: q, k, v, T, G and the other gates."""

Scores = device.fields("Ps full")
"""The scores P of two chunks in shared memory, and the barriers that say that they are there."""


@gluon.jit
def _producer(
    q, k, v, T, gates, tiles, scores, count, chunks, scale,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Computes the scores P = scale·(q kᵀ) ⊙ D of every chunk, 0 above the diagonal, and copies the chunks ahead of it.

    A chunk is copied as soon as there is room for it; rows past the end of its sequence are zeros.
    """
    kind: gl.constexpr = tiles.ks.dtype
    SCORES: gl.constexpr = device.product_layout(CHUNK)
    AHEAD: gl.constexpr = STAGES - 1
    # Everything is transposed, as `rule_chunk_inverse_hopper` has it: rows are keys, columns queries.
    j = gl.arange(0, CHUNK, gl.SliceLayout(1, SCORES))
    i = gl.arange(0, CHUNK, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, SCORES)
    copied = 0
    copied_phase = 1
    stage = 0
    for chunk in range(-AHEAD, chunks):
        if chunk >= 0:
            async_copy.wait_group(AHEAD - 1)
            tiles.ring.fill(stage)
            seen = device.start_product(tiles.ks.index(stage), tiles.qs.index(stage).permute((1, 0)), nothing)
            seen = warpgroup_mma_wait(0, deps=[seen])
            sum_i = tiles.sums.index(stage).load(gl.SliceLayout(0, SCORES))
            sum_j = tiles.sums.index(stage).load(gl.SliceLayout(1, SCORES))
            decay = device.exp(sum_i[None, :] - sum_j[:, None])
            score = gl.where(i[None, :] >= j[:, None], (seen * scale) * decay, 0.0)
            scores.Ps.index(chunk % 2).permute((1, 0)).store(score.to(kind))
            fence_async_shared()
            device.thread_barrier()
            mbarrier.arrive(scores.full.index(chunk % 2))
            stage = (stage + 1) % STAGES
        # All of the chunk before has been read: there is room for another, and for the scores of the next.
        mbarrier.wait(tiles.ring.empty.index(copied), copied_phase)
        if chunk + AHEAD < chunks:
            remaining = count - (chunk + AHEAD) * CHUNK
            device.fetch_tokens(tiles.ks.index(copied), k, K_STRIDE, remaining)
            device.fetch_tokens(tiles.qs.index(copied), q, Q_STRIDE, remaining)
            device.fetch_gates(tiles.sums, copied, gates, GATE_SUM)
            tiles.gates.fetch(copied, gates)
            device.fetch_tokens(tiles.vs.index(copied), v, V_STRIDE, remaining)
            device.Rows.of(CHUNK, CHUNK, CHUNK).fetch(tiles.Ts.index(copied), T)
            q += CHUNK * Q_STRIDE
            k += CHUNK * K_STRIDE
            v += CHUNK * V_STRIDE
            T += HEADS * (CHUNK * CHUNK)
            gates += HEADS * (GATE_ROWS * CHUNK)
        copied, copied_phase = tiles.ring.after(copied, copied_phase)
        async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _state_consumer(
    source, source_columns, saved, final_state, out, tiles, scores, outs, count, length, into_segment, scale, ends_here,
    PART: gl.constexpr, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SAVES: gl.constexpr,
    FINAL: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """The products from chunk to chunk and the outputs, of 64 columns of V."""
    kind: gl.constexpr = tiles.ks.dtype
    STATE: gl.constexpr = device.product_layout(K)
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, STATE)).to(gl.int64) + PART * V_BLOCK
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE)).to(gl.int64)
    out_rows = device.Rows.of(CHUNK, V_BLOCK, HEADS * V)
    out += PART * V_BLOCK
    is_there = (v_row < V)[:, None] & (k_column < source_columns)[None, :]
    S = gl.load(source + v_row[:, None] + (k_column * V)[None, :], mask=is_there, other=0.0)
    nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
    results = gl.zeros([V_BLOCK, CHUNK], kind, VALUES)
    narrow = gl.convert_layout(S.to(kind), BY_CHUNK)
    stage = 0
    phase = 0
    for first in range(0, count, CHUNK):
        mbarrier.wait(tiles.ring.full.index(stage), phase)
        predicted = device.start_product(narrow, tiles.ks.index(stage).permute((1, 0)), nothing)
        slot = (first // CHUNK) % 2
        if first > 0:
            outs.permute((1, 0)).store(results)
            device.thread_barrier()
            mbarrier.arrive(tiles.ring.empty.index(tiles.ring.before(stage)))  # whose last product all have waited for
            gl.store(out + out_rows.offset, outs.load(device.row_layout(V_BLOCK)))  # whole: more chunks follow
            out += (CHUNK * V) * HEADS
        seen = device.start_product(narrow, tiles.qs.index(stage).permute((1, 0)), nothing)
        predicted, seen = warpgroup_mma_wait(0, deps=[predicted, seen])
        # Not before, nor for longer than they are needed: registers are full.
        values = tiles.vs.index(stage).slice(PART * V_BLOCK, V_BLOCK, dim=1).permute((1, 0)).load(VALUES)
        strength = tiles.gates.strengths.index(stage).load(COLUMNS)
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * predicted
        operand = gl.convert_layout(residual.to(kind), BY_CHUNK)
        v_new = warpgroup_mma(operand, tiles.Ts.index(stage).permute((1, 0)), residual, is_async=True)
        S = S * tiles.gates.starts.index(stage).slice(CHUNK - 1, 1).load(gl.SliceLayout(0, STATE))[None, :]
        v_new = warpgroup_mma_wait(0, deps=[v_new])
        to_end = tiles.gates.ends.index(stage).load(COLUMNS)
        carried = gl.convert_layout((to_end[None, :] * v_new).to(kind), BY_KEYS)
        S = warpgroup_mma(carried, tiles.ks.index(stage), S, is_async=True)
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        seen = seen * (from_start * scale)[None, :]
        high = device.rounded_to(v_new, kind)
        mbarrier.wait(scores.full.index(slot), (first // (2 * CHUNK)) % 2)
        P = scores.Ps.index(slot).permute((1, 0))
        S = warpgroup_mma_wait(0, deps=[S])
        total = warpgroup_mma(gl.convert_layout(high, BY_CHUNK), P, seen, is_async=True)
        low = gl.convert_layout(device.rounded_to(v_new - high.to(gl.float32), kind), BY_CHUNK)
        total = warpgroup_mma(low, P, total, is_async=True)
        narrow = gl.convert_layout(S.to(kind), BY_CHUNK)
        if SAVES:  # noqa: SIM102  (a constant, and what only the GPU knows)
            if ((first + into_segment) % SEGMENT == 0) & (first + CHUNK < length):
                gl.store(saved + v_row[:, None] + (k_column * V)[None, :], S)
                saved += HEADS * (K * V)
        total = warpgroup_mma_wait(0, deps=[total])
        results = total.to(kind)
        stage, phase = tiles.ring.after(stage, phase)
    if count > 0:
        outs.permute((1, 0)).store(results)
        device.thread_barrier()
        inside = out_rows.inside((count - 1) % CHUNK + 1)
        gl.store(out + out_rows.offset, outs.load(device.row_layout(V_BLOCK)), mask=inside)
        if FINAL:  # noqa: SIM102
            if ends_here:
                # 0, and known after the loop alone: or the places would stay in registers through it.
                place = final_state + gl.minimum(stage, 0)
                gl.store(place + v_row[:, None] + (k_column * V)[None, :], S)


@kernel(budget=device.BUDGET, targets=("sm_90",), numeric=("SEGMENT",), schedule=("STAGES",))
@gluon.jit
def rule_whole_scan_hopper(
    q: Pointer16.element, k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    initial_state: Pointer.float32, starts: Pointer.float32, saved: Pointer.float32, final_state: Pointer.float32,
    out: PointerIf16.element, scale: Float32, first_chunk: Int32, stretch: Int32, stretches: Int32, place: Int32,
    places: Int32,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, SEGMENTED: gl.constexpr, INITIAL: gl.constexpr, SAVES: gl.constexpr,
    FINAL: gl.constexpr, SEGMENT: gl.constexpr,
):  # fmt: skip
    """o of a sequence and value head, 128 columns of V; for 16-bit types, K of 64 or 128 and V a multiple of 128.

    A program scans one of `stretches` of a sequence, of `stretch` chunks each, the first of which begins with the
    `first_chunk`: a stretch begins with the state in its place in `starts`, or the sequence. The state is saved after
    every SEGMENT tokens of a sequence but the last ones, if SAVES, and is final after the last token. A sequence
    without tokens is left alone. Over segments (SEGMENTED) a program scans one, from the state that was saved at its
    start.
    """
    blocks: gl.constexpr = V // WIDTH
    size: gl.constexpr = K * V
    kind: gl.constexpr = k.dtype.element_ty

    program = gl.program_id(0)
    span = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * WIDTH
    sequence = span // stretches
    start = (first_chunk + (span % stretches).to(gl.int32) * stretch) * CHUNK
    limit = stretch * CHUNK
    if SEGMENTED:
        sequence = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(gl.int64)
        start = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER) * SEGMENT
        limit = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT)
    begin = gl.load(sequence_begins + sequence)
    first = begin.to(gl.int64) + start
    length = gl.load(sequence_begins + sequence + 1) - begin - start
    count = gl.maximum(gl.minimum(length, limit), 0)
    chunks = (count + CHUNK - 1) // CHUNK
    saved_slot = (begin // SEGMENT + start // SEGMENT).to(gl.int64)
    of_sequence = (sequence * HEADS + head) * size + first_row
    source = initial_state + of_sequence
    source_columns = K if INITIAL else 0
    if start > 0:
        if SEGMENTED:
            source = saved + ((saved_slot - 1) * HEADS + head) * size + first_row
        else:
            source = starts + ((sequence * places + place + span % stretches) * HEADS + head) * size + first_row
        source_columns = K
    source_columns = gl.where(count > 0, source_columns, 0)
    saved += (saved_slot * HEADS + head) * size + first_row
    final_state += of_sequence

    key_head = (head // GROUP).to(gl.int64)
    q += first * Q_STRIDE + key_head * Q_HEAD
    k += first * K_STRIDE + key_head * K_HEAD
    v += first * V_STRIDE + head.to(gl.int64) * V_HEAD + first_row
    lane = (gl.load(first_chunks + sequence) + start // CHUNK).to(gl.int64) * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (CHUNK * CHUNK)
    out += (first * HEADS + head) * V + first_row

    qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    vs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, WIDTH], TILE)
    Ts = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    Ps = gl.allocate_shared_memory(kind, [2, CHUNK, CHUNK], TILE)
    outs = gl.allocate_shared_memory(kind, [2, CHUNK, V_BLOCK], TILE)
    # Both halves of the state scan read every chunk and its scores.
    tiles = Chunks(qs, ks, vs, Ts, sums, device.Gates.allocate(STAGES), device.Ring.allocate(STAGES, 1, 2))
    scores_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(scores_full.index(0), count=1)
    mbarrier.init(scores_full.index(1), count=1)
    scores = Scores(Ps, scores_full)
    into_segment = start % SEGMENT + CHUNK
    gl.warp_specialize(
        [
            (_state_consumer, (
                source, source_columns, saved, final_state, out, tiles, scores, outs.index(0), count, length,
                into_segment, scale, length == count, 0, HEADS, K, V, SAVES, FINAL, SEGMENT,
            )),
            (_state_consumer, (
                source, source_columns, saved, final_state, out, tiles, scores, outs.index(1), count, length,
                into_segment, scale, length == count, 1, HEADS, K, V, SAVES, FINAL, SEGMENT,
            )),
            (_producer, (
                q, k, v, T, gates, tiles, scores, count, chunks, scale, HEADS, Q_STRIDE, K_STRIDE, V_STRIDE, STAGES,
            )),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[208, 88],
    )  # fmt: skip


class Stretches(NamedTuple):
    """Parts of every sequence that are scanned side by side, in chunks: where the first begins, the size of each, how
    many they are, and the place of the state that the first begins with."""

    first: int
    size: int
    count: int
    place: int


WHOLE = Stretches(0, 2**25 - 1, 1, 0)
"""All of a sequence, as one stretch."""

PLACES = 6
"""Those of a sequence in `starts`."""


def bind_whole_scan(
    setup: Setup, shape: Shape, *, segmented: bool, saves: bool, initial: bool, final: bool
) -> Callable[..., None]:
    """o, and the states that are needed: `launch(memory, q, k, v, scale, initial_state, saved, final_state, out,
    stretches)`.

    Args:
        segmented: over segments, from the states in `saved`; otherwise over whole sequences, or stretches of them from
            the states in `starts`.
        saves: whether states between segments are written to `saved`.
        initial: whether there is an initial state.
        final: whether final states are written.
    """
    scan = {
        aligned: device.ByStrides(
            setup, shape, rule_whole_scan_hopper, "Q K V", HEADS=shape.heads, STAGES=setup.schedule["scan_stages"],
            SEGMENTED=segmented, INITIAL=initial, SAVES=saves, FINAL=final, SEGMENT=packing.SEGMENT, aligned=aligned,
        )
        for aligned in (True, False)
    }  # fmt: skip
    programs = (shape.segments if segmented else shape.sequences) * shape.heads * (shape.V // WIDTH.value)
    spans_of = "segment_indices" if segmented else "sequence_begins"

    def launch(
        memory: Mapping[str, Any], q: TokenRows, k: TokenRows, v: TokenRows, scale: float,
        initial_state: Tensor | None, saved: Tensor | None, final_state: Tensor | None, out: Tensor,
        stretches: Stretches = WHOLE,
    ) -> None:  # fmt: skip
        if final_state is not None and shape.is_packed and stretches.first == 0:
            # For sequences without tokens, which no program scans.
            final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
        absent = memory["gates"]  # stands for a pointer that no variant reads
        scan[is_aligned(out)].of(q, k, v).launch(
            (programs * stretches.count,), q=q.start, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory[spans_of], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], initial_state=absent if initial_state is None else initial_state,
            starts=memory.get("starts", absent), saved=absent if saved is None else saved,
            final_state=absent if final_state is None else final_state, out=out, scale=scale,
            first_chunk=stretches.first, stretch=stretches.size, stretches=stretches.count, place=stretches.place,
            places=PLACES,
        )  # fmt: skip

    return launch
