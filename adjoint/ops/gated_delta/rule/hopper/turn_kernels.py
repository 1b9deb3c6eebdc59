"""What of the gated delta rule's adjoint does not go from chunk to chunk, for Hopper, in Gluon: as `rule_turn` has it.

One warpgroup per chunk and key head, and one value head of it after the other: while one is worked on, T, do and the
gates of the next are copied into shared memory. A matrix that is the left operand of a product is so in registers.

    W = Tᵀ (e^{Γ−G} ⊙ k)       Tᵀ, in two parts, from shared memory, where T lies for the next product
    P T, P = scale·(q kᵀ ⊙ D)  P in two parts; so is what it gives, as a right operand, where T lay
    (Tᵀ Pᵀ do)ᵀ = doᵀ (P T)    64 columns of V at a time
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.ops.gated_delta.rule.hopper.pieces import rounded_to, together


@gluon.jit
def _fetch(
    T, do, gates, Ts, dos, sums, ends, buffer, left,
    DO_STRIDE: gl.constexpr, V: gl.constexpr, ROWS: gl.constexpr, GATES: gl.constexpr,
):  # fmt: skip
    """Starts the copies of a value head: `left` rows, and zeros for the others; nothing where it is 0."""
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    there = (row * 0 < left)[:, None] & (column < 64)[None, :]
    of_T = T + (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    for part in gl.static_range(2):
        async_copy.async_copy_global_to_shared(Ts.index(buffer * 2 + part), of_T + part * 4096, mask=there)
    inside = (row < left)[:, None] & (column < 64)[None, :]
    of_do = do + (row.to(gl.int64) * DO_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    for block in gl.static_range(V // 64):
        place = dos.index(buffer * (V // 64) + block)
        async_copy.async_copy_global_to_shared(place, of_do + block * 64, mask=inside)
    lane = gl.arange(0, 64, GATES)
    async_copy.async_copy_global_to_shared(sums.index(buffer), gates + lane, mask=lane * 0 < left)
    async_copy.async_copy_global_to_shared(ends.index(buffer), gates + 256 + lane, mask=lane * 0 < left)
    async_copy.commit_group()


@gluon.jit
def rule_turn_hopper(
    q, k, do, gates, places, T, W, local, scale,
    KEY_HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr,
):  # fmt: skip
    """W [64, K] and local = Tᵀ Pᵀ do, transposed [V, 64], of a chunk and every value head of a key head.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. T is two numbers of the storage type each.
    """
    CHUNK: gl.constexpr = 64
    BLOCKS: gl.constexpr = V // 64
    kind: gl.constexpr = k.dtype.element_ty
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHUNK, 16])
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    LINES: gl.constexpr = gl.SliceLayout(1, VALUES)
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GATES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    slot = (gl.program_id(0) // KEY_HEADS).to(gl.int64)
    key_head = (gl.program_id(0) % KEY_HEADS).to(gl.int64)
    rows = gl.load(places + slot * 4 + 1)
    if rows == 0:
        return
    at = gl.load(places + slot * 4).to(gl.int64)
    q += at * Q_STRIDE + key_head * Q_HEAD
    k += at * K_STRIDE + key_head * K_HEAD
    do += at * DO_STRIDE + key_head * (GROUP * DO_HEAD)
    lane = (slot * KEY_HEADS + key_head) * GROUP
    gates += lane * (5 * CHUNK)
    T += lane * (2 * CHUNK * CHUNK)
    W += lane * (CHUNK * K)
    local += lane * (V * CHUNK)

    qs = gl.allocate_shared_memory(kind, [CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [CHUNK, K], TILE)
    Ts = gl.allocate_shared_memory(kind, [4, CHUNK, CHUNK], TILE)
    dos = gl.allocate_shared_memory(kind, [2 * BLOCKS, CHUNK, CHUNK], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [2, CHUNK], LINE)
    ends = gl.allocate_shared_memory(gl.float32, [2, CHUNK], LINE)
    locals = gl.allocate_shared_memory(kind, [CHUNK, CHUNK], TILE)

    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    inside = (row < rows)[:, None] & (column < K)[None, :]
    of_W = (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    of_k = k + (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    of_q = q + (row.to(gl.int64) * Q_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    async_copy.async_copy_global_to_shared(ks, of_k, mask=inside)
    async_copy.async_copy_global_to_shared(qs, of_q, mask=inside)
    _fetch(T, do, gates, Ts, dos, sums, ends, 0, rows, DO_STRIDE, V, ROWS, GATES)
    value = gl.arange(0, CHUNK, gl.SliceLayout(1, ROWS))
    token = gl.arange(0, CHUNK, gl.SliceLayout(0, ROWS))
    of_local = (value.to(gl.int64) * CHUNK)[:, None] + token.to(gl.int64)[None, :]
    i = gl.arange(0, CHUNK, LINES)[:, None]
    j = gl.arange(0, CHUNK, COLUMNS)[None, :]
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, VALUES)
    empty = gl.zeros([CHUNK, K], gl.float32, STATE)
    async_copy.wait_group(0)
    fence_async_shared()
    scores = warpgroup_mma(qs, ks.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores]) * scale
    for member in range(GROUP):
        buffer = member % 2
        if member > 0:
            async_copy.wait_group(0)
            fence_async_shared()
        T += 2 * CHUNK * CHUNK
        do += DO_HEAD
        gates += 5 * CHUNK
        left = gl.where(member + 1 < GROUP, rows, 0)
        _fetch(T, do, gates, Ts, dos, sums, ends, 1 - buffer, left, DO_STRIDE, V, ROWS, GATES)
        solve = Ts.index(buffer * 2)
        solve_rest = Ts.index(buffer * 2 + 1)

        turned = solve.permute((1, 0)).load(VALUES).to(gl.float32)
        turned += solve_rest.permute((1, 0)).load(VALUES).to(gl.float32)
        turned = gl.where(i == j, 1.0, turned) * ends.index(buffer).load(COLUMNS)[None, :]
        high = rounded_to(turned, kind)
        low = gl.convert_layout(rounded_to(turned - high.to(gl.float32), kind), BY_KEYS)
        of_keys = warpgroup_mma(gl.convert_layout(high, BY_KEYS), ks, empty, use_acc=False, is_async=True)
        of_keys = warpgroup_mma(low, ks, of_keys, is_async=True)

        between = sums.index(buffer).load(LINES)[:, None] - sums.index(buffer).load(COLUMNS)[None, :]
        scores = warpgroup_mma_wait(2, deps=[scores])  # waits for nothing, and the next product not for those before
        P = scores * gl.exp(gl.where(i >= j, between, float("-inf")))
        high = rounded_to(P, kind)
        low = gl.convert_layout(rounded_to(P - high.to(gl.float32), kind), BY_CHUNK)
        left_operand = gl.convert_layout(high, BY_CHUNK)
        both = warpgroup_mma(left_operand, solve, P, is_async=True)
        both = warpgroup_mma(low, solve, both, is_async=True)
        both = warpgroup_mma(left_operand, solve_rest, both, is_async=True)
        of_keys = warpgroup_mma_wait(3, deps=[of_keys])
        qs.store(of_keys.to(kind))
        both = warpgroup_mma_wait(0, deps=[both])
        high = rounded_to(both, kind)
        together()  # T has been read by all
        solve.store(high)
        solve_rest.store(rounded_to(both - high.to(gl.float32), kind))
        fence_async_shared()
        for block in gl.static_range(BLOCKS):
            upstream = dos.index(buffer * BLOCKS + block).permute((1, 0))
            found = warpgroup_mma(upstream, solve, nothing, use_acc=False, is_async=True)
            found = warpgroup_mma(upstream, solve_rest, found, is_async=True)
            if block == 0:
                gl.store(W + of_W, qs.load(WIDE_ROWS))
            found = warpgroup_mma_wait(0, deps=[found])
            locals.store(found.to(kind))
            gl.store(local + block * (CHUNK * CHUNK) + of_local, locals.load(ROWS))
        W += CHUNK * K
        local += V * CHUNK
    async_copy.wait_group(0)


KERNELS = (kernels.register(rule_turn_hopper, budget=Budget(registers=255, shared_bytes=232448), targets=("sm_90",)),)
