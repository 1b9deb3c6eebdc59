"""The walk back of the gated delta rule's adjoint for Hopper, in Gluon: what `rule_walk_back` computes.

A program walks 64 columns of V from the last chunk to the first, with three warpgroups. One copies W, q, k, do,
Tᵀ Pᵀ do and the gates of the chunks to come into shared memory; one has dSᵀ in the accumulators of the tensor cores,
and as their left operand too, rounded in registers; one takes Yᵀ and dS⁺ᵀ from shared memory to where they belong.
A warp that copies is held up by what was copied before, and would hold up the products.

    found = dS⁺ᵀ Wᵀ                         in two parts; beside them: dS⁺ᵀ goes to shared memory
    dSᵀ = e^Γ dS⁺ᵀ + (scale·e^G ⊙ do)ᵀ q    likewise; beside them: Y = found + Tᵀ Pᵀ do
    dSᵀ −= (β e^G ⊙ Y)ᵀ k                   beside it: Yᵀ goes to shared memory
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.ops.gated_delta.rule.hopper.pieces import rounded_to, say, together


@gluon.jit
def _copy(
    q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, full, empty, count, chunks,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies a chunk as soon as there is room for it; rows past the end of a sequence are zeros."""
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GATES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    of_W = (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    of_k = (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    of_q = (row.to(gl.int64) * Q_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    value = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    place = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    of_local = (value.to(gl.int64) * 64)[:, None] + place.to(gl.int64)[None, :]
    of_do = (value.to(gl.int64) * DO_STRIDE)[:, None] + place.to(gl.int64)[None, :]
    lane = gl.arange(0, 64, GATES)
    left = count - (chunks - 1) * 64
    stage = 0
    phase = 1
    come = 0
    for chunk in range(chunks):
        mbarrier.wait(empty.index(stage), phase)
        inside = (row < left)[:, None] & (column < K)[None, :]
        async_copy.async_copy_global_to_shared(Ws.index(stage), W + of_W)
        async_copy.async_copy_global_to_shared(qs.index(stage), q + of_q, mask=inside)
        async_copy.async_copy_global_to_shared(ks.index(stage), k + of_k, mask=inside)
        inside = (value < left)[:, None] & (place < 64)[None, :]
        async_copy.async_copy_global_to_shared(dos.index(stage), do + of_do, mask=inside)
        async_copy.async_copy_global_to_shared(locals.index(stage), local + of_local)
        async_copy.async_copy_global_to_shared(strengths.index(stage), gates + 128 + lane)
        async_copy.async_copy_global_to_shared(starts.index(stage), gates + 192 + lane)
        async_copy.commit_group()
        if chunk > 0:
            async_copy.wait_group(1)
            say(full, come)
            come = stage
        q -= 64 * Q_STRIDE
        k -= 64 * K_STRIDE
        do -= 64 * DO_STRIDE
        gates -= HEADS * (5 * 64)
        W -= HEADS * (64 * K)
        local -= HEADS * (V * 64)
        left = 64
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    async_copy.wait_group(0)
    if chunks > 0:
        say(full, come)


@gluon.jit
def _leave(
    Y, dstates, Ys, dSs, staged, drained, chunks, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Takes Yᵀ and dS⁺ᵀ of every chunk out of shared memory."""
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    of_Y = (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    of_dS = (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    phase = 0
    for _ in range(chunks):
        mbarrier.wait(staged, phase)
        dS_rows = dSs.load(WIDE_ROWS)
        Y_rows = Ys.load(ROWS)
        together()
        mbarrier.arrive(drained)
        gl.store(dstates + of_dS, dS_rows)
        gl.store(Y + of_Y, Y_rows)
        dstates -= HEADS * (V * K)
        Y -= HEADS * (V * 64)
        phase ^= 1


@gluon.jit
def _walk(
    dfinal_state, dinitial_state, state, qs, ks, dos, Ws, locals, strengths, starts, Ys, dSs,
    full, empty, staged, drained, chunks, scale,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """The products, from chunk to chunk."""
    kind: gl.constexpr = ks.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, 64, gl.SliceLayout(1, STATE)).to(gl.int64)
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE)).to(gl.int64)
    dS = gl.zeros([64, K], gl.float32, STATE)
    if FINAL:
        dS = gl.load(dfinal_state + state + v_row[:, None] + (k_column * V)[None, :])
    nothing = gl.zeros([64, 64], gl.float32, VALUES)
    stage = 0
    phase = 0
    out_phase = 1
    for _ in range(chunks):
        rounded = rounded_to(dS, kind)
        rest = gl.convert_layout(rounded_to(dS - rounded.to(gl.float32), kind), BY_CHUNK)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        mbarrier.wait(full.index(stage), phase)
        found = warpgroup_mma(rest, Ws.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        found = warpgroup_mma(narrow, Ws.index(stage).permute((1, 0)), found, is_async=True)
        # Waits for nothing: without it the next product would be preceded by a wait for this one.
        dS = warpgroup_mma_wait(2, deps=[dS])
        from_start = starts.index(stage).load(COLUMNS)
        over = starts.index(stage).slice(63, 1).load(gl.SliceLayout(0, STATE))
        upstream = dos.index(stage).permute((1, 0)).load(VALUES).to(gl.float32) * (from_start * scale)[None, :]
        high = rounded_to(upstream, kind)
        low = gl.convert_layout(rounded_to(upstream - high.to(gl.float32), kind), BY_KEYS)
        high = gl.convert_layout(high, BY_KEYS)
        dS = warpgroup_mma(low, qs.index(stage), dS * over[None, :], is_async=True)
        dS = warpgroup_mma(high, qs.index(stage), dS, is_async=True)
        besides = locals.index(stage).load(VALUES).to(gl.float32)
        factor = strengths.index(stage).load(COLUMNS) * from_start
        mbarrier.wait(drained, out_phase)
        dSs.store(rounded)
        found = warpgroup_mma_wait(2, deps=[found])
        found += besides
        carried = gl.convert_layout((-(found * factor[None, :])).to(kind), BY_KEYS)
        dS = warpgroup_mma(carried, ks.index(stage), dS, is_async=True)
        Ys.store(found.to(kind))
        together()
        mbarrier.arrive(staged)
        dS = warpgroup_mma_wait(0, deps=[dS])
        together()
        mbarrier.arrive(empty.index(stage))
        out_phase ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if INITIAL:
        # 0, and known after the loop alone: or the places would be kept in registers through it.
        state += gl.minimum(stage, 0)
        gl.store(dinitial_state + state + v_row[:, None] + (k_column * V)[None, :], dS)


@gluon.jit
def rule_walk_back_hopper(
    q, k, do, gates, W, local, begins, firsts, dfinal_state, dinitial_state, Y, dstates, scale,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one sequence and value head, for 64 columns of V and all of K; transposed.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. FINAL: whether there is a gradient of the final state.
    INITIAL: whether that of the initial state is wanted.
    """
    CHUNK: gl.constexpr = 64
    V_BLOCK: gl.constexpr = 64
    blocks: gl.constexpr = V // V_BLOCK
    kind: gl.constexpr = k.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    sequence = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * V_BLOCK
    begin = gl.load(begins + sequence)
    count = gl.load(begins + sequence + 1) - begin
    chunks = (count + CHUNK - 1) // CHUNK
    last = gl.maximum(chunks - 1, 0)
    key_head = (head // GROUP).to(gl.int64)
    token = begin.to(gl.int64) + last * CHUNK
    q += token * Q_STRIDE + key_head * Q_HEAD
    k += token * K_STRIDE + key_head * K_HEAD
    do += token * DO_STRIDE + head.to(gl.int64) * DO_HEAD + first_row
    lane = (gl.load(firsts + sequence) + last).to(gl.int64) * HEADS + head
    gates += lane * (5 * CHUNK)
    W += lane * (CHUNK * K)
    local += lane * (V * CHUNK) + first_row * CHUNK
    Y += lane * (V * CHUNK) + first_row * CHUNK
    dstates += lane * (V * K) + first_row * K
    state = (sequence * HEADS + head) * (K * V) + first_row

    Ws = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    dos = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V_BLOCK], TILE)
    locals = gl.allocate_shared_memory(kind, [STAGES, V_BLOCK, CHUNK], TILE)
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    dSs = gl.allocate_shared_memory(kind, [V_BLOCK, K], TILE)
    Ys = gl.allocate_shared_memory(kind, [V_BLOCK, CHUNK], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(staged, count=1)
    mbarrier.init(drained, count=1)
    gl.warp_specialize(
        [
            (
                _walk,
                (
                    dfinal_state, dinitial_state, state, qs, ks, dos, Ws, locals, strengths, starts, Ys, dSs,
                    full, empty, staged, drained, chunks, scale, K, V, STAGES, FINAL, INITIAL,
                ),
            ),
            (
                _copy,
                (
                    q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, full, empty, count, chunks,
                    HEADS, Q_STRIDE, K_STRIDE, DO_STRIDE, K, V, STAGES,
                ),
            ),
            (_leave, (Y, dstates, Ys, dSs, staged, drained, chunks, HEADS, K, V)),
        ],
        [4, 4],
        [128, 96],
    )  # fmt: skip


KERNELS = (
    kernels.register(rule_walk_back_hopper, budget=Budget(registers=255, shared_bytes=232448), targets=("sm_90",)),
)
