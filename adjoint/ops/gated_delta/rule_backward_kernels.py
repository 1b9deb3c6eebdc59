"""Triton kernels of the gated delta rule's adjoint; notation of `eager.py`, chunks of 64 tokens.

    walk_back        from a sequence's last chunk to its first, V columns of the state at a time:
                       dv' = scale·(q kᵀ ⊙ D)ᵀ do + (e^{Γ−G} ⊙ k) dS⁺,   Y = Tᵀ dv'
                       dS  = e^Γ dS⁺ + (scale·e^G ⊙ q)ᵀ do − kᵀ (β e^G ⊙ Y)
                     leaves Y and dS⁺ of every chunk, and the gradient of the initial state
    gradients        every chunk for itself, a key head with all value heads that read it: dq, dk, dv, and the parts
                     of dβ and dg
    gate_gradients   dβ and dg from their parts

The walk holds dSᵀ, a row for each column of V: what a product gives is then the left operand of the next one, as it
stands in registers. A tile's transposed copy is made by the way it is read, or is the right operand: never
`tl.dot(tl.trans(a), b)`, which Hopper compilers have got wrong in just this place.

What is rounded to the storage type (none of it for float32): dS⁺, dv' before the product with T, whose diagonal is 1
and keeps dv' in float32; the operands scale·e^G·do, β·e^G·Y and q kᵀ ⊙ D; M, E; the states, v', Y and dS⁺ in memory.
Sums are float32. One element has one writer, every sum an order that is fixed by K, V and the types.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget

CHUNK = 64

# ------------------------------------------------------------------------------------------ the walk back


@triton.jit
def gated_delta_walk_back(
    q, k, do, beta, G, T, dfinal, dinitial, places, firsts, Y, dstates, scale,
    HG: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, T_PARTS: tl.constexpr, SCORE_PARTS: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_DFINAL: tl.constexpr, HAS_DINITIAL: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one sequence and value head, for V_BLOCK columns of V; K_BLOCK holds all of K."""
    V_BLOCKS: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    column = (program % V_BLOCKS) * V_BLOCK + tl.arange(0, V_BLOCK)
    head = (program // V_BLOCKS) % H
    sequence = program // (V_BLOCKS * H)
    low = k.dtype.element_ty
    token = tl.arange(0, C)
    key = tl.arange(0, K_BLOCK)
    inside_k = key < K
    inside_v = column < V
    state_at = (sequence.to(tl.int64) * H + head) * (K * V) + key[None, :] * V + column[:, None]
    inside_state = inside_v[:, None] & inside_k[None, :]
    if HAS_DFINAL:
        dstate = tl.load(dfinal + state_at, inside_state, other=0).to(tl.float32)
    else:
        dstate = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    first = tl.load(firsts + sequence)
    last = tl.load(firsts + sequence + 1)
    count = last - first
    # What stands before the first chunk is read for nothing when a sequence has none: it is never used.
    start = tl.load(places + first.to(tl.int64) * 4, count > 0, other=0).to(tl.int64)
    rows = tl.load(places + (last.to(tl.int64) - 1) * 4 + 1, count > 0, other=0)
    causal = token[:, None] >= token[None, :]
    # Gates of the chunk that comes next, read while the one before is worked on: 64 numbers, far apart for beta.
    gates_at = ((last - 1).to(tl.int64) * H + head) * C
    here = start + (count - 1).to(tl.int64) * C
    sums = tl.load(G + gates_at + token, count > 0, other=0)
    total = tl.load(G + gates_at + C - 1, count > 0, other=0)
    strength = tl.load(beta + (here + token) * H + head, token < rows, other=0)
    for step in range(count):
        chunk = last - 1 - step
        at = start + (count - 1 - step).to(tl.int64) * C
        matrix_at = chunk.to(tl.int64) * H + head
        present = token < rows
        key_at = ((at + token) * HG + head // (H // HG)) * K
        tile_mask = present[:, None] & inside_k[None, :]
        k_tile = tl.load(k + key_at[:, None] + key[None, :], tile_mask, other=0)
        cell = token[:, None] * C + token[None, :]
        T_tile = tl.load(T + matrix_at * (T_PARTS * C * C) + cell)
        G_own = sums
        G_end = total
        strength_own = strength.to(tl.float32)
        more = step + 1 < count
        before = at - C
        sums = tl.load(G + (matrix_at - H) * C + token, more, other=0)
        total = tl.load(G + (matrix_at - H) * C + C - 1, more, other=0)
        strength = tl.load(beta + (before + token) * H + head, more & (token < C), other=0)
        rows = C

        narrow = dstate.to(low)
        tl.store(dstates + matrix_at * (V * K) + column[:, None] * K + key[None, :], narrow, inside_state)
        dnew = tl.dot(narrow, tl.trans(k_tile), input_precision=PRECISION) * tl.exp(G_end - G_own)[None, :]
        if HAS_DO:
            q_tile = tl.load(q + key_at[:, None] + key[None, :], tile_mask, other=0)
            do_at = ((at + token) * H + head) * V
            do_mask = inside_v[:, None] & present[None, :]
            do_tile = tl.load(do + do_at[None, :] + column[:, None], do_mask, other=0)
            decay = tl.exp(tl.where(causal, G_own[:, None] - G_own[None, :], float("-inf")))
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (decay * scale)
            high = scores.to(low)
            dnew += tl.dot(do_tile, high, input_precision=PRECISION)
            if SCORE_PARTS == 2:
                dnew += tl.dot(do_tile, (scores - high.to(tl.float32)).to(low), input_precision=PRECISION)
        # T has ones on its diagonal: what rounding took from dv' goes in beside the product.
        rounded = dnew.to(low)
        Y_tile = tl.dot(rounded, T_tile, dnew - rounded.to(tl.float32), input_precision=PRECISION)
        if T_PARTS == 2:
            T_rest = tl.load(T + matrix_at * (T_PARTS * C * C) + C * C + cell)
            Y_tile += tl.dot(rounded, T_rest, input_precision=PRECISION)
        Y_at = (matrix_at * C + token) * V
        tl.store(Y + Y_at[None, :] + column[:, None], Y_tile.to(low), inside_v[:, None])
        grown = tl.exp(G_own)
        dstate = dstate * tl.exp(G_end)
        if HAS_DO:
            scaled = (do_tile.to(tl.float32) * (grown * scale)[None, :]).to(low)
            dstate += tl.dot(scaled, q_tile, input_precision=PRECISION)
        dstate = tl.dot(
            (Y_tile * -(strength_own * grown)[None, :]).to(low), k_tile, dstate, input_precision=PRECISION
        )
    if HAS_DINITIAL:
        tl.store(dinitial + state_at, dstate, inside_state)


# ------------------------------------------------------------------------------------------- the gradients


@triton.jit
def gated_delta_gradients(
    q, k, v, do, beta, G, states, dstates, new, Y, places, dq, dk, dv, parts, kept, scale,
    HG: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, HAS_DO: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, NEED_GATES: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Everything of one chunk and key head for K_BLOCK columns of K.

    `parts` [chunks, H, K blocks, 5, C]: Σ over the block's columns of q·(scale e^G do Sᵀ), of k·(e^G Y Sᵀ) and of
    k·(e^{Γ−G} v' dS⁺ᵀ), and from the first block the sums through D and what dβ has besides; `kept` e^Γ⟨S, dS⁺⟩.
    """
    K_BLOCKS: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    GROUP: tl.constexpr = H // HG
    program = tl.program_id(0)
    k_block = program % K_BLOCKS
    key_head = (program // K_BLOCKS) % HG
    chunk = program // (K_BLOCKS * HG)
    rows = tl.load(places + chunk.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + chunk.to(tl.int64) * 4).to(tl.int64)
    low = k.dtype.element_ty
    token = tl.arange(0, C)
    present = token < rows
    key = k_block * K_BLOCK + tl.arange(0, K_BLOCK)
    inside_k = key < K
    key_at = ((at + token) * HG + key_head) * K
    tile_mask = present[:, None] & inside_k[None, :]
    k_tile = tl.load(k + key_at[:, None] + key[None, :], tile_mask, other=0)
    q_tile = tl.load(q + key_at[:, None] + key[None, :], tile_mask, other=0)
    qk = tl.zeros([C, C], tl.float32)
    kk = tl.zeros([C, C], tl.float32)
    if NEED_GATES:
        if K_BLOCKS == 1:
            kk = tl.dot(k_tile, tl.trans(k_tile), input_precision=PRECISION)
            if HAS_DO:
                qk = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        else:
            if k_block == 0:
                for begin in range(0, K, K_BLOCK):
                    other = begin + tl.arange(0, K_BLOCK)
                    other_mask = present[:, None] & (other < K)[None, :]
                    k_other = tl.load(k + key_at[:, None] + other[None, :], other_mask, other=0)
                    kk = tl.dot(k_other, tl.trans(k_other), kk, input_precision=PRECISION)
                    if HAS_DO:
                        q_other = tl.load(q + key_at[:, None] + other[None, :], other_mask, other=0)
                        qk = tl.dot(q_other, tl.trans(k_other), qk, input_precision=PRECISION)
    row = token[:, None]
    other_row = token[None, :]
    dq_sum = tl.zeros([C, K_BLOCK], tl.float32)
    dk_sum = tl.zeros([C, K_BLOCK], tl.float32)
    for member in range(GROUP):
        head = key_head * GROUP + member
        matrix_at = chunk.to(tl.int64) * H + head
        sums = tl.load(G + matrix_at * C + token)
        end = tl.load(G + matrix_at * C + C - 1)
        strength = tl.load(beta + (at + token) * H + head, present, other=0).to(tl.float32)
        grown = tl.exp(sums)
        to_end = tl.exp(end - sums)
        value_at = ((at + token) * H + head) * V
        own_at = (matrix_at * C + token) * V

        do_new = tl.zeros([C, C], tl.float32)
        new_do = tl.zeros([C, C], tl.float32)
        Y_new = tl.zeros([C, C], tl.float32)
        new_Y = tl.zeros([C, C], tl.float32)
        do_S = tl.zeros([C, K_BLOCK], tl.float32)
        Y_S = tl.zeros([C, K_BLOCK], tl.float32)
        new_dS = tl.zeros([C, K_BLOCK], tl.float32)
        Y_v = tl.zeros([C], tl.float32)
        S_dS = tl.zeros([K_BLOCK], tl.float32)
        for begin in tl.static_range(0, V, V_BLOCK):
            column = begin + tl.arange(0, V_BLOCK)
            inside_v = column < V
            mask = present[:, None] & inside_v[None, :]
            Y_tile = tl.load(Y + own_at[:, None] + column[None, :], inside_v[None, :], other=0)
            new_tile = tl.load(
                new + matrix_at * (V * C) + column[None, :] * C + token[:, None], inside_v[None, :], other=0
            )
            state_at = matrix_at * (V * K) + column[:, None] * K + key[None, :]
            state_mask = inside_v[:, None] & inside_k[None, :]
            S_tile = tl.load(states + state_at, state_mask, other=0)
            dS_tile = tl.load(dstates + state_at, state_mask, other=0)
            if HAS_DO:
                do_tile = tl.load(do + value_at[:, None] + column[None, :], mask, other=0)
                do_new += tl.dot(do_tile, tl.trans(new_tile), input_precision=PRECISION)
                if NEED_K:
                    new_do += tl.dot(new_tile, tl.trans(do_tile), input_precision=PRECISION)
                do_S += tl.dot(do_tile, S_tile, input_precision=PRECISION)
            Y_new += tl.dot(Y_tile, tl.trans(new_tile), input_precision=PRECISION)
            if NEED_K:
                new_Y += tl.dot(new_tile, tl.trans(Y_tile), input_precision=PRECISION)
            Y_S += tl.dot(Y_tile, S_tile, input_precision=PRECISION)
            new_dS += tl.dot(new_tile, dS_tile, input_precision=PRECISION)
            if NEED_GATES:
                S_dS += tl.sum(S_tile.to(tl.float32) * dS_tile.to(tl.float32), 0)
            if NEED_V or NEED_GATES:
                if k_block == 0:
                    wide = Y_tile.to(tl.float32)
                    if NEED_V:
                        tl.store(dv + value_at[:, None] + column[None, :], (wide * strength[:, None]).to(low), mask)
                    if NEED_GATES:
                        v_tile = tl.load(v + value_at[:, None] + column[None, :], mask, other=0)
                        Y_v += tl.sum(wide * v_tile.to(tl.float32), 1)

        decay = tl.exp(tl.where(row >= other_row, sums[:, None] - sums[None, :], float("-inf")))
        N = tl.where(row > other_row, -Y_new * decay, 0.0)
        E = N * strength[:, None]
        M = do_new * (decay * scale)
        do_S *= (grown * scale)[:, None]
        Y_S *= grown[:, None]
        new_dS *= to_end[:, None]
        if NEED_Q and HAS_DO:
            dq_sum += do_S
            dq_sum = tl.dot(M.to(low), k_tile, dq_sum, input_precision=PRECISION)
        if NEED_K:
            later = tl.exp(tl.where(row <= other_row, sums[None, :] - sums[:, None], float("-inf")))
            E_after = tl.where(row < other_row, -new_Y * later * strength[None, :], 0.0)
            dk_sum += new_dS - Y_S * strength[:, None]
            dk_sum = tl.dot((E + E_after).to(low), k_tile, dk_sum, input_precision=PRECISION)
            if HAS_DO:
                dk_sum += tl.dot((new_do * (later * scale)).to(low), q_tile, input_precision=PRECISION)
        if NEED_GATES:
            parts_at = parts + (matrix_at * K_BLOCKS + k_block) * (5 * C) + token
            wide_k = k_tile.to(tl.float32)
            tl.store(parts_at + C, tl.sum(wide_k * Y_S, 1))
            tl.store(parts_at + 2 * C, tl.sum(wide_k * new_dS, 1))
            if HAS_DO:
                tl.store(parts_at, tl.sum(q_tile.to(tl.float32) * do_S, 1))
            else:
                tl.store(parts_at, tl.zeros([C], tl.float32))
            tl.store(kept + matrix_at * K_BLOCKS + k_block, tl.sum(S_dS, 0) * tl.exp(end))
            if k_block == 0:
                tl.store(parts_at + 4 * C, Y_v + tl.sum(N * kk, 1))
                through = E * kk
                if HAS_DO:
                    through += tl.where(row > other_row, M * qk, 0.0)
                tl.store(parts_at + 3 * C, passing(through, low, PRECISION, C))
    if NEED_Q:
        tl.store(dq + key_at[:, None] + key[None, :], dq_sum.to(low), tile_mask)
    if NEED_K:
        tl.store(dk + key_at[:, None] + key[None, :], dk_sum.to(low), tile_mask)


@triton.jit
def passing(through, low: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr):
    """R_t = Σ of Z_ij over i ≥ t > j: first down the columns, as a product with ones, exact for two parts of Z."""
    row = tl.arange(0, C)[:, None]
    other_row = tl.arange(0, C)[None, :]
    ones = tl.where(row <= other_row, 1.0, 0.0).to(low)
    high = through.to(low)
    below = tl.dot(ones, high, input_precision=PRECISION)
    if low != tl.float32:
        below += tl.dot(ones, (through - high.to(tl.float32)).to(low), input_precision=PRECISION)
    return tl.sum(tl.where(row > other_row, below, 0.0), 1)


@triton.jit
def gated_delta_gate_gradients(
    beta, places, parts, kept, dg, dbeta,
    H: tl.constexpr, K_BLOCKS: tl.constexpr, NEED_G: tl.constexpr, NEED_BETA: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dg and dβ of one chunk and head."""
    program = tl.program_id(0)
    chunk = program // H
    head = program % H
    rows = tl.load(places + chunk.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + chunk.to(tl.int64) * 4).to(tl.int64)
    token = tl.arange(0, C)
    present = token < rows
    gate_at = (at + token) * H + head
    first = parts + program.to(tl.int64) * (K_BLOCKS * 5 * C) + token
    before = token > 0
    since_q = tl.zeros([C], tl.float32)
    of_key = tl.zeros([C], tl.float32)
    until = tl.zeros([C], tl.float32)
    whole = 0.0
    for block in tl.static_range(K_BLOCKS):
        of_block = first + block * (5 * C)
        since_q += tl.load(of_block)
        of_key += tl.load(of_block + C)
        until += tl.load(of_block + (2 * C - 1), before, other=0)  # of the token before
        whole += tl.load(kept + program.to(tl.int64) * K_BLOCKS + block)
    if NEED_BETA:
        tl.store(dbeta + gate_at, (tl.load(first + 4 * C) - of_key).to(dbeta.dtype.element_ty), present)
    if NEED_G:
        strength = tl.load(beta + gate_at, present, other=0).to(tl.float32)
        since = tl.cumsum(since_q - strength * of_key, reverse=True)
        found = tl.load(first + 3 * C) + since + tl.cumsum(until) + whole
        tl.store(dg + gate_at, found.to(dg.dtype.element_ty), present)


for _function, _budget in (
    (gated_delta_walk_back, Budget(registers=255, shared_bytes=227 * 1024)),
    (gated_delta_gradients, Budget(registers=255, shared_bytes=227 * 1024)),
    (gated_delta_gate_gradients, Budget(registers=64, shared_bytes=4096)),
):
    kernels.register(_function, budget=_budget)
