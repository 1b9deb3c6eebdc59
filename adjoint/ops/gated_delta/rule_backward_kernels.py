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
    state_at = (sequence.to(tl.int64) * H + head) * (K * V)
    state_cell = key[None, :] * V + column[:, None]
    inside_state = inside_v[:, None] & inside_k[None, :]
    if HAS_DFINAL:
        dstate = tl.load(dfinal + state_at + state_cell, inside_state, other=0).to(tl.float32)
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
    strength = tl.load(beta + here * H + head + token * H, token < rows, other=0)
    key_cell = token[:, None] * (HG * K) + key[None, :]
    cell = token[:, None] * C + token[None, :]
    for step in range(count):
        chunk = last - 1 - step
        at = start + (count - 1 - step).to(tl.int64) * C
        matrix_at = chunk.to(tl.int64) * H + head
        present = token < rows
        key_at = (at * HG + head // (H // HG)) * K
        tile_mask = present[:, None] & inside_k[None, :]
        k_tile = tl.load(k + key_at + key_cell, tile_mask, other=0)
        T_tile = tl.load(T + matrix_at * (T_PARTS * C * C) + cell)
        G_own = sums
        G_end = total
        strength_own = strength.to(tl.float32)
        more = step + 1 < count
        sums = tl.load(G + (matrix_at - H) * C + token, more, other=0)
        total = tl.load(G + (matrix_at - H) * C + C - 1, more, other=0)
        strength = tl.load(beta + (at - C) * H + head + token * H, more & (token < C), other=0)
        rows = C

        narrow = dstate.to(low)
        tl.store(dstates + matrix_at * (V * K) + (column[:, None] * K + key[None, :]), narrow, inside_state)
        dnew = tl.dot(narrow, tl.trans(k_tile), input_precision=PRECISION) * tl.exp(G_end - G_own)[None, :]
        if HAS_DO:
            q_tile = tl.load(q + key_at + key_cell, tile_mask, other=0)
            do_cell = token[None, :] * (H * V) + column[:, None]
            do_mask = inside_v[:, None] & present[None, :]
            do_tile = tl.load(do + (at * H + head) * V + do_cell, do_mask, other=0)
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
        tl.store(Y + matrix_at * (C * V) + (token[None, :] * V + column[:, None]), Y_tile.to(low), inside_v[:, None])
        grown = tl.exp(G_own)
        dstate = dstate * tl.exp(G_end)
        if HAS_DO:
            scaled = (do_tile.to(tl.float32) * (grown * scale)[None, :]).to(low)
            dstate += tl.dot(scaled, q_tile, input_precision=PRECISION)
        dstate = tl.dot(
            (Y_tile * -(strength_own * grown)[None, :]).to(low), k_tile, dstate, input_precision=PRECISION
        )
    if HAS_DINITIAL:
        tl.store(dinitial + state_at + state_cell, dstate, inside_state)


# ------------------------------------------------------------------------------------------- the gradients


@triton.jit
def value_tile(rows_at, begin, rows, STRIDE: tl.constexpr, V: tl.constexpr, V_BLOCK: tl.constexpr, C: tl.constexpr):
    """A row of V_BLOCK columns for each token, of which `rows` are there."""
    token = tl.arange(0, C)[:, None]
    column = begin + tl.arange(0, V_BLOCK)[None, :]
    # Where every column is there no mask is kept for them: here and below registers are what is scarce.
    if V % V_BLOCK == 0:
        return tl.load(rows_at + (token * STRIDE + column), token < rows, other=0)
    else:
        return tl.load(rows_at + (token * STRIDE + column), (token < rows) & (column < V), other=0)


@triton.jit
def own_tile(rows_at, begin, V: tl.constexpr, V_BLOCK: tl.constexpr, C: tl.constexpr):
    """The same from a matrix [C, V]."""
    token = tl.arange(0, C)[:, None]
    column = begin + tl.arange(0, V_BLOCK)[None, :]
    if V % V_BLOCK == 0:
        return tl.load(rows_at + (token * V + column))
    else:
        return tl.load(rows_at + (token * V + column), column < V, other=0)


@triton.jit
def turned_tile(columns_at, begin, V: tl.constexpr, V_BLOCK: tl.constexpr, C: tl.constexpr):
    """The same from a matrix [V, C]."""
    token = tl.arange(0, C)[:, None]
    column = begin + tl.arange(0, V_BLOCK)[None, :]
    if V % V_BLOCK == 0:
        return tl.load(columns_at + (column * C + token))
    else:
        return tl.load(columns_at + (column * C + token), column < V, other=0)


@triton.jit
def state_tile(
    state_at, begin, first_key, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr
):
    """V_BLOCK rows and K_BLOCK columns of a matrix [V, K]."""
    column = begin + tl.arange(0, V_BLOCK)[:, None]
    key = first_key + tl.arange(0, K_BLOCK)[None, :]
    if K % K_BLOCK == 0 and V % V_BLOCK == 0:
        return tl.load(state_at + (column * K + key))
    else:
        return tl.load(state_at + (column * K + key), (column < V) & (key < K), other=0)


@triton.jit
def products(
    left_at, right_at, rows, STRIDE: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Every row of one tensor of keys or queries times every row of another."""
    found = tl.zeros([C, C], tl.float32)
    for begin in tl.static_range(0, K, K_BLOCK):
        left = value_tile(left_at, begin, rows, STRIDE, K, K_BLOCK, C)
        right = value_tile(right_at, begin, rows, STRIDE, K, K_BLOCK, C)
        found = tl.dot(left, tl.trans(right), found, input_precision=PRECISION)
    return found


@triton.jit
def gated_delta_gradients(
    q, k, v, do, beta, G, states, dstates, new, Y, places, dq, dk, dv, parts, kept, scale, columns,
    HG: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, STAGES: tl.constexpr, HAS_DO: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, NEED_GATES: tl.constexpr,
    PRECISION: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """One chunk and key head, K_BLOCK columns of K: dq, by one program, or dk, by the next, which also has dv.

    Each leaves what dg and dβ need of it in `parts` [chunks, H, K blocks, 6, C], sums over the block's columns: of
    q·(scale e^G do Sᵀ), of k·(e^G Y Sᵀ), of k·(e^{Γ−G} v' dS⁺ᵀ); then, from the first block, what M and E send through
    D (`passing`), and what dβ has besides; and e^Γ⟨S, dS⁺⟩ in `kept` [chunks, H, K blocks].
    """
    K_BLOCKS: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    GROUP: tl.constexpr = H // HG
    program = tl.program_id(0)
    of_queries = program % 2 == 0
    k_block = (program // 2) % K_BLOCKS
    key_head = (program // (2 * K_BLOCKS)) % HG
    chunk = program // (2 * K_BLOCKS * HG)
    rows = tl.load(places + chunk.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + chunk.to(tl.int64) * 4).to(tl.int64)
    low = k.dtype.element_ty
    token = tl.arange(0, C)
    row = token[:, None]
    other_row = token[None, :]
    first_key = k_block * K_BLOCK
    q_at = q + (at * HG + key_head) * K
    k_at = k + (at * HG + key_head) * K
    k_tile = value_tile(k_at, first_key, rows, HG * K, K, K_BLOCK, C)
    gradient = tl.zeros([C, K_BLOCK], tl.float32)
    if of_queries:
        if HAS_DO and (NEED_Q or NEED_GATES):
            for member in tl.range(0, GROUP, disable_licm=True):
                head = key_head * GROUP + member
                matrix_at = chunk.to(tl.int64) * H + head
                sums = tl.load(G + matrix_at * C + token)
                do_new = tl.zeros([C, C], tl.float32)
                do_S = tl.zeros([C, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    do_tile = value_tile(do + (at * H + head) * V, begin, rows, H * V, V, V_BLOCK, C)
                    new_tile = turned_tile(new + matrix_at * (V * C), begin, V, V_BLOCK, C)
                    S_tile = state_tile(states + matrix_at * (V * K), begin, first_key, K, V, K_BLOCK, V_BLOCK)
                    do_new = tl.dot(do_tile, tl.trans(new_tile), do_new, input_precision=PRECISION)
                    do_S = tl.dot(do_tile, S_tile, do_S, input_precision=PRECISION)
                do_S *= (tl.exp(sums) * scale)[:, None]
                gradient += do_S
                if NEED_GATES:
                    parts_at = parts + (matrix_at * K_BLOCKS + k_block) * (6 * C) + token
                    wide = value_tile(q_at, first_key, rows, HG * K, K, K_BLOCK, C).to(tl.float32)
                    tl.store(parts_at, tl.sum(wide * do_S, 1))
                decay = tl.exp(tl.where(row >= other_row, sums[:, None] - sums[None, :], float("-inf")))
                M = do_new * (decay * scale)
                if NEED_Q:
                    gradient = tl.dot(M.to(low), k_tile, gradient, input_precision=PRECISION)
                if NEED_GATES:
                    if k_block == 0:
                        M *= products(q_at, k_at, rows, HG * K, K, K_BLOCK, PRECISION, C)
                        through = tl.where(row > other_row, M, 0.0)
                        tl.store(parts_at + 3 * C, passing(through, low, PRECISION, C))
        if NEED_Q:
            key = first_key + tl.arange(0, K_BLOCK)[None, :]
            cell = row * (HG * K) + key
            tl.store(dq + (at * HG + key_head) * K + cell, gradient.to(low), (row < rows) & (key < K))
    else:
        if NEED_K or NEED_V or NEED_GATES:
            for member in tl.range(0, GROUP, disable_licm=True):
                head = key_head * GROUP + member
                matrix_at = chunk.to(tl.int64) * H + head
                sums = tl.load(G + matrix_at * C + token)
                strength = tl.load(beta + at * H + head + token * H, token < rows, other=0).to(tl.float32)
                new_do = tl.zeros([C, C], tl.float32)
                Y_new = tl.zeros([C, C], tl.float32)
                new_Y = tl.zeros([C, C], tl.float32)
                Y_v = tl.zeros([C], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    new_tile = turned_tile(new + matrix_at * (V * C), begin, V, V_BLOCK, C)
                    Y_tile = own_tile(Y + matrix_at * (C * V), begin, V, V_BLOCK, C)
                    if HAS_DO and NEED_K:
                        do_tile = value_tile(do + (at * H + head) * V, begin, rows, H * V, V, V_BLOCK, C)
                        new_do = tl.dot(new_tile, tl.trans(do_tile), new_do, input_precision=PRECISION)
                    Y_new = tl.dot(Y_tile, tl.trans(new_tile), Y_new, input_precision=PRECISION)
                    new_Y = tl.dot(new_tile, tl.trans(Y_tile), new_Y, input_precision=PRECISION)
                    wide = Y_tile.to(tl.float32)
                    if NEED_GATES:
                        v_tile = value_tile(v + (at * H + head) * V, begin, rows, H * V, V, V_BLOCK, C)
                        Y_v += tl.sum(wide * v_tile.to(tl.float32), 1)
                    if NEED_V:
                        if k_block == 0:
                            column = begin + tl.arange(0, V_BLOCK)[None, :]
                            tl.store(
                                dv + (at * H + head) * V + (row * (H * V) + column),
                                (wide * strength[:, None]).to(low),
                                (row < rows) & (column < V),
                            )
                if NEED_K or NEED_GATES:
                    parts_at = parts + (matrix_at * K_BLOCKS + k_block) * (6 * C) + token
                    N = -Y_new * tl.exp(tl.where(row > other_row, sums[:, None] - sums[None, :], float("-inf")))
                    if NEED_K:
                        later = tl.exp(tl.where(row <= other_row, sums[None, :] - sums[:, None], float("-inf")))
                        if HAS_DO:
                            q_tile = value_tile(q_at, first_key, rows, HG * K, K, K_BLOCK, C)
                            scores = (new_do * (later * scale)).to(low)
                            gradient = tl.dot(scores, q_tile, gradient, input_precision=PRECISION)
                        after = tl.where(row < other_row, new_Y * later * strength[None, :], 0.0)
                        both = (N * strength[:, None] - after).to(low)
                        gradient += tl.dot(both, k_tile, input_precision=PRECISION)
                    if NEED_GATES:
                        if k_block == 0:
                            N *= products(k_at, k_at, rows, HG * K, K, K_BLOCK, PRECISION, C)
                            tl.store(parts_at + 5 * C, Y_v + tl.sum(N, 1))
                            tl.store(parts_at + 4 * C, passing(N * strength[:, None], low, PRECISION, C))
                    Y_S = tl.zeros([C, K_BLOCK], tl.float32)
                    for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                        Y_tile = own_tile(Y + matrix_at * (C * V), begin, V, V_BLOCK, C)
                        S_tile = state_tile(states + matrix_at * (V * K), begin, first_key, K, V, K_BLOCK, V_BLOCK)
                        Y_S = tl.dot(Y_tile, S_tile, Y_S, input_precision=PRECISION)
                    Y_S *= tl.exp(sums)[:, None]
                    if NEED_GATES:
                        # Read again: kept in registers since the beginning, it would leave none for the sums.
                        wide = value_tile(k_at, first_key, rows, HG * K, K, K_BLOCK, C).to(tl.float32)
                        tl.store(parts_at + C, tl.sum(wide * Y_S, 1))
                    gradient -= Y_S * strength[:, None]
                    new_dS = tl.zeros([C, K_BLOCK], tl.float32)
                    S_dS = tl.zeros([V_BLOCK], tl.float32)
                    for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                        new_tile = turned_tile(new + matrix_at * (V * C), begin, V, V_BLOCK, C)
                        dS_tile = state_tile(dstates + matrix_at * (V * K), begin, first_key, K, V, K_BLOCK, V_BLOCK)
                        new_dS = tl.dot(new_tile, dS_tile, new_dS, input_precision=PRECISION)
                        if NEED_GATES:
                            S_tile = state_tile(states + matrix_at * (V * K), begin, first_key, K, V, K_BLOCK, V_BLOCK)
                            S_dS += tl.sum(S_tile.to(tl.float32) * dS_tile.to(tl.float32), 1)
                    end = tl.load(G + matrix_at * C + C - 1)
                    new_dS *= tl.exp(end - sums)[:, None]
                    gradient += new_dS
                    if NEED_GATES:
                        wide = value_tile(k_at, first_key, rows, HG * K, K, K_BLOCK, C).to(tl.float32)
                        tl.store(parts_at + 2 * C, tl.sum(wide * new_dS, 1))
                        tl.store(kept + matrix_at * K_BLOCKS + k_block, tl.sum(S_dS, 0) * tl.exp(end))
        if NEED_K:
            key = first_key + tl.arange(0, K_BLOCK)[None, :]
            cell = row * (HG * K) + key
            tl.store(dk + (at * HG + key_head) * K + cell, gradient.to(low), (row < rows) & (key < K))


@triton.jit
def passing(through, low: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr):
    """R_t = Σ of Z_ij over i ≥ t > j: first along the rows, as a product with ones, exact for two parts of Z."""
    row = tl.arange(0, C)[:, None]
    other_row = tl.arange(0, C)[None, :]
    ones = tl.where(row < other_row, 1.0, 0.0).to(low)
    high = through.to(low)
    before = tl.dot(high, ones, input_precision=PRECISION)
    if low != tl.float32:
        before += tl.dot((through - high.to(tl.float32)).to(low), ones, input_precision=PRECISION)
    return tl.sum(tl.where(row >= other_row, before, 0.0), 0)


@triton.jit
def gated_delta_gate_gradients(
    beta, places, parts, kept, dg, dbeta,
    H: tl.constexpr, K_BLOCKS: tl.constexpr, HAS_DO: tl.constexpr, NEED_G: tl.constexpr, NEED_BETA: tl.constexpr,
    C: tl.constexpr,
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
    gate_at = at * H + head + token * H
    first = parts + program.to(tl.int64) * (K_BLOCKS * 6 * C) + token
    before = token > 0
    since_q = tl.zeros([C], tl.float32)
    of_key = tl.zeros([C], tl.float32)
    until = tl.zeros([C], tl.float32)
    whole = 0.0
    for block in tl.static_range(K_BLOCKS):
        of_block = first + block * (6 * C)
        if HAS_DO:
            since_q += tl.load(of_block)
        of_key += tl.load(of_block + C)
        until += tl.load(of_block + (2 * C - 1), before, other=0)  # of the token before
        whole += tl.load(kept + program.to(tl.int64) * K_BLOCKS + block)
    if NEED_BETA:
        tl.store(dbeta + gate_at, (tl.load(first + 5 * C) - of_key).to(dbeta.dtype.element_ty), present)
    if NEED_G:
        strength = tl.load(beta + gate_at, present, other=0).to(tl.float32)
        since = tl.cumsum(since_q - strength * of_key, reverse=True)
        found = tl.load(first + 4 * C) + since + tl.cumsum(until) + whole
        if HAS_DO:
            found += tl.load(first + 3 * C)
        tl.store(dg + gate_at, found.to(dg.dtype.element_ty), present)


for _function, _budget in (
    (gated_delta_walk_back, Budget(registers=255, shared_bytes=227 * 1024)),
    (gated_delta_gradients, Budget(registers=255, shared_bytes=227 * 1024)),
    (gated_delta_gate_gradients, Budget(registers=64, shared_bytes=4096)),
):
    kernels.register(_function, budget=_budget)
