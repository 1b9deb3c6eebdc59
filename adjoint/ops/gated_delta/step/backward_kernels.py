"""Triton kernels of the adjoint of `gated_delta_step`.

With k̂ and q̂ the key and query as they enter the rule, a = e^g, Z = a·S, e = v − Zᵀk̂ and S⁺ = Z + k̂ ⊗ β·e:

    dS⁺ += scale·q̂ ⊗ do,   dq̂ = scale·S⁺ do
    p = dS⁺ᵀk̂,   dβ = e·p,   dv = β·p,   dk̂ = dS⁺(β·e) − Z dv
    dZ = dS⁺ − k̂ ⊗ dv,   dg = ⟨Z, dZ⟩,   dS = a·dZ

A program takes a tile [K, COLUMNS] of one row and value head back through its tokens. The state before each token is
computed again from the first one, in registers: at most 120 tokens' work for 16, and no state is ever stored. What sums
over V leaves a part for each tile, which a second kernel adds in order, over the heads of a group too; rows that share
a state are added by a third, in the order of rows.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget


@triton.jit
def sum_of(values, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The sum of [SIZE], SIZE = 2^LEVELS: halves, then halves of what is left. Two numbers have one sum."""
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [2, SIZE // 2 ** (level + 1)]), 0)
    return tl.sum(values, 0)


@triton.jit
def sum_over_rows(values, ROWS: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr):
    """[ROWS, WIDTH] -> [WIDTH], by halves."""
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [2, ROWS // 2 ** (level + 1), WIDTH]), 0)
    return tl.reshape(values, [WIDTH])


@triton.jit
def sum_over_columns(values, ROWS: tl.constexpr, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[ROWS, WIDTH] -> [ROWS], by halves."""
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [ROWS, 2, WIDTH // 2 ** (level + 1)]), 1)
    return tl.reshape(values, [ROWS])


@triton.jit
def norm_of(values, SIZE: tl.constexpr, LEVELS: tl.constexpr, NORMALIZE: tl.constexpr):
    """What a vector is multiplied with where it is normalised; elsewhere 1."""
    norm = 1.0
    if NORMALIZE:
        norm = tl.rsqrt(sum_of(values * values, SIZE, LEVELS) + 1e-6)
    return norm


@triton.jit
def through_norm(x, gradient, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """dx = norm·(dy − y (y·dy)), of y = norm·x."""
    norm = norm_of(x, SIZE, LEVELS, True)
    y = x * norm
    return norm * (gradient - y * sum_of(y * gradient, SIZE, LEVELS))


@triton.jit
def gated_delta_step_backward_tiles(
    q, k, v, g, beta, state, indices, do, dstates, dv, drows, dq_parts, dk_parts, dg_parts, dbeta_parts, scale, rows,
    time, heads, group, places, q_row, q_token, q_head, q_element, k_row, k_token, k_head, k_element, v_row, v_token,
    v_head, v_element, g_row, g_token, g_head, beta_row, beta_token, beta_head, state_place, state_head, state_key,
    state_element, do_row, do_token, do_head, do_element, dstates_row, dstates_token, dstates_head, dstates_key,
    dstates_element, index_step,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
    WIDTH_LEVELS: tl.constexpr, INDEXED: tl.constexpr, NORMALIZE: tl.constexpr, ALL_STATES: tl.constexpr,
    HAS_DO: tl.constexpr, HAS_DSTATES: tl.constexpr, NEED_V: tl.constexpr, NEED_STATE: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """dv, the gradient of the row's first state, and this tile's part of what sums over V."""
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) % BLOCKS
    item = tl.program_id(0) // BLOCKS
    key_head = (item % heads // group).to(tl.int64)
    head = (item % heads).to(tl.int64)
    row = (item // heads).to(tl.int64)
    number = tl.arange(0, ROWS)
    key = number[:, None]
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    in_row = number < K
    in_column = column < V
    in_tile = in_row[:, None] & in_column[None, :]
    in_stored = in_tile
    place = row
    live = row >= 0
    if INDEXED:
        place = tl.load(indices + row * index_step).to(tl.int64)
        live = (place >= 0) & (place < places)
        in_row = in_row & live
        in_column = in_column & live
        in_tile = in_tile & live
    tile = state + place * state_place + head * state_head + (key * state_key + (column * state_element)[None, :])
    dstates_tile = dstates + row * dstates_row + head * dstates_head
    dstates_tile = dstates_tile + (key * dstates_key + (column * dstates_element)[None, :])
    q_at = q + row * q_row + key_head * q_head + number * q_element
    k_at = k + row * k_row + key_head * k_head + number * k_element
    v_at = v + row * v_row + head * v_head + column * v_element
    do_at = do + row * do_row + head * do_head + column * do_element
    g_at = g + row * g_row + head * g_head
    beta_at = beta + row * beta_row + head * beta_head

    dS = tl.zeros([ROWS, COLUMNS], WIDE)
    if HAS_DSTATES and not ALL_STATES:
        dS += tl.load(dstates_tile, in_tile, other=0.0).to(WIDE)
    for back in range(0, time):
        t = time - 1 - back
        S = tl.load(tile, in_tile, other=0.0).to(WIDE)
        for s in range(0, t):
            k_s = tl.load(k_at + s * k_token, in_row, other=0.0).to(WIDE)
            v_s = tl.load(v_at + s * v_token, in_column, other=0.0).to(WIDE)
            a_s = tl.exp(tl.load(g_at + s * g_token, live, other=0.0).to(WIDE))
            norm = norm_of(k_s, ROWS, LEVELS, NORMALIZE)
            known = sum_over_rows(S * k_s[:, None], ROWS, LEVELS, COLUMNS) * norm
            new = tl.load(beta_at + s * beta_token, live, other=0.0).to(WIDE) * (v_s - a_s * known)
            S = a_s * S + k_s[:, None] * (new * norm)[None, :]
        k_t = tl.load(k_at + t * k_token, in_row, other=0.0).to(WIDE)
        q_t = tl.load(q_at + t * q_token, in_row, other=0.0).to(WIDE)
        v_t = tl.load(v_at + t * v_token, in_column, other=0.0).to(WIDE)
        beta_t = tl.load(beta_at + t * beta_token, live, other=0.0).to(WIDE)
        a = tl.exp(tl.load(g_at + t * g_token, live, other=0.0).to(WIDE))
        k_t = k_t * norm_of(k_t, ROWS, LEVELS, NORMALIZE)
        q_t = q_t * norm_of(q_t, ROWS, LEVELS, NORMALIZE)
        S = a * S  # Z from here on
        e = v_t - sum_over_rows(S * k_t[:, None], ROWS, LEVELS, COLUMNS)
        new = beta_t * e
        if HAS_DSTATES and ALL_STATES:
            dS += tl.load(dstates_tile + t * dstates_token, in_tile, other=0.0).to(WIDE)
        dq_t = tl.zeros([ROWS], WIDE)
        if HAS_DO:
            upstream = scale * tl.load(do_at + t * do_token, in_column, other=0.0).to(WIDE)
            after = S + k_t[:, None] * new[None, :]
            dq_t = sum_over_columns(after * upstream[None, :], ROWS, COLUMNS, WIDTH_LEVELS)
            dS += q_t[:, None] * upstream[None, :]
        towards = sum_over_rows(dS * k_t[:, None], ROWS, LEVELS, COLUMNS)
        dv_t = beta_t * towards
        terms = dS * new[None, :] - S * dv_t[None, :]
        dk_t = sum_over_columns(terms, ROWS, COLUMNS, WIDTH_LEVELS)
        dS = dS - k_t[:, None] * dv_t[None, :]
        part = (block * rows + row) * time + t
        at = part * heads + head
        if NEED_V:
            stored = dv_t.to(dv.dtype.element_ty)
            tl.store(dv + ((row * time + t) * heads + head) * V + column, stored, column < V)
        tl.store(dq_parts + at * K + number, dq_t, number < K)
        tl.store(dk_parts + at * K + number, dk_t, number < K)
        decayed = sum_over_rows(S * dS, ROWS, LEVELS, COLUMNS)
        tl.store(dg_parts + at, sum_of(decayed, COLUMNS, WIDTH_LEVELS))
        tl.store(dbeta_parts + at, sum_of(e * towards, COLUMNS, WIDTH_LEVELS))
        dS = a * dS
    if NEED_STATE:
        stored = dS.to(drows.dtype.element_ty)
        tl.store(drows + (row * heads + head) * (K * V) + (key * V + column[None, :]), stored, in_stored)


@triton.jit
def gated_delta_step_backward_tokens(
    q, k, indices, dq_parts, dk_parts, dg_parts, dbeta_parts, dq, dk, dg, dbeta, items, time, key_heads, group, blocks,
    places, q_row, q_token, q_head, q_element, k_row, k_token, k_head, k_element, index_step,
    K: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, NORMALIZE: tl.constexpr, NEED_Q: tl.constexpr,
    NEED_K: tl.constexpr, NEED_G: tl.constexpr, NEED_BETA: tl.constexpr, INDEXED: tl.constexpr,
    DOUBLE: tl.constexpr,
):  # fmt: skip
    """dq and dk of one token and key head, dg and dβ of its value heads: heads in order, each the tiles of V in order.

    `items` counts tokens times value heads: the parts of one tile of V.
    """
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    number = tl.arange(0, ROWS)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    token = (tl.program_id(0) // key_heads).to(tl.int64)  # of all rows
    heads = key_heads * group
    q_total = tl.zeros([ROWS], WIDE)
    k_total = tl.zeros([ROWS], WIDE)
    for member in range(0, group):
        at = token * heads + key_head * group + member
        q_head_total = tl.zeros([ROWS], WIDE)
        k_head_total = tl.zeros([ROWS], WIDE)
        g_total = tl.zeros([1], WIDE)
        beta_total = tl.zeros([1], WIDE)
        for block in range(0, blocks):
            part = at + block * items
            if NEED_Q:
                q_head_total += tl.load(dq_parts + part * K + number, number < K, other=0.0)
            if NEED_K:
                k_head_total += tl.load(dk_parts + part * K + number, number < K, other=0.0)
            g_total += tl.load(dg_parts + part)
            beta_total += tl.load(dbeta_parts + part)
        q_total += q_head_total
        k_total += k_head_total
        one = tl.arange(0, 1)
        if NEED_G:
            tl.store(dg + at + one, g_total.to(dg.dtype.element_ty))
        if NEED_BETA:
            tl.store(dbeta + at + one, beta_total.to(dbeta.dtype.element_ty))
    row = token // time
    t = token % time
    out_at = (token * key_heads + key_head) * K + number
    in_row = number < K
    if INDEXED:
        place = tl.load(indices + row * index_step).to(tl.int64)
        in_row = in_row & (place >= 0) & (place < places)  # whatever a skipped row holds
    if NEED_Q:
        if NORMALIZE:
            x = tl.load(q + row * q_row + t * q_token + key_head * q_head + number * q_element, in_row, other=0.0)
            q_total = through_norm(x.to(WIDE), q_total, ROWS, LEVELS)
        tl.store(dq + out_at, q_total.to(dq.dtype.element_ty), number < K)
    if NEED_K:
        if NORMALIZE:
            x = tl.load(k + row * k_row + t * k_token + key_head * k_head + number * k_element, in_row, other=0.0)
            k_total = through_norm(x.to(WIDE), k_total, ROWS, LEVELS)
        tl.store(dk + out_at, k_total.to(dk.dtype.element_ty), number < K)


@triton.jit
def gated_delta_step_backward_places(
    indices, drows, dpool, rows, index_step, size, tiles, BLOCK: tl.constexpr, DOUBLE: tl.constexpr
):
    """The gradient of each state of a pool: those of the rows that read it, in the order of rows; of none, 0."""
    place = (tl.program_id(0) // tiles).to(tl.int64)
    offset = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    for row in range(0, rows):
        index = tl.load(indices + row * index_step).to(tl.int64)
        mine = (offset < size) & (index == place)
        total += tl.load(drows + row * size + offset, mine, other=0.0)
    tl.store(dpool + place * size + offset, total.to(dpool.dtype.element_ty), offset < size)


KERNELS = (
    kernels.register(gated_delta_step_backward_tiles, budget=Budget(registers=255, shared_bytes=16384)),
    kernels.register(gated_delta_step_backward_tokens, budget=Budget(registers=128, shared_bytes=4096)),
    kernels.register(gated_delta_step_backward_places, budget=Budget(registers=64, shared_bytes=4096)),
)
