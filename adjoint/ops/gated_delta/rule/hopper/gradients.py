"""The gradients of tokens for Hopper: `rule_matrices`, `rule_gradients` and `rule_gate_gradients` in one kernel,
because together they move more than twice the bytes.

Two warpgroups, each with half the columns of every product, work through chunks and key heads, and for each through
the value heads of its group, whose dq and dk they add up in registers. A value head's tiles do, v', Y, v, S and dS⁺ are
read once, into shared memory, while the head before is worked on: each as soon as its place is free. Products, and what
is done beside them:

    do v'ᵀ, Y v'ᵀ                                dv, the rows of Y ⊙ v
    do Sᵀ                                        M and E, rounded, into shared memory
    Y Sᵀ                                         dq takes do Sᵀ
    q kᵀ, k kᵀ, v' dS⁺ᵀ, M k, Mᵀ q, E k, Eᵀ k    dk takes Y Sᵀ; rows and columns of Z; ⟨S, dS⁺⟩

Registers are what is scarce: spilling 400 bytes a thread took 1.4 times as long. After a product that a group of warps
waited for, the other may still read its tiles: a barrier before they change.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from adjoint.core.kernels import Float32, Int32, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, LINE, TILE, WHOLE, Part
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS

MINUS_ZERO = gl.constexpr(-(2**31))
"""The bits of −0 in float32, which is e^G of a token that resets the state."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _halves(x, COLUMNS: gl.constexpr):
    """The sums of every row of x, of either half, each of which a warpgroup has: [64, 2]."""
    return gl.sum(gl.reshape(x, [CHUNK, 2, COLUMNS // 2]), 2)


@gluon.jit
def _fetch(tile, base, STRIDE: gl.constexpr):
    """Starts the copy of a matrix."""
    async_copy.async_copy_global_to_shared(tile, device.Rows.of(tile.shape[0], tile.shape[1], STRIDE).at(base))


@gluon.jit
def _store_tokens(out, tile, count, STRIDE: gl.constexpr):
    """Stores the rows of a tile in shared memory that are tokens of the chunk."""
    rows = device.Rows.of(CHUNK, tile.shape[1], STRIDE)
    inside = rows.inside(count)
    gl.store(rows.at(out), tile.load(device.row_layout(tile.shape[1], gl.num_warps())), mask=inside)


@gluon.jit
def _unnormalized(gradient, tile, factors, rows, KEY_HEADS: gl.constexpr, LAYOUT: gl.constexpr):
    """The gradient of x for one of y = factor·x: factor·(dy − y (y·dy))."""
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, LAYOUT))
    factor = gl.load(factors + row.to(gl.int64) * KEY_HEADS, mask=row < rows, other=0.0)
    y = tile.load(LAYOUT).to(gl.float32)
    along = gl.sum(y * gradient, 1)
    return (gradient - y * along[:, None]) * factor[:, None]


@kernel(budget=device.BUDGET, targets=("sm_90",))
@gluon.jit
def rule_gradients_hopper(
    q: Pointer16.element, k: Pointer16.element, v: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32,
    chunk_indices: Pointer.int32, states: Pointer16.element, dstates: Pointer16.element, new_values: Pointer16.element,
    Y: Pointer16.element, dq: Pointer16.element, dk: Pointer16.element, dv: Pointer16.element, dg: Pointer.gate,
    dbeta: Pointer.strength, q_factors: Pointer.float32, k_factors: Pointer.float32, items: Int32, scale: Float32,
    KEY_HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, Q_HEAD: gl.constexpr, K_STRIDE: gl.constexpr,
    K_HEAD: gl.constexpr, V_STRIDE: gl.constexpr, V_HEAD: gl.constexpr, DO_STRIDE: gl.constexpr,
    DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, NORMALIZED: gl.constexpr,
):  # fmt: skip
    """dq, dk, dv, dg and dβ, for 16-bit types, K and V of 64 or 128.

        M = scale·(do v'ᵀ) ⊙ D,  E = β ⊙ N,  N = −(Y v'ᵀ) ⊙ D°,  Z = E ⊙ k kᵀ + M ⊙ q kᵀ, below its diagonal
        dq = Σ over value heads of scale·e^G ⊙ (do Sᵀ) + M k
        dk = Σ over value heads of Mᵀ q + E k + Eᵀ k − β e^G ⊙ (Y Sᵀ) + e^{Γ−G} ⊙ (v' dS⁺ᵀ)
        dv = β ⊙ Y
        dβ = rows of Y ⊙ v + N ⊙ k kᵀ − k ⊙ (e^G Y Sᵀ), summed
        dg = e^Γ ⟨S, dS⁺⟩ + Σ_{s ≥ t} of the rows of q ⊙ (scale e^G do Sᵀ) − β k ⊙ (e^G Y Sᵀ), summed
             + Σ_{s < t} of the rows of k ⊙ (e^{Γ−G} v' dS⁺ᵀ), summed, and of column s of Z less row s, summed

    What Z has in the last sum is what passes a token, Σ of Z_ij over i ≥ t > j: here a running sum in float32, whose
    terms may cancel, each rounded to 2^-24 of the sum; `_sums_past` has none that do, of Z in two 16-bit parts.

    Sums over rows are of two halves, one a warpgroup's, and those over columns of four parts, each a warp's; they are
    in shared memory until all are there. `items` are chunks times key heads. Programs share them out evenly; which
    has which, and which launch, changes no bit.
    """
    HEADS: gl.constexpr = KEY_HEADS * GROUP
    kind: gl.constexpr = k.dtype.element_ty
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, V // 2, 16])
    SQUARE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, CHUNK // 2, 16])
    KEY_ROWS: gl.constexpr = device.row_layout(K, gl.num_warps())
    PLANE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    HALVES: gl.constexpr = gl.BlockedLayout([2, 2], [32, 1], [8, 1], [1, 0])
    BY_WARP: gl.constexpr = gl.BlockedLayout([4, 2], [1, 32], [8, 1], [1, 0])
    TOKENS: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    EVERYWHERE: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    BY_TOKEN: gl.constexpr = gl.SliceLayout(1, HALVES)
    SLICE: gl.constexpr = 32  # rows of S and dS⁺ that are multiplied at a time

    q_tiles = gl.allocate_shared_memory(kind, [1, CHUNK, K], TILE)
    k_tiles = gl.allocate_shared_memory(kind, [1, CHUNK, K], TILE)
    dos = gl.allocate_shared_memory(kind, [2, CHUNK, V], TILE)
    news = gl.allocate_shared_memory(kind, [2, V, CHUNK], TILE)
    Y_tiles = gl.allocate_shared_memory(kind, [1, V, CHUNK], TILE)
    v_tiles = gl.allocate_shared_memory(kind, [1, CHUNK, V], TILE)
    S_tiles = gl.allocate_shared_memory(kind, [1, V, K], TILE)
    dS_tiles = gl.allocate_shared_memory(kind, [1, V, K], TILE)
    M_tiles = gl.allocate_shared_memory(kind, [1, CHUNK, CHUNK], TILE)
    E_tiles = gl.allocate_shared_memory(kind, [1, CHUNK, CHUNK], TILE)
    of_values = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], PLANE)
    of_N = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], PLANE)
    of_rows = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], PLANE)
    of_queries = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], PLANE)
    of_keys = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], PLANE)
    of_ends = gl.allocate_shared_memory(gl.float32, [CHUNK, 2], PLANE)
    of_columns = gl.allocate_shared_memory(gl.float32, [4, CHUNK], PLANE)
    of_states = gl.allocate_shared_memory(gl.float32, [SLICE], LINE)
    sums = gl.allocate_shared_memory(gl.float32, [2, CHUNK], LINE)
    tile_gates = device.Gates.allocate(2)

    program = gl.program_id(0)
    step = gl.num_programs(0)
    count = (items - program + step - 1) // step * GROUP
    item = program
    slot = (item // KEY_HEADS).to(gl.int64)
    first_token = gl.load(chunk_indices + slot * INDEX_WIDTH)
    rows = gl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    lane = item.to(gl.int64) * GROUP
    key_head = (item % KEY_HEADS).to(gl.int64)
    head = key_head * GROUP

    # Five groups of copies for every value head, in the order they are waited for.
    place = do + first_token.to(gl.int64) * DO_STRIDE + head * DO_HEAD
    device.fetch_tokens(dos.index(0), place, DO_STRIDE, rows)
    _fetch(news.index(0), new_values + lane * (V * CHUNK), CHUNK)
    async_copy.commit_group()
    _fetch(Y_tiles.index(0), Y + lane * (V * CHUNK), CHUNK)
    place = v + first_token.to(gl.int64) * V_STRIDE + head * V_HEAD
    device.fetch_tokens(v_tiles.index(0), place, V_STRIDE, rows)
    device.fetch_gates(sums, 0, gates + lane * (GATE_ROWS * CHUNK), device.GATE_SUM)
    tile_gates.fetch(0, gates + lane * (GATE_ROWS * CHUNK))
    async_copy.commit_group()
    _fetch(S_tiles.index(0), states + lane * (V * K), K)
    async_copy.commit_group()
    _fetch(dS_tiles.index(0), dstates + lane * (V * K), K)
    async_copy.commit_group()
    place = q + first_token.to(gl.int64) * Q_STRIDE + key_head * Q_HEAD
    device.fetch_tokens(q_tiles.index(0), place, Q_STRIDE, rows)
    place = k + first_token.to(gl.int64) * K_STRIDE + key_head * K_HEAD
    device.fetch_tokens(k_tiles.index(0), place, K_STRIDE, rows)
    async_copy.commit_group()

    no_keys = gl.zeros([CHUNK, K], gl.float32, KEYS)
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, SQUARE)
    d_queries = no_keys
    d_keys = no_keys
    for index in range(count):
        # Zero, which the compiler does not know: descriptors of what lies at constant addresses would stay in
        # registers there are none for.
        zero = index >> 30
        qs = q_tiles.index(zero)
        ks = k_tiles.index(zero)
        Ys = Y_tiles.index(zero)
        vs = v_tiles.index(zero)
        Ss = S_tiles.index(zero)
        dSs = dS_tiles.index(zero)
        Ms = M_tiles.index(zero)
        Es = E_tiles.index(zero)
        stage = index % 2
        more = index + 1 < count
        last = index % GROUP == GROUP - 1
        item = program + index // GROUP * step
        next_item = program + (index + 1) // GROUP * step
        head = (item % KEY_HEADS * GROUP + index % GROUP).to(gl.int64)
        next_lane = (next_item * GROUP + (index + 1) % GROUP).to(gl.int64)
        next_head = (next_item % KEY_HEADS * GROUP + (index + 1) % GROUP).to(gl.int64)
        # Used well after it is loaded.
        next_slot = (gl.minimum(next_item, items - 1) // KEY_HEADS).to(gl.int64)
        next_first_token = gl.load(chunk_indices + next_slot * INDEX_WIDTH)
        next_rows = gl.load(chunk_indices + next_slot * INDEX_WIDTH + INDEX_COUNT)
        async_copy.wait_group(3)  # do, v', Y, v and the gates are there
        fence_async_shared()
        device.thread_barrier()
        do_new = device.start_product(dos.index(stage), news.index(stage), nothing)
        Y_new = device.start_product(Ys.permute((1, 0)), news.index(stage), nothing)
        strength = tile_gates.strengths.index(stage).load(gl.SliceLayout(1, VALUES))
        Y_rows = Ys.permute((1, 0)).load(VALUES).to(gl.float32)
        values = vs.load(VALUES).to(gl.float32)
        device.thread_barrier()
        vs.store((Y_rows * strength[:, None]).to(kind))
        of_values.store(_halves(Y_rows * values, V))
        if more:
            place = do + next_first_token.to(gl.int64) * DO_STRIDE + next_head * DO_HEAD
            device.fetch_tokens(dos.index(1 - stage), place, DO_STRIDE, next_rows)
            _fetch(news.index(1 - stage), new_values + next_lane * (V * CHUNK), CHUNK)
        async_copy.commit_group()
        async_copy.wait_group(3)  # S
        fence_async_shared()
        device.thread_barrier()
        do_new, Y_new = warpgroup_mma_wait(0, deps=[do_new, Y_new])

        do_S = device.start_product(dos.index(stage), Ss, no_keys)
        _store_tokens(dv + (first_token.to(gl.int64) * HEADS + head) * V, vs, rows, HEADS * V)
        i = (gl.arange(0, CHUNK, gl.SliceLayout(1, SQUARE)) + zero)[:, None]
        j = gl.arange(0, CHUNK, gl.SliceLayout(0, SQUARE))[None, :]
        G = sums.index(stage).load(gl.SliceLayout(1, SQUARE))
        G_column = sums.index(stage).load(gl.SliceLayout(0, SQUARE))
        beta = tile_gates.strengths.index(stage).load(gl.SliceLayout(1, SQUARE))
        decays = gl.exp(gl.where(i >= j, G[:, None] - G_column[None, :], float("-inf")))
        M = do_new * (decays * scale)
        N = gl.where(i > j, -Y_new * decays, 0.0)
        Ms.store(M.to(kind))
        Es.store((N * beta[:, None]).to(kind))
        from_start = tile_gates.starts.index(stage).load(gl.SliceLayout(1, KEYS))
        strength = tile_gates.strengths.index(stage).load(gl.SliceLayout(1, KEYS))
        do_S = warpgroup_mma_wait(0, deps=[do_S])

        Y_S = device.start_product(Ys.permute((1, 0)), Ss, no_keys)
        async_copy.wait_group(1)  # dS⁺, q and k
        fence_async_shared()
        device.thread_barrier()
        d_queries = gl.fma(do_S, gl.expand_dims(from_start * scale, 1), d_queries)
        of_queries.store(_halves(do_S * qs.load(KEYS).to(gl.float32), K))
        Y_S = warpgroup_mma_wait(0, deps=[Y_S])

        qk = device.start_product(qs, ks.permute((1, 0)), nothing)
        kk = device.start_product(ks, ks.permute((1, 0)), nothing)
        new_dS = device.start_product(news.index(stage).permute((1, 0)), dSs, no_keys)
        d_queries = warpgroup_mma(Ms, ks, d_queries, is_async=True)
        d_keys = gl.fma(Y_S, gl.expand_dims(-(strength * from_start), 1), d_keys)
        of_keys.store(_halves(Y_S * ks.load(KEYS).to(gl.float32), K))
        d_keys = warpgroup_mma(Ms.permute((1, 0)), qs, d_keys, is_async=True)
        d_keys = warpgroup_mma(Es, ks, d_keys, is_async=True)
        d_keys = warpgroup_mma(Es.permute((1, 0)), ks, d_keys, is_async=True)
        device.thread_barrier()
        if more:
            _fetch(Y_tiles.index(zero), Y + next_lane * (V * CHUNK), CHUNK)
            place = v + next_first_token.to(gl.int64) * V_STRIDE + next_head * V_HEAD
            device.fetch_tokens(v_tiles.index(zero), place, V_STRIDE, next_rows)
            device.fetch_gates(sums, 1 - stage, gates + next_lane * (GATE_ROWS * CHUNK), device.GATE_SUM)
            tile_gates.fetch(1 - stage, gates + next_lane * (GATE_ROWS * CHUNK))
        async_copy.commit_group()
        qk, kk = warpgroup_mma_wait(5, deps=[qk, kk])
        N = N * kk
        Z = N * beta[:, None] + gl.where(i > j, M * qk, 0.0)
        of_N.store(_halves(N, CHUNK))
        of_rows.store(_halves(Z, CHUNK))
        of_columns.store(gl.sum(gl.reshape(Z, [4, 16, CHUNK]), 1))
        products = gl.zeros([SLICE, K], gl.float32, KEY_ROWS)
        for part in gl.static_range(V // SLICE):
            S_part = Ss.slice(part * SLICE, SLICE).load(KEY_ROWS).to(gl.float32)
            products = gl.fma(S_part, dSs.slice(part * SLICE, SLICE).load(KEY_ROWS).to(gl.float32), products)
        of_states.store(gl.sum(products, 1))
        device.thread_barrier()
        if more:
            _fetch(S_tiles.index(zero), states + next_lane * (V * K), K)
        async_copy.commit_group()
        to_end = tile_gates.ends.index(stage).load(gl.SliceLayout(1, KEYS))
        new_dS = warpgroup_mma_wait(4, deps=[new_dS])
        of_ends.store(_halves(new_dS * ks.load(KEYS).to(gl.float32), K))
        d_queries, d_keys = warpgroup_mma_wait(0, deps=[d_queries, d_keys])
        device.thread_barrier()
        if more:
            _fetch(dS_tiles.index(zero), dstates + next_lane * (V * K), K)
        async_copy.commit_group()
        d_keys = gl.fma(new_dS, gl.expand_dims(to_end, 1), d_keys)

        e_G = tile_gates.starts.index(stage).load(BY_TOKEN)
        through_keys = gl.sum(of_keys.load(HALVES), 1) * e_G
        d_strengths = gl.sum(of_values.load(HALVES), 1) + gl.sum(of_N.load(HALVES), 1) - through_keys
        since = (
            gl.sum(of_queries.load(HALVES), 1) * (e_G * scale)
            - tile_gates.strengths.index(stage).load(BY_TOKEN) * through_keys
        )
        columns = gl.convert_layout(gl.sum(of_columns.load(BY_WARP), 0), BY_TOKEN)
        until = gl.sum(of_ends.load(HALVES), 1) * tile_gates.ends.index(stage).load(BY_TOKEN)
        until = gl.convert_layout(until + (columns - gl.sum(of_rows.load(HALVES), 1)), TOKENS)
        before = gl.associative_scan(until, 0, _add) - until
        d_gates = gl.associative_scan(gl.convert_layout(since, TOKENS), 0, _add, reverse=True) + before
        token = gl.arange(0, CHUNK, TOKENS)
        e_G = gl.convert_layout(e_G, TOKENS)
        decay = gl.sum(gl.where(token == CHUNK - 1, e_G, 0.0), 0)
        through_state = gl.sum(of_states.load(EVERYWHERE), 0) * decay
        gate_place = (first_token.to(gl.int64) * HEADS + head) + token.to(gl.int64) * HEADS
        gl.store(
            dbeta + gate_place, gl.convert_layout(d_strengths, TOKENS).to(dbeta.dtype.element_ty), mask=token < rows
        )
        is_reset = e_G.to(gl.int32, bitcast=True) == MINUS_ZERO
        d_gates = gl.where(is_reset, 0.0, d_gates + through_state)
        gl.store(dg + gate_place, d_gates.to(dg.dtype.element_ty), mask=token < rows)

        if last:
            key_head = (item % KEY_HEADS).to(gl.int64)
            first = first_token.to(gl.int64) * KEY_HEADS + key_head
            if NORMALIZED:
                d_queries = _unnormalized(d_queries, qs, q_factors + first, rows, KEY_HEADS, KEYS)
                d_keys = _unnormalized(d_keys, ks, k_factors + first, rows, KEY_HEADS, KEYS)
            device.thread_barrier()
            qs.store(d_queries.to(kind))
            ks.store(d_keys.to(kind))
            device.thread_barrier()
            _store_tokens(dq + first * K, qs, rows, KEY_HEADS * K)
            _store_tokens(dk + first * K, ks, rows, KEY_HEADS * K)
            device.thread_barrier()
            d_queries = no_keys
            d_keys = no_keys
            if more:
                key_head = (next_item % KEY_HEADS).to(gl.int64)
                place = q + next_first_token.to(gl.int64) * Q_STRIDE + key_head * Q_HEAD
                device.fetch_tokens(q_tiles.index(zero), place, Q_STRIDE, next_rows)
                place = k + next_first_token.to(gl.int64) * K_STRIDE + key_head * K_HEAD
                device.fetch_tokens(k_tiles.index(zero), place, K_STRIDE, next_rows)
        async_copy.commit_group()
        first_token = next_first_token
        rows = next_rows
    async_copy.wait_group(0)


def bind_gradients(setup: Setup, shape: Shape, normalize: bool) -> Callable[..., None]:
    """dq, dk, dv, dg and dβ, all of them: `launch(memory, q, k, v, do, scale, gradients)`.

    Of one sequence, a launch may be of a `Part`, and leave multiprocessors to `others`, programs that run beside it.
    """
    gradient_kernel = device.ByStrides(
        setup, shape, rule_gradients_hopper, "Q K V DO", gate=shape.gate, strength=shape.strength,
        KEY_HEADS=shape.key_heads, NORMALIZED=normalize, num_warps=8,
    )  # fmt: skip

    values, state = shape.V * packing.CHUNK, shape.V * shape.K
    sizes = {
        "gates": GATE_ROWS.value * packing.CHUNK,
        "new_values": values,
        "Y": values,
        "states": state,
        "dstates": state,
    }

    def launch(
        memory: Memory, q: TokenRows, k: TokenRows, v: TokenRows, do: TokenRows | None, scale: float,
        gradients: tuple[Tensor, ...], part: Part = WHOLE, others: int = 0,
    ) -> None:  # fmt: skip
        assert do is not None  # or the plan refused
        # Where a caller's begin at no multiple of 16 bytes, by way of others: narrower stores have no registers.
        dq, dk, dv = (out if is_aligned(out) else torch.empty_like(out) for out in gradients[:3])
        absent = memory["gates"]  # stands for a pointer that no variant reads
        end = min(part.first + part.chunks, shape.chunks)
        items = (end - part.first) * shape.key_heads
        # A part has the code of the whole, from other places on.
        first_lane = part.first * shape.heads
        regions = {name: memory.part(name, first_lane * size) for name, size in sizes.items()}
        gradient_kernel.of(q, k, v, do).launch(
            (min(items, setup.multiprocessors - others),), q=q.start, k=k.start, v=v.start, do=do.start,
            chunk_indices=memory.part("chunk_indices", part.first * INDEX_WIDTH.value), **regions,
            dq=dq, dk=dk, dv=dv, dg=gradients[3], dbeta=gradients[4], q_factors=memory.get("q_factors", absent),
            k_factors=memory.get("k_factors", absent), items=items, scale=scale,
        )  # fmt: skip
        for out, result in zip(gradients, (dq, dk, dv), strict=False):
            if result is not out:
                tokens = slice(part.first * packing.CHUNK, end * packing.CHUNK)
                out[:, tokens].copy_(result[:, tokens])

    return launch
