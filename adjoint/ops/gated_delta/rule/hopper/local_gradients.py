"""What of the adjoint does not go from chunk to chunk, for Hopper: as `rule_local_gradients` has it.

One warpgroup per chunk and key head, and one value head of it after the other: while one is worked on, T, do and the
gates of the next are copied into shared memory. A matrix that is the left operand of a product is so in registers.

    W = Tᵀ (e^{Γ−G} ⊙ k)       Tᵀ, in two parts, from shared memory, where T lies for the next product
    P T, P = scale·(q kᵀ ⊙ D)  P in two parts; so is what it gives, as a right operand, where T lay
    (Tᵀ Pᵀ do)ᵀ = doᵀ (P T)    64 columns of V at a time
"""

from collections.abc import Callable, Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from adjoint.core.kernels import Float32, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, LINE, TILE
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS, GATE_TO_END


@gluon.jit
def _fetch(T, do, gates, Ts, dos, sums, ends, buffer, rows, DO_STRIDE: gl.constexpr, V: gl.constexpr):
    """Starts the copies of a value head: `rows` rows, and zeros for the others; nothing where it is 0."""
    T_rows = device.Rows.of(CHUNK, CHUNK, CHUNK)
    present = (T_rows.row * 0 < rows)[:, None] & (T_rows.column < CHUNK)[None, :]
    of_T = T_rows.at(T)
    for part in gl.static_range(2):
        async_copy.async_copy_global_to_shared(Ts.index(buffer * 2 + part), of_T + part * (CHUNK * CHUNK), mask=present)
    do_rows = device.Rows.of(CHUNK, CHUNK, DO_STRIDE)
    inside = do_rows.inside(rows)
    of_do = do_rows.at(do)
    for block in gl.static_range(V // CHUNK):
        tile = dos.index(buffer * (V // CHUNK) + block)
        async_copy.async_copy_global_to_shared(tile, of_do + block * CHUNK, mask=inside)
    lane = gl.arange(0, CHUNK, gl.BlockedLayout([4], [32], [4], [0]))
    async_copy.async_copy_global_to_shared(sums.index(buffer), gates + lane, mask=lane * 0 < rows)
    async_copy.async_copy_global_to_shared(ends.index(buffer), gates + GATE_TO_END * CHUNK + lane, mask=lane * 0 < rows)
    async_copy.commit_group()


@kernel(budget=device.BUDGET, targets=("sm_90",))
@gluon.jit
def rule_local_gradients_hopper(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32,
    chunk_indices: Pointer.int32, T: Pointer16.element, W: Pointer16.element, local_gradients: Pointer16.element,
    scale: Float32,
    KEY_HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr,
):  # fmt: skip
    """W [64, K] and local_gradients = Tᵀ Pᵀ do, transposed [V, 64], of a chunk and every value head of a key head.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. T is two numbers of the storage type each.
    """
    BLOCKS: gl.constexpr = V // CHUNK
    kind: gl.constexpr = k.dtype.element_ty
    STATE: gl.constexpr = device.product_layout(K)
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    LINES: gl.constexpr = gl.SliceLayout(1, VALUES)

    slot = (gl.program_id(0) // KEY_HEADS).to(gl.int64)
    key_head = (gl.program_id(0) % KEY_HEADS).to(gl.int64)
    rows = gl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if rows == 0:
        return
    first_token = gl.load(chunk_indices + slot * INDEX_WIDTH).to(gl.int64)
    q += first_token * Q_STRIDE + key_head * Q_HEAD
    k += first_token * K_STRIDE + key_head * K_HEAD
    do += first_token * DO_STRIDE + key_head * (GROUP * DO_HEAD)
    lane = (slot * KEY_HEADS + key_head) * GROUP
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (2 * CHUNK * CHUNK)
    W += lane * (CHUNK * K)
    local_gradients += lane * (V * CHUNK)

    qs = gl.allocate_shared_memory(kind, [CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [CHUNK, K], TILE)
    Ts = gl.allocate_shared_memory(kind, [4, CHUNK, CHUNK], TILE)
    dos = gl.allocate_shared_memory(kind, [2 * BLOCKS, CHUNK, CHUNK], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [2, CHUNK], LINE)
    ends = gl.allocate_shared_memory(gl.float32, [2, CHUNK], LINE)
    staged_tile = gl.allocate_shared_memory(kind, [CHUNK, CHUNK], TILE)

    W_rows = device.Rows.of(CHUNK, K, K)
    inside = W_rows.inside(rows)
    of_k = device.Rows.of(CHUNK, K, K_STRIDE).at(k)
    of_q = device.Rows.of(CHUNK, K, Q_STRIDE).at(q)
    async_copy.async_copy_global_to_shared(ks, of_k, mask=inside)
    async_copy.async_copy_global_to_shared(qs, of_q, mask=inside)
    _fetch(T, do, gates, Ts, dos, sums, ends, 0, rows, DO_STRIDE, V)
    local_rows = device.Rows.of(CHUNK, CHUNK, CHUNK)
    i = gl.arange(0, CHUNK, LINES)[:, None]
    j = gl.arange(0, CHUNK, COLUMNS)[None, :]
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, VALUES)
    no_keys = gl.zeros([CHUNK, K], gl.float32, STATE)
    async_copy.wait_group(0)
    fence_async_shared()
    scores = device.start_product(qs, ks.permute((1, 0)), nothing)
    scores = warpgroup_mma_wait(0, deps=[scores]) * scale
    for member in range(GROUP):
        buffer = member % 2
        if member > 0:
            async_copy.wait_group(0)
            fence_async_shared()
        T += 2 * CHUNK * CHUNK
        do += DO_HEAD
        gates += GATE_ROWS * CHUNK
        next_rows = gl.where(member + 1 < GROUP, rows, 0)
        _fetch(T, do, gates, Ts, dos, sums, ends, 1 - buffer, next_rows, DO_STRIDE, V)
        inverse = Ts.index(buffer * 2)
        inverse_low = Ts.index(buffer * 2 + 1)

        T_transposed = inverse.permute((1, 0)).load(VALUES).to(gl.float32)
        T_transposed += inverse_low.permute((1, 0)).load(VALUES).to(gl.float32)
        T_transposed = gl.where(i == j, 1.0, T_transposed) * ends.index(buffer).load(COLUMNS)[None, :]
        high = device.rounded_to(T_transposed, kind)
        low = gl.convert_layout(device.rounded_to(T_transposed - high.to(gl.float32), kind), BY_KEYS)
        of_keys = device.start_product(gl.convert_layout(high, BY_KEYS), ks, no_keys)
        of_keys = warpgroup_mma(low, ks, of_keys, is_async=True)

        between = sums.index(buffer).load(LINES)[:, None] - sums.index(buffer).load(COLUMNS)[None, :]
        scores = warpgroup_mma_wait(2, deps=[scores])  # waits for nothing, and the next product not for those before
        P = scores * gl.exp(gl.where(i >= j, between, float("-inf")))
        high = device.rounded_to(P, kind)
        low = gl.convert_layout(device.rounded_to(P - high.to(gl.float32), kind), BY_CHUNK)
        left_operand = gl.convert_layout(high, BY_CHUNK)
        P_T = warpgroup_mma(left_operand, inverse, P, is_async=True)
        P_T = warpgroup_mma(low, inverse, P_T, is_async=True)
        P_T = warpgroup_mma(left_operand, inverse_low, P_T, is_async=True)
        of_keys = warpgroup_mma_wait(3, deps=[of_keys])
        qs.store(of_keys.to(kind))
        P_T = warpgroup_mma_wait(0, deps=[P_T])
        high = device.rounded_to(P_T, kind)
        device.thread_barrier()  # T has been read by all
        inverse.store(high)
        inverse_low.store(device.rounded_to(P_T - high.to(gl.float32), kind))
        fence_async_shared()
        for block in gl.static_range(BLOCKS):
            upstream = dos.index(buffer * BLOCKS + block).permute((1, 0))
            local_tile = device.start_product(upstream, inverse, nothing)
            local_tile = warpgroup_mma(upstream, inverse_low, local_tile, is_async=True)
            if block == 0:
                gl.store(W + W_rows.offset, qs.load(device.row_layout(K)))
            local_tile = warpgroup_mma_wait(0, deps=[local_tile])
            staged_tile.store(local_tile.to(kind))
            gl.store(
                local_gradients + block * (CHUNK * CHUNK) + local_rows.offset,
                staged_tile.load(device.row_layout(CHUNK)),
            )
        W += CHUNK * K
        local_gradients += V * CHUNK
    async_copy.wait_group(0)


def bind_local_gradients(setup: Setup, shape: Shape) -> Callable[..., None]:
    """W and the local gradients of every chunk and value head: `launch(memory, q, k, do, scale)`."""
    local = device.ByStrides(
        setup, shape, rule_local_gradients_hopper, "Q K DO", KEY_HEADS=shape.key_heads
    )  # fmt: skip
    grid = (shape.chunks * shape.key_heads,)

    def launch(memory: Mapping[str, Any], q: TokenRows, k: TokenRows, do: TokenRows | None, scale: float) -> None:
        assert do is not None  # or the plan refused
        local.of(q, k, do).launch(
            grid, q=q.start, k=k.start, do=do.start, gates=memory["gates"], chunk_indices=memory["chunk_indices"],
            T=memory["T"], W=memory["W"], local_gradients=memory["local_gradients"], scale=scale,
        )  # fmt: skip

    return launch
