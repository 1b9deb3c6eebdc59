"""The forward of the gated delta rule for Hopper, in Gluon: the walk from chunk to chunk and the outputs in one.

What `rule_walk` and `rule_output` compute; v' meets the decayed scores P in two parts. One
warpgroup walks a block of 64 columns of V. The state stays in the accumulators of the tensor cores and is their left
operand too, rounded in registers; q, k, v, T, the decayed scores P and the gates of the chunks to come are copied into
shared memory while earlier chunks are worked on. Each product is started before what can be done beside it.

    known = Sᵀ kᵀ, seen = Sᵀ qᵀ        beside them: the last chunk's outputs leave, copies start, v is read
    found = r + r T°ᵀ                  beside it: S decays, seen decays
    S += w k, o = seen + v' Pᵀ
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from adjoint.core import kernels
from adjoint.core.kernels import Budget


@gluon.jit
def _fetch(
    q, k, v, T, gates, qs, ks, vs, Ts, strengths, starts, ends, stage, left, v_left,
    Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr,
    WIDE_ROWS: gl.constexpr, ROWS: gl.constexpr, GATES: gl.constexpr, TRANSITION: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk; rows past the end of its sequence are zeros."""
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    inside = (row < left)[:, None] & (column < K)[None, :]
    place = k + (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(ks.index(stage), place, mask=inside)
    if not TRANSITION:
        place = q + (row.to(gl.int64) * Q_STRIDE)[:, None] + column.to(gl.int64)[None, :]
        async_copy.async_copy_global_to_shared(qs.index(stage), place, mask=inside)
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    inside = (row < v_left)[:, None] & (column < 64)[None, :]
    place = v + (row.to(gl.int64) * V_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(vs.index(stage), place, mask=inside)
    offset = (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(Ts.index(stage), T + offset)
    lane = gl.arange(0, 64, GATES)
    async_copy.async_copy_global_to_shared(strengths.index(stage), gates + 128 + lane)
    async_copy.async_copy_global_to_shared(starts.index(stage), gates + 192 + lane)
    async_copy.async_copy_global_to_shared(ends.index(stage), gates + 256 + lane)
    async_copy.commit_group()


@gluon.jit
def _fetch_scores(P, Ps, ROWS: gl.constexpr):
    """Starts the copy of a chunk's decayed scores."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    async_copy.async_copy_global_to_shared(Ps, P + (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :])
    async_copy.commit_group()


@gluon.jit
def rule_forward_hopper(
    q, k, v, gates, T, P, spans, begins, firsts, initial_state, saved, final_state, out, scale, save_every,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, SEGMENTED: gl.constexpr, INITIAL: gl.constexpr, FINAL: gl.constexpr, SEGMENT: gl.constexpr,
    HALVES: gl.constexpr, TRANSITION: gl.constexpr,
):  # fmt: skip
    """o of a sequence and value head, 64 columns of V; for 16-bit types, K of 64 or 128 and V a multiple of 64.

    The state is saved after every `save_every` chunks but the last, and is final after the last. A sequence without
    tokens is left alone. Over segments (SEGMENTED) a program walks one, from the state that was saved at its start, and
    saves none.

    Without outputs (TRANSITION) it walks a segment from the identity without values, and from 0 with them, K + V
    columns in all: what the segment makes of any state is M S + B, and Mᵀ and Bᵀ go to `final_state`,
    [segments, H, K + V, K].
    """
    CHUNK: gl.constexpr = 64
    STAGES: gl.constexpr = 2  # chunks in shared memory: the one that is worked on, and the next
    V_BLOCK: gl.constexpr = 64
    blocks: gl.constexpr = (K + V) // V_BLOCK if TRANSITION else V // V_BLOCK
    size: gl.constexpr = K * V
    kind: gl.constexpr = k.dtype.element_ty
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GATES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    span = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    block = program % blocks
    sequence = span
    index = 0
    if SEGMENTED:
        sequence = gl.load(spans + span * 4 + 2).to(gl.int64)
        index = gl.load(spans + span * 4 + 3)
    begin = gl.load(begins + sequence)
    first = begin.to(gl.int64) + index * SEGMENT
    count = gl.load(begins + sequence + 1) - begin - index * SEGMENT
    ends_here = count <= SEGMENT
    if SEGMENTED:
        count = gl.minimum(gl.load(spans + span * 4 + 1), count)
    slot = (gl.load(firsts + sequence) + index * (SEGMENT // CHUNK)).to(gl.int64)
    kept = (begin // SEGMENT + index).to(gl.int64) - 1
    first_row = block * V_BLOCK
    v_first = first_row
    if TRANSITION:
        v_first = gl.maximum(first_row - K, 0)
    v_row = first_row + gl.arange(0, V_BLOCK, gl.SliceLayout(1, STATE))
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE))
    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    if TRANSITION:
        state_place = (v_row.to(gl.int64) * K)[:, None] + k_column.to(gl.int64)[None, :]
    else:
        state_place = v_row.to(gl.int64)[:, None] + (k_column.to(gl.int64) * V)[None, :]
    S = gl.zeros([V_BLOCK, K], gl.float32, STATE)
    if TRANSITION:
        S = gl.where(v_row[:, None] == k_column[None, :], 1.0, 0.0)
    elif INITIAL or SEGMENTED:
        source = initial_state + (sequence * HEADS + head) * size
        if SEGMENTED:  # noqa: SIM102  (a constant, and what only the GPU knows)
            if index > 0:
                source = saved + (kept * HEADS + head) * size
        given = (v_row >= 0)[:, None] & ((k_column >= 0) & (INITIAL | (index > 0)))[None, :]
        S = gl.load(source + state_place, mask=given, other=0.0)

    key_head = (head // GROUP).to(gl.int64)
    q += first * Q_STRIDE + key_head * Q_HEAD
    k += first * K_STRIDE + key_head * K_HEAD
    v += first * V_STRIDE + head.to(gl.int64) * V_HEAD + v_first
    lane = slot * HEADS + head
    gates += lane * (5 * CHUNK)
    T += lane * (CHUNK * CHUNK)
    P += lane * (CHUNK * CHUNK)
    out += (first * HEADS + head) * V + v_first
    out_row = gl.arange(0, CHUNK, gl.SliceLayout(1, ROWS))
    out_column = gl.arange(0, V_BLOCK, gl.SliceLayout(0, ROWS))
    out_offset = (out_row.to(gl.int64) * (HEADS * V))[:, None] + out_column.to(gl.int64)[None, :]

    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    vs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V_BLOCK], TILE)
    Ts = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    qs = ks
    Ps = Ts.index(0)
    if not TRANSITION:
        qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
        # Of one chunk, being needed last: with two there would be one program to an SM, not two.
        Ps = gl.allocate_shared_memory(kind, [CHUNK, CHUNK], TILE)
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    ends = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)

    chunks = (count + CHUNK - 1) // CHUNK
    valued = 1
    if TRANSITION:
        valued = (first_row >= K).to(gl.int32)
    over = 0.0
    if count > 0:
        over = gl.load(gates + 4 * CHUNK - 1)
        _fetch(
            q, k, v, T, gates, qs, ks, vs, Ts, strengths, starts, ends, 0,
            count, count * valued, Q_STRIDE, K_STRIDE, V_STRIDE, K, WIDE_ROWS, ROWS, GATES, TRANSITION,
        )  # fmt: skip
        if not TRANSITION:
            _fetch_scores(P, Ps, ROWS)
    for chunk in range(chunks):
        narrow = gl.convert_layout(S.to(kind), BY_CHUNK)
        stage = chunk % STAGES
        async_copy.wait_group(0 if TRANSITION else 1)  # all but the scores
        fence_async_shared()
        nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
        known = warpgroup_mma(narrow, ks.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if not TRANSITION:  # noqa: SIM102
            if chunk > 0:
                gl.store(out + out_offset, vs.index((chunk - 1) % STAGES).load(ROWS))
                out += (CHUNK * V) * HEADS
        if chunk + 1 < chunks:  # the last chunk is followed by itself, without tokens
            T += HEADS * (CHUNK * CHUNK)
            P += HEADS * (CHUNK * CHUNK)
            gates += HEADS * (5 * CHUNK)
        left = count - (chunk + 1) * CHUNK
        q += CHUNK * Q_STRIDE
        k += CHUNK * K_STRIDE
        v += CHUNK * V_STRIDE
        _fetch(
            q, k, v, T, gates, qs, ks, vs, Ts, strengths, starts, ends, (chunk + 1) % STAGES,
            left, left * valued, Q_STRIDE, K_STRIDE, V_STRIDE, K, WIDE_ROWS, ROWS, GATES, TRANSITION,
        )  # fmt: skip
        coming = gl.load(gates + 4 * CHUNK - 1)
        strength = strengths.index(stage).load(COLUMNS)
        from_start = starts.index(stage).load(COLUMNS)
        values = vs.index(stage).permute((1, 0)).load(VALUES)
        known = warpgroup_mma_wait(0, deps=[known])
        residual = strength[None, :] * values.to(gl.float32) - (strength * from_start)[None, :] * known
        rounded = gl.convert_layout(residual.to(kind), BY_CHUNK)
        found = warpgroup_mma(rounded, Ts.index(stage).permute((1, 0)), residual, is_async=True)
        if not TRANSITION:
            seen = warpgroup_mma(narrow, qs.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        S = S * over
        to_end = ends.index(stage).load(COLUMNS)
        found = warpgroup_mma_wait(0 if TRANSITION else 1, deps=[found])
        carried = gl.convert_layout((to_end[None, :] * found).to(kind), BY_KEYS)
        S = warpgroup_mma(carried, ks.index(stage), S, is_async=True)
        over = coming
        if TRANSITION:
            S = warpgroup_mma_wait(0, deps=[S])
        else:
            high = found.to(kind)
            seen = warpgroup_mma_wait(1, deps=[seen])
            async_copy.wait_group(1)  # the scores; not what is for the next chunk
            fence_async_shared()
            scores = Ps.permute((1, 0))
            total = warpgroup_mma(
                gl.convert_layout(high, BY_CHUNK), scores, seen * (from_start * scale)[None, :], is_async=True
            )
            if HALVES == 2:
                low = gl.convert_layout((found - high.to(gl.float32)).to(kind), BY_CHUNK)
                total = warpgroup_mma(low, scores, total, is_async=True)
            S, total = warpgroup_mma_wait(0, deps=[S, total])
            _fetch_scores(P, Ps, ROWS)
            vs.index(stage).permute((1, 0)).store(total.to(kind))
        if SEGMENTED:
            if FINAL:
                # The last term is 0 where it counts; without it the addresses would be kept from the beginning.
                place = final_state + (sequence * HEADS + head + (chunk + 1 - chunks)) * size
                wanted = (chunk + 1 == chunks) & ends_here
                if wanted:
                    gl.store(place + state_place, S)
        elif not TRANSITION:
            place = saved + ((kept + (chunk + 1) // save_every) * HEADS + head) * size
            wanted = ((chunk + 1) % save_every == 0) & (chunk + 1 < chunks)
            if FINAL:  # noqa: SIM102
                if chunk + 1 == chunks:
                    place = final_state + (sequence * HEADS + head) * size
                    wanted = chunk + 1 == chunks
            if wanted:
                gl.store(place + state_place, S)
    async_copy.wait_group(0)
    if TRANSITION:
        gl.store(final_state + (span * HEADS + head) * (K * (K + V)) + state_place, S)
    else:
        left = gl.minimum(count - (chunks - 1) * CHUNK, count)
        inside = (out_row < left)[:, None] & (out_column < V_BLOCK)[None, :]
        gl.store(out + out_offset, vs.index((chunks - 1) % STAGES).load(ROWS), mask=inside)


KERNELS = (
    kernels.register(rule_forward_hopper, budget=Budget(registers=255, shared_bytes=232448), targets=("sm_90",)),
)
