"""Triton kernels of the gated delta rule's adjoint after its walks: dq, dk and dv, and what dβ and dg are made of.

Notation, layouts and roundings of `rule_backward_kernels.py`.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.ops.gated_delta.rule.triton.backward_kernels import decays, products, token_tile


@triton.jit
def _tile(x, first, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
          COLUMN_BLOCK: tl.constexpr):  # fmt: skip
    """A block of a matrix [ROWS, COLUMNS]."""
    row = first + tl.arange(0, ROW_BLOCK)[:, None]
    column = first_column + tl.arange(0, COLUMN_BLOCK)[None, :]
    if ROWS % ROW_BLOCK == 0 and COLUMNS % COLUMN_BLOCK == 0:
        return tl.load(x + (row * COLUMNS + column))
    else:
        return tl.load(x + (row * COLUMNS + column), (row < ROWS) & (column < COLUMNS), other=0)


@triton.jit
def _turned_tile(x, first, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """The transpose of some rows of a matrix [ROWS, 64]."""
    row = first + tl.arange(0, ROW_BLOCK)[None, :]
    column = tl.arange(0, 64)[:, None]
    if ROWS % ROW_BLOCK == 0:
        return tl.load(x + (row * 64 + column))
    else:
        return tl.load(x + (row * 64 + column), row < ROWS, other=0)


@triton.jit
def _passing(through, kind: tl.constexpr, PRECISION: tl.constexpr):
    """R_t = Σ of Z_ij over i ≥ t > j: first along the rows, in 16-bit types as a product with ones, exact for two parts
    of Z."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    if kind == tl.float32:
        before = tl.cumsum(through, 1) - through
    else:
        ones = tl.where(i < j, 1.0, 0.0).to(kind)
        high = through.to(kind)
        before = tl.dot(high, ones, input_precision=PRECISION)
        before += tl.dot((through - high.to(tl.float32)).to(kind), ones, input_precision=PRECISION)
    return tl.sum(tl.where(i >= j, before, 0.0), 0)


