"""Triton kernels of `gated_delta_step` and of its adjoint, and what launches them.

Forward: a program takes a tile [K, columns] of one row's and one value head's state through all its tokens, in
registers: a state is read once and written once, which is nearly all there is to move. With `a = e^g`, a token is

    u = β·(v − a·Sᵀk),   S ← a·S + k ⊗ u,   o = scale·Sᵀq

Sums over K add the second half to the first until one row is left, whatever the layout of threads: `tl.sum` over more
than two would add in the order of the layout, which differs with the tile, the number of warps and the alignment.

A tile has the axes [HIGH, GROUPS, LOW, COLUMNS]: key = high·LOW + low, column = group·COLUMNS + the last. The compiler
fills a warp with the last two, gives each group a warp and each thread all of HIGH: what a warp holds are all keys of
its columns, so that sums stay inside it, and the warps of a program read one piece of every row of the state.

Adjoint: with k̂ and q̂ the key and query as they enter the rule, Z = a·S, e = v − Zᵀk̂ and S⁺ = Z + k̂ ⊗ β·e:

    dS⁺ += scale·q̂ ⊗ do,   dq̂ = scale·S⁺ do
    p = dS⁺ᵀk̂,   dβ = e·p,   dv = β·p,   dk̂ = dS⁺(β·e) − Z dv
    dZ = dS⁺ − k̂ ⊗ dv,   dg = ⟨Z, dZ⟩,   dS = a·dZ

A program takes a tile [K, COLUMNS] of one row and value head back through its tokens. The state before each token is
computed again from the first one, in registers: at most 120 tokens' work for 16, and no state is ever stored. What sums
over V leaves a part for each tile, which a second kernel adds in order, over the heads of a group too; rows that share
a state are added by a third, in the order of rows.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, report, status_word
from adjoint.core.kernels import Budget, Float, Int32, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Launch, Setup, is_aligned
from adjoint.core.problem import Problem, wide_dtype
from adjoint.device.faults import record
from adjoint.device.sequences import out_of_range, repeated, skipped_rows
from adjoint.ops.gated_delta.arguments import (
    NEED_BETA,
    NEED_G,
    NEED_K,
    NEED_Q,
    NEED_STATE,
    NEED_V,
    POSITIVE_GATE,
    STATE_INDEX_OUT_OF_RANGE,
    STATE_INDEX_REPEATED,
    report_values,
)
from adjoint.ops.gated_delta.step.plans import backward_columns, power_of_two


@triton.jit
def sum_over(values, AXIS: tl.constexpr, LEVELS: tl.constexpr):
    """The sum along an axis of 2^LEVELS numbers: halves, then halves of what is left. Two numbers have one sum."""
    before: tl.constexpr = values.shape[:AXIS]
    after: tl.constexpr = values.shape[AXIS + 1 :]
    for level in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, before + (2, 2 ** (LEVELS - 1 - level)) + after), AXIS)
    return tl.reshape(values, before + after)


@triton.jit
def sum_over_keys(values, HIGH_LEVELS: tl.constexpr, LOW_LEVELS: tl.constexpr):
    """[HIGH, GROUPS, LOW, COLUMNS] -> [GROUPS, COLUMNS]."""
    return sum_over(sum_over(values, 0, HIGH_LEVELS), 1, LOW_LEVELS)


@triton.jit
def unless_skipped(values, live, INDEXED: tl.constexpr):
    """0 where the row is skipped."""
    if INDEXED:
        values = tl.where(live, values, 0.0)
    return values


@kernel(
    budget=Budget(registers=255, shared_bytes=4096),
    schedule=("HIGH", "HIGH_LEVELS", "GROUPS", "LOW", "LOW_LEVELS", "COLUMNS", "POLICY"),
)  # fmt: skip
@triton.jit
def gated_delta_step_tiles(
    q: PointerIf16.element, k: PointerIf16.element, v: PointerIf16.element, g: Pointer.g, beta: Pointer.beta,
    state: PointerIf16.state, indices: Pointer.index, out: PointerIf16.element, states: PointerIf16.state,
    status_word: Pointer.int64, index_fault: Int32, gate_fault: Int32, scale: Float.computed, time: Int32,
    heads: Int32, group: Int32, places: Int64, q_row: Int64If16, q_token: Int64If16, q_head: Int64If16,
    q_element: Int64, k_row: Int64If16, k_token: Int64If16, k_head: Int64If16, k_element: Int64,
    v_row: Int64If16, v_token: Int64If16, v_head: Int64If16, v_element: Int64, g_row: Int64, g_token: Int64,
    g_head: Int64, beta_row: Int64, beta_token: Int64, beta_head: Int64, state_place: Int64If16,
    state_head: Int64If16, state_key: Int64, state_element: Int64, out_token: Int64If16, states_token: Int64If16,
    index_step: Int64,
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
        q_element, k_element, v_element, state_key, state_element = 1, 1, 1, V, 1
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
        predicted = decay * sum_over_keys(S * k_tile, HIGH_LEVELS, LOW_LEVELS)
        if NORMALIZE:  # k and q by their norms, wherever they come in
            k_norm = tl.rsqrt(sum_over_keys(k_tile * k_tile, HIGH_LEVELS, LOW_LEVELS) + 1e-6)
            new_values = beta_t * (v_t - predicted * k_norm) * k_norm
        else:
            new_values = beta_t * (v_t - predicted)
        S = decay * S + k_tile * new_values[None, :, None, :]
        o = scale * sum_over_keys(S * q_tile, HIGH_LEVELS, LOW_LEVELS)
        if NORMALIZE:
            o *= tl.rsqrt(sum_over_keys(q_tile * q_tile, HIGH_LEVELS, LOW_LEVELS) + 1e-6)
        tl.store(out_at + t * out_token + column, unless_skipped(o, live, INDEXED).to(out.dtype.element_ty), column < V)
        if ALL_STATES:
            stored = unless_skipped(S, live, INDEXED).to(states.dtype.element_ty)
            tl.store(states_at + t * states_token + (key * V + across), stored, in_tile)
    if IN_PLACE:
        tl.store(tile, S.to(state.dtype.element_ty), in_state)
    elif not ALL_STATES:
        stored = unless_skipped(S, live, INDEXED).to(states.dtype.element_ty)
        tl.store(states_at + (key * V + across), stored, in_tile)


def _settings(problem: Problem) -> tuple[dict[str, Any], dict[str, Any]]:
    """The types that kernels of either direction are compiled for, and their constants."""
    element, g, beta, state, *index = problem.dtypes
    types = {"element": element, "g": g, "beta": beta, "state": state, "index": index[0] if index else torch.int32}
    types["computed"] = wide_dtype(element)
    constants = {"K": problem.sizes[0], "INDEXED": bool(index), "NORMALIZE": problem.options[1]}
    return types, {**constants, "DOUBLE": types["computed"] == torch.float64}


MAX_ELEMENTS = 128
"""Numbers of a state that a thread holds at most."""


def _bind_tiles(setup: Setup, one_token: bool, aligned: bool) -> tuple[Launch, int]:
    """The kernel, and the columns of its tiles: as many as the schedule says, unless a thread would hold too much."""
    (types, constants), schedule, (K, V) = _settings(setup.problem), setup.schedule, setup.problem.sizes[:2]
    rows, width, all_states = power_of_two(K), power_of_two(V), setup.problem.options[2]
    in_place = setup.problem.op.endswith("in_place")
    # Strides take registers too, a float64 two of them, and a loop over tokens or two places to write to some.
    lean = one_token and not (in_place and all_states)
    elements = MAX_ELEMENTS // (8 if not aligned or constants["DOUBLE"] else 1 if lean else 2)
    columns = min(schedule["columns"], width, max(1, 32 * elements // rows))
    groups = min(schedule["warps"], width // columns)
    # With the columns of a group, a warp.
    low = min(rows, max(1, 32 // max(1, columns * types["state"].itemsize // 16)))
    bound = setup.kernel(
        gated_delta_step_tiles, **types, **constants, V=V, HIGH=rows // low, GROUPS=groups, LOW=low, COLUMNS=columns,
        HIGH_LEVELS=(rows // low).bit_length() - 1, LOW_LEVELS=low.bit_length() - 1, ALL_STATES=all_states,
        IN_PLACE=in_place, ONE_TOKEN=one_token, ADJACENT=aligned, aligned=aligned, num_warps=groups,
        POLICY="evict_first" if "evict_first" in schedule else "",
    )  # fmt: skip
    return bound, groups * columns


def _is_aligned(tokens: tuple[Tensor, ...], state: Tensor, outputs: tuple[Tensor, ...]) -> bool:
    """Whether elements are adjacent, and everything else begins at a multiple of 16 elements or bytes."""
    place, head, key, element = state.stride()
    heads, V = tokens[2].shape[2:]
    if element != 1 or key != V or place % 16 or head % 16 or heads * V % 16:  # the last, of what is written
        return False
    for x in tokens:
        row, token, head, element = x.stride()
        if element != 1 or row % 16 or token % 16 or head % 16:
            return False
    return is_aligned(*tokens, state, *outputs)


def forward(setup: Setup) -> Execute:
    """Outputs and states, either the rows' new ones or, in place, the pool's own."""
    device, either = setup.device, (True, False)
    tiles = {(one, aligned): _bind_tiles(setup, one, aligned) for one in either for aligned in either}

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        q, k, v, g, beta, state, indices, scale, normalize, _all_states, checking = arguments
        out, states = outputs
        batch, time, heads, V = v.shape
        K = q.shape[3]
        if checking and indices is not None:
            report(STATE_INDEX_REPEATED, indices, repeated(indices))
        if checking:
            report_values(k, g, beta, normalize, skipped_rows(indices, len(state)))
        if out.numel() == 0 or K == 0:  # no state has an element, and an output is an empty sum
            report(POSITIVE_GATE, g, g > 0)
            if indices is not None:
                report(STATE_INDEX_OUT_OF_RANGE, indices, out_of_range(indices, len(state)))
            out.zero_()
            return
        q_row, q_token, q_head, q_element = q.stride()
        k_row, k_token, k_head, k_element = k.stride()
        v_row, v_token, v_head, v_element = v.stride()
        g_row, g_token, g_head = g.stride()
        beta_row, beta_token, beta_head = beta.stride()
        state_place, state_head, state_key, state_element = state.stride()
        bound, columns = tiles[time == 1, _is_aligned((q, k, v), state, outputs)]
        bound.launch(
            (batch * heads * -(-V // columns),), q=q, k=k, v=v, g=g, beta=beta, state=state,
            indices=out if indices is None else indices, out=out, states=states, status_word=status_word(device),
            index_fault=STATE_INDEX_OUT_OF_RANGE.row, gate_fault=POSITIVE_GATE.row, scale=scale, time=time,
            heads=heads, group=heads // q.shape[2], places=state.shape[0], q_row=q_row, q_token=q_token,
            q_head=q_head, q_element=q_element, k_row=k_row, k_token=k_token, k_head=k_head, k_element=k_element,
            v_row=v_row, v_token=v_token, v_head=v_head, v_element=v_element, g_row=g_row, g_token=g_token,
            g_head=g_head, beta_row=beta_row, beta_token=beta_token, beta_head=beta_head, state_place=state_place,
            state_head=state_head, state_key=state_key, state_element=state_element, out_token=heads * V,
            states_token=heads * K * V, index_step=0 if indices is None else indices.stride(0),
        )  # fmt: skip
        if device.type == "cpu":
            check()

    return execute


# ---------------------------------------------------------------------------------------------- adjoint


@triton.jit
def sum_of(values, LEVELS: tl.constexpr):
    """The sum of [2^LEVELS], by halves."""
    return tl.sum(sum_over(values[:, None], 0, LEVELS), 0)


@triton.jit
def norm_of(values, LEVELS: tl.constexpr, NORMALIZE: tl.constexpr):
    """What a vector is multiplied with where it is normalised; elsewhere 1."""
    norm = 1.0
    if NORMALIZE:
        norm = tl.rsqrt(sum_of(values * values, LEVELS) + 1e-6)
    return norm


@triton.jit
def through_norm(x, gradient, LEVELS: tl.constexpr):
    """dx = norm·(dy − y (y·dy)), of y = norm·x."""
    norm = norm_of(x, LEVELS, True)
    y = x * norm
    return norm * (gradient - y * sum_of(y * gradient, LEVELS))


@kernel(budget=Budget(registers=255, shared_bytes=16384), numeric=("COLUMNS",))
@triton.jit
def gated_delta_step_backward_tiles(
    q: Pointer.element, k: Pointer.element, v: Pointer.element, g: Pointer.g, beta: Pointer.beta,
    state: Pointer.state, indices: Pointer.index, do: Pointer.element, dstates: Pointer.state, dv: Pointer.element,
    drows: Pointer.row_state, dq_parts: Pointer.computed, dk_parts: Pointer.computed, dg_parts: Pointer.computed,
    dbeta_parts: Pointer.computed, scale: Float.computed, rows: Int64, time: Int32, heads: Int32, group: Int32,
    places: Int64, q_row: Int64, q_token: Int64, q_head: Int64, q_element: Int64, k_row: Int64, k_token: Int64,
    k_head: Int64, k_element: Int64, v_row: Int64, v_token: Int64, v_head: Int64, v_element: Int64, g_row: Int64,
    g_token: Int64, g_head: Int64, beta_row: Int64, beta_token: Int64, beta_head: Int64, state_place: Int64,
    state_head: Int64, state_key: Int64, state_element: Int64, do_row: Int64, do_token: Int64, do_head: Int64,
    do_element: Int64, dstates_row: Int64, dstates_token: Int64, dstates_head: Int64, dstates_key: Int64,
    dstates_element: Int64, index_step: Int64,
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
            norm = norm_of(k_s, LEVELS, NORMALIZE)
            predicted = sum_over(S * k_s[:, None], 0, LEVELS) * norm
            new_values = tl.load(beta_at + s * beta_token, live, other=0.0).to(WIDE) * (v_s - a_s * predicted)
            S = a_s * S + k_s[:, None] * (new_values * norm)[None, :]
        k_t = tl.load(k_at + t * k_token, in_row, other=0.0).to(WIDE)
        q_t = tl.load(q_at + t * q_token, in_row, other=0.0).to(WIDE)
        v_t = tl.load(v_at + t * v_token, in_column, other=0.0).to(WIDE)
        beta_t = tl.load(beta_at + t * beta_token, live, other=0.0).to(WIDE)
        a = tl.exp(tl.load(g_at + t * g_token, live, other=0.0).to(WIDE))
        k_t = k_t * norm_of(k_t, LEVELS, NORMALIZE)
        q_t = q_t * norm_of(q_t, LEVELS, NORMALIZE)
        S = a * S  # Z from here on
        e = v_t - sum_over(S * k_t[:, None], 0, LEVELS)
        new_values = beta_t * e
        if HAS_DSTATES and ALL_STATES:
            dS += tl.load(dstates_tile + t * dstates_token, in_tile, other=0.0).to(WIDE)
        dq_t = tl.zeros([ROWS], WIDE)
        if HAS_DO:
            upstream = scale * tl.load(do_at + t * do_token, in_column, other=0.0).to(WIDE)
            after = S + k_t[:, None] * new_values[None, :]
            dq_t = sum_over(after * upstream[None, :], 1, WIDTH_LEVELS)
            dS += q_t[:, None] * upstream[None, :]
        along_key = sum_over(dS * k_t[:, None], 0, LEVELS)
        dv_t = beta_t * along_key
        terms = dS * new_values[None, :] - S * dv_t[None, :]
        dk_t = sum_over(terms, 1, WIDTH_LEVELS)
        dS = dS - k_t[:, None] * dv_t[None, :]
        part = (block * rows + row) * time + t
        at = part * heads + head
        if NEED_V:
            stored = dv_t.to(dv.dtype.element_ty)
            tl.store(dv + ((row * time + t) * heads + head) * V + column, stored, column < V)
        tl.store(dq_parts + at * K + number, dq_t, number < K)
        tl.store(dk_parts + at * K + number, dk_t, number < K)
        decayed = sum_over(S * dS, 0, LEVELS)
        tl.store(dg_parts + at, sum_of(decayed, WIDTH_LEVELS))
        tl.store(dbeta_parts + at, sum_of(e * along_key, WIDTH_LEVELS))
        dS = a * dS
    if NEED_STATE:
        stored = dS.to(drows.dtype.element_ty)
        tl.store(drows + (row * heads + head) * (K * V) + (key * V + column[None, :]), stored, in_stored)


@kernel(budget=Budget(registers=128, shared_bytes=4096))
@triton.jit
def gated_delta_step_backward_tokens(
    q: Pointer.element, k: Pointer.element, indices: Pointer.index, dq_parts: Pointer.computed,
    dk_parts: Pointer.computed, dg_parts: Pointer.computed, dbeta_parts: Pointer.computed, dq: Pointer.element,
    dk: Pointer.element, dg: Pointer.g, dbeta: Pointer.beta, items: Int64, time: Int32, key_heads: Int32,
    group: Int32, blocks: Int32, places: Int64, q_row: Int64, q_token: Int64, q_head: Int64, q_element: Int64,
    k_row: Int64, k_token: Int64, k_head: Int64, k_element: Int64, index_step: Int64,
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
    zeros, zero = tl.zeros([ROWS], WIDE), tl.zeros([1], WIDE)
    q_total, k_total = zeros, zeros
    for member in range(0, group):
        at = token * heads + key_head * group + member
        q_head_total, k_head_total, g_total, beta_total = zeros, zeros, zero, zero
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
            q_total = through_norm(x.to(WIDE), q_total, LEVELS)
        tl.store(dq + out_at, q_total.to(dq.dtype.element_ty), number < K)
    if NEED_K:
        if NORMALIZE:
            x = tl.load(k + row * k_row + t * k_token + key_head * k_head + number * k_element, in_row, other=0.0)
            k_total = through_norm(x.to(WIDE), k_total, LEVELS)
        tl.store(dk + out_at, k_total.to(dk.dtype.element_ty), number < K)


@kernel(budget=Budget(registers=64, shared_bytes=4096), schedule=("BLOCK",))
@triton.jit
def gated_delta_step_backward_places(
    indices: Pointer.index, drows: Pointer.computed, dpool: Pointer.state, rows: Int64, index_step: Int64, size: Int64,
    tiles: Int32, BLOCK: tl.constexpr, DOUBLE: tl.constexpr,
):  # fmt: skip
    """The gradient of each state of a pool: those of the rows that read it, in the order of rows; of none, 0."""
    place = (tl.program_id(0) // tiles).to(tl.int64)
    offset = (tl.program_id(0) % tiles).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float64 if DOUBLE else tl.float32)
    for row in range(0, rows):
        index = tl.load(indices + row * index_step).to(tl.int64)
        reads = (offset < size) & (index == place)
        total += tl.load(drows + row * size + offset, reads, other=0.0)
    tl.store(dpool + place * size + offset, total.to(dpool.dtype.element_ty), offset < size)


def backward(setup: Setup) -> Execute:
    """The gradients, those that are needed; which upstream gradients there are is known when it runs."""
    problem, schedule, (types, constants) = setup.problem, setup.schedule, _settings(setup.problem)
    K, V, batch, time, heads = problem.sizes
    need, computed, indexed, double = problem.options[-1], types["computed"], constants["INDEXED"], constants["DOUBLE"]
    size, columns = power_of_two(K), backward_columns(K, V)
    constants |= {"ROWS": size, "LEVELS": size.bit_length() - 1}
    tiles = {
        (has_do, has_dstates): setup.kernel(
            gated_delta_step_backward_tiles, **types, **constants, row_state=computed if indexed else types["state"],
            V=V, COLUMNS=columns, WIDTH_LEVELS=columns.bit_length() - 1, ALL_STATES=problem.options[2], HAS_DO=has_do,
            HAS_DSTATES=has_dstates, NEED_V=bool(need & NEED_V), NEED_STATE=bool(need & NEED_STATE),
            num_warps=schedule["warps"] * (2 if double else 1),  # a float64 has two registers
        )
        for has_do, has_dstates in ((True, True), (True, False), (False, True))
    }  # fmt: skip
    tokens = setup.kernel(
        gated_delta_step_backward_tokens, **{x: kind for x, kind in types.items() if x != "state"}, **constants,
        NEED_Q=bool(need & NEED_Q), NEED_K=bool(need & NEED_K), NEED_G=bool(need & NEED_G),
        NEED_BETA=bool(need & NEED_BETA), num_warps=schedule["token_warps"],
    )  # fmt: skip
    blocks = -(-V // columns)
    parts = blocks * batch * time * heads
    setup.scratch(dbeta_parts=(computed, parts), dg_parts=(computed, parts))
    setup.scratch(dk_parts=(computed, parts * K), dq_parts=(computed, parts * K))
    needs_pool, block = indexed and bool(need & NEED_STATE), schedule["place_block"]
    if needs_pool:
        places = setup.kernel(
            gated_delta_step_backward_places, index=types["index"], computed=computed, state=types["state"],
            BLOCK=block, DOUBLE=double, num_warps=schedule["place_warps"],
        )  # fmt: skip
        setup.scratch(drows=(computed, batch * heads * K * V))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        do, dstates, q, k, v, g, beta, state, indices, scale, *_ = arguments
        dq, dk, dv, dg, dbeta, dpool = outputs
        key_heads = q.shape[2]
        if v.numel() == 0 or K == 0 or (do is None and dstates is None):
            for gradient in outputs:
                gradient.zero_()
            return
        memory = setup.memory(workspace)
        dq_parts, dk_parts, dg_parts = memory["dq_parts"], memory["dk_parts"], memory["dg_parts"]
        dbeta_parts = memory["dbeta_parts"]
        index, index_step = (dv, 0) if indices is None else (indices, indices.stride(0))
        group, states = heads // key_heads, state.shape[0]
        q_row, q_token, q_head, q_element = q.stride()
        k_row, k_token, k_head, k_element = k.stride()
        v_row, v_token, v_head, v_element = v.stride()
        g_row, g_token, g_head = g.stride()
        beta_row, beta_token, beta_head = beta.stride()
        state_place, state_head, state_key, state_element = state.stride()
        do_row, do_token, do_head, do_element = (0,) * 4 if do is None else do.stride()
        dstates_row, *dstates_token, dstates_head, dstates_key, dstates_element = (
            (0,) * 4 if dstates is None else dstates.stride()
        )
        tiles[do is not None, dstates is not None].launch(
            (batch * heads * blocks,), q=q, k=k, v=v, g=g, beta=beta, state=state, indices=index,
            do=v if do is None else do, dstates=state if dstates is None else dstates, dv=dv,
            drows=memory["drows"] if needs_pool else dpool, dq_parts=dq_parts, dk_parts=dk_parts, dg_parts=dg_parts,
            dbeta_parts=dbeta_parts, scale=scale, rows=batch, time=time, heads=heads, group=group, places=states,
            q_row=q_row, q_token=q_token, q_head=q_head, q_element=q_element, k_row=k_row, k_token=k_token,
            k_head=k_head, k_element=k_element, v_row=v_row, v_token=v_token, v_head=v_head, v_element=v_element,
            g_row=g_row, g_token=g_token, g_head=g_head, beta_row=beta_row, beta_token=beta_token,
            beta_head=beta_head, state_place=state_place, state_head=state_head, state_key=state_key,
            state_element=state_element, do_row=do_row, do_token=do_token, do_head=do_head, do_element=do_element,
            dstates_row=dstates_row, dstates_token=dstates_token[0] if dstates_token else 0,
            dstates_head=dstates_head, dstates_key=dstates_key, dstates_element=dstates_element,
            index_step=index_step,
        )  # fmt: skip
        if need & (NEED_Q | NEED_K | NEED_G | NEED_BETA):
            tokens.launch(
                (batch * time * key_heads,), q=q, k=k, indices=index, dq_parts=dq_parts, dk_parts=dk_parts,
                dg_parts=dg_parts, dbeta_parts=dbeta_parts, dq=dq, dk=dk, dg=dg, dbeta=dbeta,
                items=batch * time * heads, time=time, key_heads=key_heads, group=group, blocks=blocks,
                places=states, q_row=q_row, q_token=q_token, q_head=q_head, q_element=q_element, k_row=k_row,
                k_token=k_token, k_head=k_head, k_element=k_element, index_step=index_step,
            )  # fmt: skip
        if needs_pool:
            size = heads * K * V
            programs = -(-size // block)
            places.launch(
                (states * programs,), indices=indices, drows=memory["drows"], dpool=dpool, rows=batch,
                index_step=index_step, size=size, tiles=programs,
            )  # fmt: skip

    return execute
