"""Triton kernels of `gated_delta_step`.

A program takes a tile [K, COLUMNS] of one row's and one value head's state through all its tokens, in registers: a
state is read once and written once, which is nearly all there is to move. With `a = e^g`, a token is

    u = β·(v − a·Sᵀk),   o = scale·(a·Sᵀq + (k·q)·u),   S ← a·S + k ⊗ u

so that both sums over K are of the state as it was: neither waits for the other, nor for the update.

Sums over K add the second half to the first until one row is left, whatever the layout of threads: `tl.sum` over more
than two would add in the order of the layout, which differs with the tile, the number of warps and the alignment.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.faults import record
from adjoint.core.kernels import Budget


@triton.jit
def sum_of(values, SIZE: tl.constexpr, LEVELS: tl.constexpr):
    """The sum of [SIZE], SIZE = 2^LEVELS: halves, then halves of what is left. Two numbers have one sum."""
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, [2, SIZE // 2 ** (level + 1)]), 0)
    return tl.sum(values, 0)


@triton.jit
def sums_of_rows(first, second, ROWS: tl.constexpr, LEVELS: tl.constexpr, WIDTH: tl.constexpr):
    """`sum_of` for every column of two tiles [ROWS, WIDTH], which cross lanes and warps together."""
    both = tl.join(first, second)
    for level in tl.static_range(LEVELS):
        both = tl.sum(tl.reshape(both, [2, ROWS // 2 ** (level + 1), WIDTH, 2]), 0)
    return tl.split(tl.reshape(both, [WIDTH, 2]))


@triton.jit
def unless_skipped(values, live, INDEXED: tl.constexpr):
    """0 where the row is skipped."""
    if INDEXED:
        values = tl.where(live, values, 0.0)
    return values


@triton.jit
def gated_delta_step_tiles(
    q, k, v, g, beta, state, indices, out, states, status_word, index_fault, gate_fault, scale, time, heads, group,
    places, q_row, q_token, q_head, q_element, k_row, k_token, k_head, k_element, v_row, v_token, v_head, v_element,
    g_row, g_token, g_head, beta_row, beta_token, beta_head, state_place, state_head, state_key, state_element,
    out_token, states_token, index_step,
    K: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
    INDEXED: tl.constexpr, NORMALIZE: tl.constexpr, ALL_STATES: tl.constexpr, IN_PLACE: tl.constexpr,
    ONE_TOKEN: tl.constexpr, ADJACENT: tl.constexpr, POLICY: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Outputs and states of one tile. ADJACENT: the strides of elements are 1, and the state's rows follow each other.

    `states` takes the new state of each row, or all of them; in place without all of them it is not touched.
    """
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BLOCKS: tl.constexpr = (V + COLUMNS - 1) // COLUMNS
    if ADJACENT:
        q_element = 1
        k_element = 1
        v_element = 1
        state_key = V
        state_element = 1
    block = tl.program_id(0) % BLOCKS
    item = tl.program_id(0) // BLOCKS
    key_head = (item % heads // group).to(tl.int64)
    head = (item % heads).to(tl.int64)
    row = (item // heads).to(tl.int64)
    key = tl.arange(0, ROWS)[:, None]
    column = block * COLUMNS + tl.arange(0, COLUMNS)
    in_tile = (key < K) & (column < V)[None, :]
    one = tl.zeros([1], tl.int64)

    place = row
    live = None
    in_state = in_tile
    if INDEXED:
        place = tl.load(indices + row * index_step).to(tl.int64)
        live = (place >= 0) & (place < places)
        in_state = in_tile & live
        wrong = (block == 0) & (head == 0) & ((place < -1) | (place >= places))
        record(status_word, index_fault, row + one, place + one, wrong & (one == 0))
    tile = state + place * state_place + head * state_head + (key * state_key + (column * state_element)[None, :])
    S = tl.load(tile, in_state, other=0.0, eviction_policy=POLICY).to(WIDE)

    number = tl.arange(0, ROWS)
    q_at = q + row * q_row + key_head * q_head
    k_at = k + row * k_row + key_head * k_head
    v_at = v + row * v_row + head * v_head
    g_at = g + row * g_row + head * g_head
    beta_at = beta + row * beta_row + head * beta_head
    out_at = out + row * time * out_token + head * V
    states_at = states + (row * time if ALL_STATES else row) * states_token + head * (K * V)

    for t in range(0, 1 if ONE_TOKEN else time):
        k_t = tl.load(k_at + t * k_token + number * k_element, number < K, other=0.0).to(WIDE)
        q_t = tl.load(q_at + t * q_token + number * q_element, number < K, other=0.0).to(WIDE)
        v_t = tl.load(v_at + t * v_token + column * v_element, column < V, other=0.0).to(WIDE)
        g_t = tl.load(g_at + t * g_token).to(WIDE)
        beta_t = tl.load(beta_at + t * beta_token).to(WIDE)
        positive = (block == 0) & (g_t > 0)
        position = (row * time + t) * heads + head + one
        record(status_word, gate_fault, position, g_t.to(tl.int64) + one, positive & (one == 0))
        decay = tl.exp(g_t)
        known, seen = sums_of_rows(S * k_t[:, None], S * q_t[:, None], ROWS, LEVELS, COLUMNS)
        score = sum_of(k_t * q_t, ROWS, LEVELS)
        if NORMALIZE:  # k and q by their norms, wherever they come in
            k_norm = tl.rsqrt(sum_of(k_t * k_t, ROWS, LEVELS) + 1e-6)
            q_norm = tl.rsqrt(sum_of(q_t * q_t, ROWS, LEVELS) + 1e-6)
            new = beta_t * (v_t - decay * (known * k_norm))
            o = scale * (decay * (seen * q_norm) + score * k_norm * q_norm * new)
            new = new * k_norm
        else:
            new = beta_t * (v_t - decay * known)
            o = scale * (decay * seen + score * new)
        S = decay * S + k_t[:, None] * new[None, :]
        tl.store(out_at + t * out_token + column, unless_skipped(o, live, INDEXED).to(out.dtype.element_ty), column < V)
        if ALL_STATES:
            kept = unless_skipped(S, live, INDEXED).to(states.dtype.element_ty)
            tl.store(states_at + t * states_token + (key * V + column[None, :]), kept, in_tile)
    if IN_PLACE:
        tl.store(tile, S.to(state.dtype.element_ty), in_state, eviction_policy=POLICY)
    elif not ALL_STATES:
        kept = unless_skipped(S, live, INDEXED).to(states.dtype.element_ty)
        tl.store(states_at + (key * V + column[None, :]), kept, in_tile, eviction_policy=POLICY)


KERNELS = (kernels.register(gated_delta_step_tiles, budget=Budget(registers=168, shared_bytes=16384)),)