@triton.jit
def rule_matrices(
    q, k, v, do, gates, places, new, Y, M, M_turned, E, dv, passing, besides, key_heads, columns, scale,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    do_token_stride, do_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, NEED_QK: tl.constexpr, NEED_V: tl.constexpr,
    NEED_GATES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's matrices of one value head, for dq and dk: M = scale·(do v'ᵀ) ⊙ D, Mᵀ, and E + Eᵀ with
    E = β ⊙ N, N = −(Y v'ᵀ) ⊙ D°; each, and each transpose, by a product of its own. And dv = β ⊙ Y.

    For dg what M and E send through D, in `passing` [chunks, H, 64]; for dβ the rows of Y ⊙ v and N ⊙ k kᵀ, summed, in
    `besides` [chunks, H, 64]. `columns` is V as a number the compiler does not know: loops it unrolls have no registers
    left.
    """
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    heads = key_heads * GROUP
    slot = program // heads
    head = program % heads
    rows = tl.load(places + slot.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + slot.to(tl.int64) * 4)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    i = token[:, None]
    j = token[None, :]
    gates += program.to(tl.int64) * (5 * CHUNK)
    new += program.to(tl.int64) * (V * CHUNK)
    Y += program.to(tl.int64) * (V * CHUNK)
    v += at.to(tl.int64) * v_token_stride + head.to(tl.int64) * v_head_stride
    do += at.to(tl.int64) * do_token_stride + head.to(tl.int64) * do_head_stride
    do_new = tl.zeros([CHUNK, CHUNK], tl.float32)
    new_do = tl.zeros([CHUNK, CHUNK], tl.float32)
    Y_new = tl.zeros([CHUNK, CHUNK], tl.float32)
    new_Y = tl.zeros([CHUNK, CHUNK], tl.float32)
    Y_v = tl.zeros([CHUNK], tl.float32)
    for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
        Y_tile = _turned_tile(Y, begin, V, V_BLOCK)
        if NEED_QK or NEED_GATES:
            new_tile = _turned_tile(new, begin, V, V_BLOCK)
            Y_new = tl.dot(Y_tile, tl.trans(new_tile), Y_new, input_precision=PRECISION)
            if NEED_QK:
                new_Y = tl.dot(new_tile, tl.trans(Y_tile), new_Y, input_precision=PRECISION)
            if UPSTREAM:
                do_tile = token_tile(do, begin, rows, do_token_stride, V, V_BLOCK)
                do_new = tl.dot(do_tile, tl.trans(new_tile), do_new, input_precision=PRECISION)
                if NEED_QK:
                    new_do = tl.dot(new_tile, tl.trans(do_tile), new_do, input_precision=PRECISION)
        wide = Y_tile.to(tl.float32)
        if NEED_V:
            strength = tl.load(gates + 2 * CHUNK + token)
            column = begin + tl.arange(0, V_BLOCK)[None, :]
            place = dv + (at.to(tl.int64) * heads + head) * V_SIZE + (i * (heads * V_SIZE) + column)
            tl.store(place, (wide * strength[:, None]).to(kind), (i < rows) & (column < V_SIZE))
        if NEED_GATES:
            v_tile = token_tile(v, begin, rows, v_token_stride, V, V_BLOCK)
            Y_v += tl.sum(wide * v_tile.to(tl.float32), 1)
    if NEED_QK or NEED_GATES:
        beta = tl.load(gates + 2 * CHUNK + token)
        G = tl.load(gates + token)
        low = G
        if WIDE:
            low = tl.load(gates + CHUNK + token)
        if NEED_QK:
            if UPSTREAM:
                tl.store(
                    M_turned + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j),
                    (new_do * (decays(G, low, False, True, WIDE) * scale)).to(kind),
                )
            new_Y *= decays(G, low, True, True, WIDE) * beta[None, :]
        if UPSTREAM:
            do_new *= decays(G, low, False, False, WIDE) * scale
            if NEED_QK:
                tl.store(M + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j), do_new.to(kind))
        Y_new *= -decays(G, low, True, False, WIDE)
        if NEED_QK:
            tl.store(
                E + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j), (Y_new * beta[:, None] - new_Y).to(kind)
            )
        if NEED_GATES:
            k += at.to(tl.int64) * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
            q += at.to(tl.int64) * q_token_stride + (head // GROUP).to(tl.int64) * q_head_stride
            Y_new *= products(k, k, rows, k_token_stride, k_token_stride, K, K_BLOCK, PRECISION)
            tl.store(besides + program.to(tl.int64) * CHUNK + token, Y_v + tl.sum(Y_new, 1))
            Y_new *= beta[:, None]
            if UPSTREAM:
                do_new *= products(q, k, rows, q_token_stride, k_token_stride, K, K_BLOCK, PRECISION)
                Y_new += tl.where(i > j, do_new, 0.0)
            tl.store(passing + program.to(tl.int64) * CHUNK + token, _passing(Y_new, kind, PRECISION))


@triton.jit
def _unnormalized(y, gradient, factor, first_key, rows, token_stride, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """The gradient of x for one of y = factor·x: factor·(dy − y (y·dy))."""
    wide = token_tile(y, first_key, rows, token_stride, K, K_BLOCK).to(tl.float32)
    along = tl.sum(wide * gradient, 1)
    return (gradient - wide * along[:, None]) * factor[:, None]


@triton.jit
def _along(x, y, kind: tl.constexpr, PRECISION: tl.constexpr):
    """The rows of float32 x, rounded, times the rows of y, one each: the diagonal of x yᵀ.

    A product, though most of it is thrown away: y is in shared memory for others, and in registers there is no room.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    found = tl.dot(x.to(kind), tl.trans(y), input_precision=PRECISION)
    return tl.sum(tl.where(i == j, found, 0.0), 1)


@triton.jit
def _store_gradient(
    out, gradient, x, factors, at, rows, key_head, key_heads, first_key, token_stride, head_stride,
    NORMALIZED: tl.constexpr, K: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds and stores the gradient of a chunk's q or k, taken back through their normalisation where there is one."""
    # 0, and no constant: what has it is found here, not kept in registers since the caller had the same places.
    nothing = tl.minimum(rows, 0)
    token = tl.arange(0, 64) + nothing
    if NORMALIZED == 1:
        place = factors + at.to(tl.int64) * key_heads + key_head + token * key_heads
        x += at.to(tl.int64) * token_stride + key_head.to(tl.int64) * head_stride
        factor = tl.load(place, token < rows, other=0)
        gradient = _unnormalized(x, gradient, factor, first_key + nothing, rows, token_stride, K, K_BLOCK)
    key = first_key + tl.arange(0, K_BLOCK)[None, :]
    place = out + (at.to(tl.int64) * key_heads + key_head) * K_SIZE + (token[:, None] * (key_heads * K_SIZE) + key)
    tl.store(place, gradient.to(out.dtype.element_ty), (token[:, None] < rows) & (key < K_SIZE))


@triton.jit
def rule_gradients(
    q, k, do, gates, places, states, dstates, new, Y, M, M_turned, E, dq, dk, parts, kept, q_factors, k_factors,
    key_heads, columns, scale, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    do_token_stride, do_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, NEED_Q: tl.constexpr, NEED_K: tl.constexpr,
    NEED_GATES: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and key head, K_BLOCK columns of K: dq by one program, dk by the next.

        dq = Σ over value heads of scale·e^G ⊙ (do Sᵀ) + M k
        dk = Σ over value heads of Mᵀ q + (E + Eᵀ) k − β e^G ⊙ (Y Sᵀ) + e^{Γ−G} ⊙ (v' dS⁺ᵀ)

    Each leaves what dg and dβ need of it, sums over the block's columns, in `parts` [chunks, H, K blocks, 3, 64]: of
    q·(scale e^G do Sᵀ), of k·(e^G Y Sᵀ), of k·(e^{Γ−G} v' dS⁺ᵀ); and ⟨S, dS⁺⟩ in `kept` [chunks, H, K blocks].

    NORMALIZED is 1 where q and k are normalised copies and the block is all of K: gradients pass through the norms.
    """
    CHUNK: tl.constexpr = 64
    K_BLOCKS: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    program = tl.program_id(0)
    k_block = (program // 2) % K_BLOCKS
    key_head = (program // (2 * K_BLOCKS)) % key_heads
    slot = program // (2 * K_BLOCKS * key_heads)
    rows = tl.load(places + slot.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + slot.to(tl.int64) * 4)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    first_key = k_block * K_BLOCK
    lane = (slot * key_heads + key_head) * GROUP
    keys = token_tile(
        k + at.to(tl.int64) * k_token_stride + key_head.to(tl.int64) * k_head_stride,
        first_key,
        rows,
        k_token_stride,
        K,
        K_BLOCK,
    )
    queries = token_tile(
        q + at.to(tl.int64) * q_token_stride + key_head.to(tl.int64) * q_head_stride,
        first_key,
        rows,
        q_token_stride,
        K,
        K_BLOCK,
    )
    gradient = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    if program % 2 == 0:
        if UPSTREAM and (NEED_Q or NEED_GATES):
            do += at.to(tl.int64) * do_token_stride + (key_head * GROUP).to(tl.int64) * do_head_stride
            for member in tl.range(0, GROUP, disable_licm=True):
                own = (lane + member).to(
                    tl.int64
                )  # places are found from it, each where it is used: registers are scarce
                do_S = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    do_tile = token_tile(do + member * do_head_stride, begin, rows, do_token_stride, V, V_BLOCK)
                    S_tile = _tile(states + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    do_S = tl.dot(do_tile, S_tile, do_S, input_precision=PRECISION)
                do_S *= (tl.load(gates + own * (5 * CHUNK) + 3 * CHUNK + token) * scale)[:, None]
                gradient += do_S
                if NEED_GATES:
                    of_queries = _along(do_S, queries, kind, PRECISION)
                    tl.store(parts + (own * K_BLOCKS + k_block) * (3 * CHUNK) + token, of_queries)
                if NEED_Q:
                    gradient += tl.dot(
                        tl.load(M + own * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :])),
                        keys,
                        input_precision=PRECISION,
                    )
        if NEED_Q:
            _store_gradient(
                dq, gradient, q, q_factors, at, rows, key_head, key_heads, first_key, q_token_stride, q_head_stride,
                NORMALIZED, K, K_SIZE, K_BLOCK,
            )  # fmt: skip
    else:
        if NEED_K or NEED_GATES:
            for member in tl.range(0, GROUP, disable_licm=True):
                own = (lane + member).to(tl.int64)
                Y_S = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    Y_tile = _turned_tile(Y + own * (V * CHUNK), begin, V, V_BLOCK)
                    S_tile = _tile(states + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    Y_S = tl.dot(Y_tile, S_tile, Y_S, input_precision=PRECISION)
                Y_S *= tl.load(gates + own * (5 * CHUNK) + 3 * CHUNK + token)[:, None]
                gradient -= Y_S * tl.load(gates + own * (5 * CHUNK) + 2 * CHUNK + token)[:, None]
                if NEED_GATES:
                    of_keys = _along(Y_S, keys, kind, PRECISION)
                    tl.store(parts + (own * K_BLOCKS + k_block) * (3 * CHUNK) + CHUNK + token, of_keys)
                new_dS = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                S_dS = tl.zeros([V_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    new_tile = _turned_tile(new + own * (V * CHUNK), begin, V, V_BLOCK)
                    dS_tile = _tile(dstates + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    new_dS = tl.dot(new_tile, dS_tile, new_dS, input_precision=PRECISION)
                    if NEED_GATES:
                        S_tile = _tile(states + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                        S_dS += tl.sum(S_tile.to(tl.float32) * dS_tile.to(tl.float32), 1)
                new_dS *= tl.load(gates + own * (5 * CHUNK) + 4 * CHUNK + token)[:, None]
                gradient += new_dS
                if NEED_GATES:
                    of_keys = _along(new_dS, keys, kind, PRECISION)
                    tl.store(parts + (own * K_BLOCKS + k_block) * (3 * CHUNK) + 2 * CHUNK + token, of_keys)
                    tl.store(kept + own * K_BLOCKS + k_block, tl.sum(S_dS, 0))
                if NEED_K:
                    gradient += tl.dot(
                        tl.load(E + own * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :])),
                        keys,
                        input_precision=PRECISION,
                    )
                    if UPSTREAM:
                        gradient += tl.dot(
                            tl.load(M_turned + own * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :])),
                            queries,
                            input_precision=PRECISION,
                        )
        if NEED_K:
            _store_gradient(
                dk, gradient, k, k_factors, at, rows, key_head, key_heads, first_key, k_token_stride, k_head_stride,
                NORMALIZED, K, K_SIZE, K_BLOCK,
            )  # fmt: skip


KERNELS = tuple(
    kernels.register(
        kernel,
        budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=spilled),
        targets=kernels.NVIDIA,
    )
    for kernel, spilled in {rule_matrices: 384, rule_gradients: 128}.items()
)
