"""Triton kernels of `gated_delta_step`.

A program takes a tile [K, columns] of one row's and one value head's state through all its tokens, in registers: a
state is read once and written once, which is nearly all there is to move. With `a = e^g`, a token is

    u = β·(v − a·Sᵀk),   S ← a·S + k ⊗ u,   o = scale·Sᵀq

Sums over K add the second half to the first until one row is left, whatever the layout of threads: `tl.sum` over more
than two would add in the order of the layout, which differs with the tile, the number of warps and the alignment.

A tile has the axes [HIGH, GROUPS, LOW, COLUMNS]: key = high·LOW + low, column = group·COLUMNS + the last. The compiler
fills a warp with the last two, gives each group a warp and each thread all of HIGH: what a warp holds are all keys of
its columns, so that sums stay inside it, and the warps of a program read one piece of every row of the state.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record


@triton.jit
def sum_over_keys(
    values, HIGH: tl.constexpr, HIGH_LEVELS: tl.constexpr, GROUPS: tl.constexpr, LOW: tl.constexpr,
    LOW_LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[HIGH, GROUPS, LOW, COLUMNS] -> [GROUPS, COLUMNS]: halves of the keys, then halves of what is left."""
    for level in tl.static_range(HIGH_LEVELS):
        values = tl.sum(tl.reshape(values, [2, HIGH // 2 ** (level + 1), GROUPS, LOW, COLUMNS]), 0)
    values = tl.reshape(values, [GROUPS, LOW, COLUMNS])
    for level in tl.static_range(LOW_LEVELS):
        values = tl.sum(tl.reshape(values, [GROUPS, 2, LOW // 2 ** (level + 1), COLUMNS]), 1)
    return tl.reshape(values, [GROUPS, COLUMNS])


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
    K: tl.constexpr, V: tl.constexpr, HIGH: tl.constexpr, HIGH_LEVELS: tl.constexpr, GROUPS: tl.constexpr,
    LOW: tl.constexpr, LOW_LEVELS: tl.constexpr, COLUMNS: tl.constexpr,
    INDEXED: tl.constexpr, NORMALIZE: tl.constexpr, ALL_STATES: tl.constexpr, IN_PLACE: tl.constexpr,
    ONE_TOKEN: tl.constexpr, ADJACENT: tl.constexpr, POLICY: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """Outputs and states of one tile. ADJACENT: the strides of elements are 1, and the state's rows follow each other.

    `states` takes the new state of each row, or all of them; in place without all of them it is not touched.
    """
    WIDE: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BLOCKS: tl.constexpr = (V + GROUPS * COLUMNS - 1) // (GROUPS * COLUMNS)
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
    number = tl.arange(0, HIGH)[:, None] * LOW + tl.arange(0, LOW)[None, :]
    key = number[:, None, :, None]
    column = (block * GROUPS + tl.arange(0, GROUPS)[:, None]) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    across = column[None, :, None, :]
    in_tile = (key < K) & (across < V)
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
    tile = state + place * state_place + head * state_head + (key * state_key + across * state_element)
    S = tl.load(tile, in_state, other=0.0, eviction_policy=POLICY).to(WIDE)

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
        k_tile, q_tile = k_t[:, None, :, None], q_t[:, None, :, None]
        known = decay * sum_over_keys(S * k_tile, HIGH, HIGH_LEVELS, GROUPS, LOW, LOW_LEVELS, COLUMNS)
        if NORMALIZE:  # k and q by their norms, wherever they come in
            k_norm = tl.rsqrt(sum_over_keys(k_tile * k_tile, HIGH, HIGH_LEVELS, 1, LOW, LOW_LEVELS, 1) + 1e-6)
            new = beta_t * (v_t - known * k_norm) * k_norm
        else:
            new = beta_t * (v_t - known)
        S = decay * S + k_tile * new[None, :, None, :]
        o = scale * sum_over_keys(S * q_tile, HIGH, HIGH_LEVELS, GROUPS, LOW, LOW_LEVELS, COLUMNS)
        if NORMALIZE:
            o *= tl.rsqrt(sum_over_keys(q_tile * q_tile, HIGH, HIGH_LEVELS, 1, LOW, LOW_LEVELS, 1) + 1e-6)
        tl.store(out_at + t * out_token + column, unless_skipped(o, live, INDEXED).to(out.dtype.element_ty), column < V)
        if ALL_STATES:
            kept = unless_skipped(S, live, INDEXED).to(states.dtype.element_ty)
            tl.store(states_at + t * states_token + (key * V + across), kept, in_tile)
    if IN_PLACE:
        tl.store(tile, S.to(state.dtype.element_ty), in_state)
    elif not ALL_STATES:
        kept = unless_skipped(S, live, INDEXED).to(states.dtype.element_ty)
        tl.store(states_at + (key * V + across), kept, in_tile)


KERNELS = (kernels.register(gated_delta_step_tiles, budget=Budget(registers=255, shared_bytes=4096)),)
