"""The walk back of the gated delta rule's adjoint for Hopper, in Gluon: what `rule_walk_back` computes.

One warpgroup walks 64 columns of V from the last chunk to the first. dSᵀ stays in the accumulators of the tensor cores
and is their left operand too, rounded in registers; W, q, k, do, Tᵀ Pᵀ do and the gates of the chunks to come are
copied into shared memory while later ones are worked on. Yᵀ and dS⁺ᵀ leave through shared memory, in rows.

    found = dS⁺ᵀ Wᵀ                    beside it: copies start, dS⁺ᵀ goes to shared memory
    dSᵀ = e^Γ dS⁺ᵀ + (scale·e^G ⊙ do)ᵀ q    beside it: Y = found + Tᵀ Pᵀ do
    dSᵀ −= (β e^G ⊙ Y)ᵀ k              beside it: Yᵀ and dS⁺ᵀ leave
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from adjoint.core import kernels
from adjoint.core.kernels import Budget


@gluon.jit
def _fetch(
    q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, stage, left,
    Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr, K: gl.constexpr,
    WIDE_ROWS: gl.constexpr, ROWS: gl.constexpr, GATES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a chunk of which `left` rows are there, and the others are zeros; none where it is 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    of_W = W + (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    of_k = k + (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    of_q = q + (row.to(gl.int64) * Q_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    value = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    place = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    of_local = local + (value.to(gl.int64) * 64)[:, None] + place.to(gl.int64)[None, :]
    of_do = do + (value.to(gl.int64) * DO_STRIDE)[:, None] + place.to(gl.int64)[None, :]
    # A branch would not do: what is in flight in the tensor cores is waited for at every one.
    inside = (row < left)[:, None] & (column < K)[None, :]
    there = (row * 0 < left)[:, None] & (column < K)[None, :]
    async_copy.async_copy_global_to_shared(Ws.index(stage), of_W, mask=there)
    async_copy.async_copy_global_to_shared(qs.index(stage), of_q, mask=inside)
    async_copy.async_copy_global_to_shared(ks.index(stage), of_k, mask=inside)
    inside = (value < left)[:, None] & (place < 64)[None, :]
    there = (value * 0 < left)[:, None] & (place < 64)[None, :]
    async_copy.async_copy_global_to_shared(dos.index(stage), of_do, mask=inside)
    async_copy.async_copy_global_to_shared(locals.index(stage), of_local, mask=there)
    lane = gl.arange(0, 64, GATES)
    async_copy.async_copy_global_to_shared(strengths.index(stage), gates + 128 + lane, mask=lane * 0 < left)
    async_copy.async_copy_global_to_shared(starts.index(stage), gates + 192 + lane, mask=lane * 0 < left)
    async_copy.commit_group()


@gluon.jit
def rule_walk_back_hopper(
    q, k, do, gates, W, local, begins, firsts, dfinal_state, dinitial_state, Y, dstates, scale,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, FETCH: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one sequence and value head, for 64 columns of V and all of K; transposed.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. FINAL: whether there is a gradient of the final state.
    INITIAL: whether that of the initial state is wanted.
    """
    CHUNK: gl.constexpr = 64
    V_BLOCK: gl.constexpr = 64
    blocks: gl.constexpr = V // V_BLOCK
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
    sequence = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * V_BLOCK
    begin = gl.load(begins + sequence)
    count = gl.load(begins + sequence + 1) - begin
    chunks = (count + CHUNK - 1) // CHUNK
    last = gl.maximum(chunks - 1, 0)

    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    v_row = first_row + gl.arange(0, V_BLOCK, gl.SliceLayout(1, STATE))
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE))
    state_place = v_row.to(gl.int64)[:, None] + (k_column.to(gl.int64) * V)[None, :]
    dS = gl.zeros([V_BLOCK, K], gl.float32, STATE)
    if FINAL:
        dS = gl.load(dfinal_state + (sequence * HEADS + head) * (K * V) + state_place)

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
    Y_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, ROWS))
    Y_column = gl.arange(0, CHUNK, gl.SliceLayout(0, ROWS))
    Y_offset = (Y_row.to(gl.int64) * CHUNK)[:, None] + Y_column.to(gl.int64)[None, :]
    dS_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, WIDE_ROWS))
    dS_column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    dS_offset = (dS_row.to(gl.int64) * K)[:, None] + dS_column.to(gl.int64)[None, :]

    Ws = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    dos = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V_BLOCK], TILE)
    locals = gl.allocate_shared_memory(kind, [STAGES, V_BLOCK, CHUNK], TILE)
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    dSs = gl.allocate_shared_memory(kind, [V_BLOCK, K], TILE)
    Ys = gl.allocate_shared_memory(kind, [V_BLOCK, CHUNK], TILE)

    # The last chunk, of which some rows may be missing, then those before it.
    over = gl.load(gates + 4 * CHUNK - 1, mask=count > 0, other=0.0)
    _fetch(
        q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, 0, count - last * CHUNK,
        Q_STRIDE, K_STRIDE, DO_STRIDE, K, WIDE_ROWS, ROWS, GATES,
    )  # fmt: skip
    for ahead in gl.static_range(1, STAGES - 1):
        q -= CHUNK * Q_STRIDE
        k -= CHUNK * K_STRIDE
        do -= CHUNK * DO_STRIDE
        gates -= HEADS * (5 * CHUNK)
        W -= HEADS * (CHUNK * K)
        local -= HEADS * (V * CHUNK)
        _fetch(
            q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, ahead,
            gl.where(ahead < chunks, CHUNK, 0), Q_STRIDE, K_STRIDE, DO_STRIDE, K, WIDE_ROWS, ROWS, GATES,
        )  # fmt: skip
    later = gates + (STAGES - 3) * HEADS * (5 * CHUNK) + 4 * CHUNK - 1
    coming = gl.load(later, mask=chunks > 1, other=0.0)
    stage = 0
    free = STAGES - 1
    for step in range(chunks):
        rounded = dS.to(kind)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()
        nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
        found = warpgroup_mma(narrow, Ws.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        # Waits for nothing: without it the next product would be preceded by a wait for this one.
        dS = warpgroup_mma_wait(1, deps=[dS])
        if FETCH == 0:
            q -= CHUNK * Q_STRIDE
            k -= CHUNK * K_STRIDE
            do -= CHUNK * DO_STRIDE
            gates -= HEADS * (5 * CHUNK)
            W -= HEADS * (CHUNK * K)
            local -= HEADS * (V * CHUNK)
            _fetch(
                q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, free,
                gl.where(step + STAGES - 1 < chunks, CHUNK, 0),
                Q_STRIDE, K_STRIDE, DO_STRIDE, K, WIDE_ROWS, ROWS, GATES,
            )  # fmt: skip
        dSs.store(rounded)
        strength = strengths.index(stage).load(COLUMNS)
        from_start = starts.index(stage).load(COLUMNS)
        upstream = dos.index(stage).permute((1, 0)).load(VALUES).to(gl.float32) * (from_start * scale)[None, :]
        grown = gl.convert_layout(upstream.to(kind), BY_KEYS)
        dS = warpgroup_mma(grown, qs.index(stage), dS * over, is_async=True)
        if FETCH == 1:
            q -= CHUNK * Q_STRIDE
            k -= CHUNK * K_STRIDE
            do -= CHUNK * DO_STRIDE
            gates -= HEADS * (5 * CHUNK)
            W -= HEADS * (CHUNK * K)
            local -= HEADS * (V * CHUNK)
            _fetch(
                q, k, do, W, local, gates, qs, ks, dos, Ws, locals, strengths, starts, free,
                gl.where(step + STAGES - 1 < chunks, CHUNK, 0),
                Q_STRIDE, K_STRIDE, DO_STRIDE, K, WIDE_ROWS, ROWS, GATES,
            )  # fmt: skip
        over = coming
        later = gates + (STAGES - 3) * HEADS * (5 * CHUNK) + 4 * CHUNK - 1
        coming = gl.load(later, mask=step + 2 < chunks, other=0.0)
        besides = locals.index(stage).load(VALUES).to(gl.float32)
        factor = -(strength * from_start)
        found = warpgroup_mma_wait(1, deps=[found])
        found += besides
        carried = gl.convert_layout((found * factor[None, :]).to(kind), BY_KEYS)
        dS = warpgroup_mma(carried, ks.index(stage), dS, is_async=True)
        Ys.store(found.to(kind))
        gl.store(dstates + dS_offset, dSs.load(WIDE_ROWS))
        gl.store(Y + Y_offset, Ys.load(ROWS))
        dstates -= HEADS * (V * K)
        Y -= HEADS * (V * CHUNK)
        free = stage
        stage = gl.where(stage + 1 == STAGES, 0, stage + 1)
        dS = warpgroup_mma_wait(0, deps=[dS])
    async_copy.wait_group(0)
    if INITIAL:
        gl.store(dinitial_state + (sequence * HEADS + head) * (K * V) + state_place, dS)


KERNELS = (
    kernels.register(rule_walk_back_hopper, budget=Budget(registers=255, shared_bytes=232448), targets=("sm_90",)),
)
