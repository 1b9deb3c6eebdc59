"""The gradients of tokens after the scans: dq, dk and dv, the sums that dβ and dg are computed from, and these.

Notation, layouts and roundings of `local_gradients.py`.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Budget, Float32, Int32, Int64x16, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta.arguments import NEED_BETA, NEED_G, NEED_K, NEED_Q, NEED_V
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import fits
from adjoint.ops.gated_delta.rule.triton.gates import (
    GATE_DECAY,
    GATE_FROM_START,
    GATE_LOW,
    GATE_ROWS,
    GATE_STRENGTH,
    GATE_TO_END,
)
from adjoint.ops.gated_delta.rule.triton.local_gradients import decays, precision_of, products, token_tile
from adjoint.ops.gated_delta.rule.triton.normalize import bind_unnormalize

NEED_KEYS = NEED_Q | NEED_K | NEED_G | NEED_BETA
NEED_TOKENS = NEED_KEYS | NEED_V

BY_ROWS, BY_BLOCKS = 1, 2
"""How the gradient passes through the norms of q and k: in the kernel that has whole rows, or in one of its own."""

SUM_KEYS, SUM_KEYS_TO_END, GATE_SUMS = map(tl.constexpr, range(1, 4))
"""Rows of a block's sums after q·(scale e^G do Sᵀ): k·(e^G Y Sᵀ), k·(e^{Γ−G} v' dS⁺ᵀ), and how many there are."""


@triton.jit
def _tile(
    x, first, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of a matrix [ROWS, COLUMNS]."""
    row = first + tl.arange(0, ROW_BLOCK)[:, None]
    column = first_column + tl.arange(0, COLUMN_BLOCK)[None, :]
    if ROWS % ROW_BLOCK == 0 and COLUMNS % COLUMN_BLOCK == 0:
        return tl.load(x + (row * COLUMNS + column))
    else:
        return tl.load(x + (row * COLUMNS + column), (row < ROWS) & (column < COLUMNS), other=0)


@triton.jit
def _transposed_tile(x, first, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """The transpose of some rows of a matrix [ROWS, 64]."""
    row = first + tl.arange(0, ROW_BLOCK)[None, :]
    column = tl.arange(0, 64)[:, None]
    return tl.load(x + (row * 64 + column), fits(row, ROWS, ROW_BLOCK), other=0)


@triton.jit
def _sums_past(through, kind: tl.constexpr, PRECISION: tl.constexpr):
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


@kernel(
    budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=384), targets=NVIDIA,
    numeric={"key_block": "K_BLOCK", "matrix_block": "V_BLOCK", "gradient_precision": "PRECISION"},
    schedule=("STAGES",),
)  # fmt: skip
@triton.jit
def rule_matrices(
    q: Pointer16.element, k: Pointer16.element, v: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32,
    chunk_indices: Pointer.int32, new_values: Pointer16.element, Y: Pointer16.element, M: Pointer16.element,
    M_transposed: Pointer16.element, E: Pointer16.element, dv: PointerIf16.element, passing_sums: Pointer.float32,
    strength_sums: Pointer.float32, key_heads: Int32, columns: Int32, scale: Float32,
    q_token_stride: Int64x16, q_head_stride: Int64x16, k_token_stride: Int64x16, k_head_stride: Int64x16,
    v_token_stride: Int64x16, v_head_stride: Int64x16, do_token_stride: Int64x16, do_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, NEED_QK: tl.constexpr, NEED_V: tl.constexpr,
    NEED_GATES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's matrices of one value head, for dq and dk: M = scale·(do v'ᵀ) ⊙ D, Mᵀ, and E + Eᵀ with
    E = β ⊙ N, N = −(Y v'ᵀ) ⊙ D°; each, and each transpose, by a product of its own. And dv = β ⊙ Y.

    For dg what M and E send through D, in `passing_sums` [chunks, H, 64]; for dβ the rows of Y ⊙ v and N ⊙ k kᵀ,
    summed, in `strength_sums` [chunks, H, 64]. `columns` is V as a number the compiler does not know: loops it unrolls
    have no registers left.
    """
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    heads = key_heads * GROUP
    slot = program // heads
    head = program % heads
    rows = tl.load(chunk_indices + slot.to(tl.int64) * INDEX_WIDTH + INDEX_COUNT)
    if rows == 0:
        return
    first_token = tl.load(chunk_indices + slot.to(tl.int64) * INDEX_WIDTH)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    i = token[:, None]
    j = token[None, :]
    gates += program.to(tl.int64) * (GATE_ROWS * CHUNK)
    new_values += program.to(tl.int64) * (V * CHUNK)
    Y += program.to(tl.int64) * (V * CHUNK)
    v += first_token.to(tl.int64) * v_token_stride + head.to(tl.int64) * v_head_stride
    do += first_token.to(tl.int64) * do_token_stride + head.to(tl.int64) * do_head_stride
    zeros = tl.zeros([CHUNK, CHUNK], tl.float32)
    do_new, new_do, Y_new, new_Y = zeros, zeros, zeros, zeros
    Y_v = tl.zeros([CHUNK], tl.float32)
    for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
        Y_tile = _transposed_tile(Y, begin, V, V_BLOCK)
        if NEED_QK or NEED_GATES:
            new_tile = _transposed_tile(new_values, begin, V, V_BLOCK)
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
            strength = tl.load(gates + GATE_STRENGTH * CHUNK + token)
            column = begin + tl.arange(0, V_BLOCK)[None, :]
            place = dv + (first_token.to(tl.int64) * heads + head) * V_SIZE + (i * (heads * V_SIZE) + column)
            tl.store(place, (wide * strength[:, None]).to(kind), (i < rows) & (column < V_SIZE))
        if NEED_GATES:
            v_tile = token_tile(v, begin, rows, v_token_stride, V, V_BLOCK)
            Y_v += tl.sum(wide * v_tile.to(tl.float32), 1)
    if NEED_QK or NEED_GATES:
        beta = tl.load(gates + GATE_STRENGTH * CHUNK + token)
        G = tl.load(gates + token)
        low = G
        if WIDE:
            low = tl.load(gates + GATE_LOW * CHUNK + token)
        if NEED_QK:
            if UPSTREAM:
                place = M_transposed + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j)
                tl.store(place, (new_do * (decays(G, low, False, True, WIDE) * scale)).to(kind))
            new_Y *= decays(G, low, True, True, WIDE) * beta[None, :]
        if UPSTREAM:
            do_new *= decays(G, low, False, False, WIDE) * scale
            if NEED_QK:
                tl.store(M + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j), do_new.to(kind))
        Y_new *= -decays(G, low, True, False, WIDE)
        if NEED_QK:
            place = E + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j)
            tl.store(place, (Y_new * beta[:, None] - new_Y).to(kind))
        if NEED_GATES:
            k += first_token.to(tl.int64) * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
            q += first_token.to(tl.int64) * q_token_stride + (head // GROUP).to(tl.int64) * q_head_stride
            Y_new *= products(k, k, rows, k_token_stride, k_token_stride, K, K_BLOCK, PRECISION)
            tl.store(strength_sums + program.to(tl.int64) * CHUNK + token, Y_v + tl.sum(Y_new, 1))
            Y_new *= beta[:, None]
            if UPSTREAM:
                do_new *= products(q, k, rows, q_token_stride, k_token_stride, K, K_BLOCK, PRECISION)
                Y_new += tl.where(i > j, do_new, 0.0)
            tl.store(passing_sums + program.to(tl.int64) * CHUNK + token, _sums_past(Y_new, kind, PRECISION))


@triton.jit
def _row_products(x, y, kind: tl.constexpr, PRECISION: tl.constexpr):
    """The rows of float32 x, rounded, times the rows of y, one each: the diagonal of x yᵀ.

    A product, though most of it is thrown away: y is in shared memory for others, and in registers there is no room.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    product = tl.dot(x.to(kind), tl.trans(y), input_precision=PRECISION)
    return tl.sum(tl.where(i == j, product, 0.0), 1)


@triton.jit
def _store_gradient(
    out, gradient, x, factors, first_token, rows, key_head, key_heads, first_key, token_stride, head_stride,
    NORMALIZED: tl.constexpr, K: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds and stores the gradient of a chunk's q or k, taken back through their normalisation where there is one."""
    # 0, and no constant: places with it are computed here, and not left in registers since the caller had the same.
    zero = tl.minimum(rows, 0)
    token = tl.arange(0, 64) + zero
    if NORMALIZED == 1:
        place = factors + first_token.to(tl.int64) * key_heads + key_head + token * key_heads
        x += first_token.to(tl.int64) * token_stride + key_head.to(tl.int64) * head_stride
        factor = tl.load(place, token < rows, other=0)
        y = token_tile(x, first_key + zero, rows, token_stride, K, K_BLOCK).to(tl.float32)
        along = tl.sum(y * gradient, 1)
        gradient = (gradient - y * along[:, None]) * factor[:, None]  # for one of x, y = factor·x
    key = first_key + tl.arange(0, K_BLOCK)[None, :]
    place = out + (first_token.to(tl.int64) * key_heads + key_head) * K_SIZE
    place += token[:, None] * (key_heads * K_SIZE) + key
    tl.store(place, gradient.to(out.dtype.element_ty), (token[:, None] < rows) & (key < K_SIZE))


@kernel(
    budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=128), targets=NVIDIA,
    numeric={"key_block": "K_BLOCK", "value_block": "V_BLOCK", "gradient_precision": "PRECISION"}, schedule=("STAGES",),
)  # fmt: skip
@triton.jit
def rule_gradients(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32,
    chunk_indices: Pointer.int32, states: Pointer16.element, dstates: Pointer16.element,
    new_values: Pointer16.element, Y: Pointer16.element, M: Pointer16.element, M_transposed: Pointer16.element,
    E: Pointer16.element, dq: PointerIf16.gradient, dk: PointerIf16.gradient, gate_sums: Pointer.float32,
    state_products: Pointer.float32, q_factors: Pointer.float32, k_factors: Pointer.float32, key_heads: Int32,
    columns: Int32, scale: Float32,
    q_token_stride: Int64x16, q_head_stride: Int64x16, k_token_stride: Int64x16, k_head_stride: Int64x16,
    do_token_stride: Int64x16, do_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, NEED_Q: tl.constexpr, NEED_K: tl.constexpr,
    NEED_GATES: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and key head, K_BLOCK columns of K: dq by one program, dk by the next.

        dq = Σ over value heads of scale·e^G ⊙ (do Sᵀ) + M k
        dk = Σ over value heads of Mᵀ q + (E + Eᵀ) k − β e^G ⊙ (Y Sᵀ) + e^{Γ−G} ⊙ (v' dS⁺ᵀ)

    Each leaves what dg and dβ need of it, sums over the block's columns, in `gate_sums` [chunks, H, K blocks, 3, 64]:
    of q·(scale e^G do Sᵀ), of k·(e^G Y Sᵀ), of k·(e^{Γ−G} v' dS⁺ᵀ); and ⟨S, dS⁺⟩ in `state_products` [chunks, H, K
    blocks].

    NORMALIZED is 1 where q and k are normalised copies and the block is all of K: gradients pass through the norms.
    """
    CHUNK: tl.constexpr = 64
    K_BLOCKS: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    program = tl.program_id(0)
    k_block = (program // 2) % K_BLOCKS
    key_head = (program // (2 * K_BLOCKS)) % key_heads
    slot = program // (2 * K_BLOCKS * key_heads)
    rows = tl.load(chunk_indices + slot.to(tl.int64) * INDEX_WIDTH + INDEX_COUNT)
    if rows == 0:
        return
    first_token = tl.load(chunk_indices + slot.to(tl.int64) * INDEX_WIDTH)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    first_key = k_block * K_BLOCK
    lane = (slot * key_heads + key_head) * GROUP
    k_chunk = k + first_token.to(tl.int64) * k_token_stride + key_head.to(tl.int64) * k_head_stride
    keys = token_tile(k_chunk, first_key, rows, k_token_stride, K, K_BLOCK)
    q_chunk = q + first_token.to(tl.int64) * q_token_stride + key_head.to(tl.int64) * q_head_stride
    queries = token_tile(q_chunk, first_key, rows, q_token_stride, K, K_BLOCK)
    gradient = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    if program % 2 == 0:
        if UPSTREAM and (NEED_Q or NEED_GATES):
            do += first_token.to(tl.int64) * do_token_stride + (key_head * GROUP).to(tl.int64) * do_head_stride
            for member in tl.range(0, GROUP, disable_licm=True):
                # Places are computed from it, each where it is used: registers are scarce.
                head_lane = (lane + member).to(tl.int64)
                do_S = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    do_tile = token_tile(do + member * do_head_stride, begin, rows, do_token_stride, V, V_BLOCK)
                    S_tile = _tile(states + head_lane * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    do_S = tl.dot(do_tile, S_tile, do_S, input_precision=PRECISION)
                from_start = tl.load(gates + head_lane * (GATE_ROWS * CHUNK) + GATE_FROM_START * CHUNK + token)
                do_S *= (from_start * scale)[:, None]
                gradient += do_S
                if NEED_GATES:
                    of_queries = _row_products(do_S, queries, kind, PRECISION)
                    tl.store(gate_sums + (head_lane * K_BLOCKS + k_block) * (GATE_SUMS * CHUNK) + token, of_queries)
                if NEED_Q:
                    matrix = tl.load(M + head_lane * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :]))
                    gradient += tl.dot(matrix, keys, input_precision=PRECISION)
        if NEED_Q:
            _store_gradient(
                dq, gradient, q, q_factors, first_token, rows, key_head, key_heads, first_key, q_token_stride,
                q_head_stride, NORMALIZED, K, K_SIZE, K_BLOCK,
            )  # fmt: skip
    else:
        if NEED_K or NEED_GATES:
            for member in tl.range(0, GROUP, disable_licm=True):
                head_lane = (lane + member).to(tl.int64)
                Y_S = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    Y_tile = _transposed_tile(Y + head_lane * (V * CHUNK), begin, V, V_BLOCK)
                    S_tile = _tile(states + head_lane * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    Y_S = tl.dot(Y_tile, S_tile, Y_S, input_precision=PRECISION)
                Y_S *= tl.load(gates + head_lane * (GATE_ROWS * CHUNK) + GATE_FROM_START * CHUNK + token)[:, None]
                strength = tl.load(gates + head_lane * (GATE_ROWS * CHUNK) + GATE_STRENGTH * CHUNK + token)
                gradient -= Y_S * strength[:, None]
                if NEED_GATES:
                    of_keys = _row_products(Y_S, keys, kind, PRECISION)
                    place = gate_sums + (head_lane * K_BLOCKS + k_block) * (GATE_SUMS * CHUNK)
                    tl.store(place + SUM_KEYS * CHUNK + token, of_keys)
                new_dS = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                S_dS = tl.zeros([V_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    new_tile = _transposed_tile(new_values + head_lane * (V * CHUNK), begin, V, V_BLOCK)
                    dS_tile = _tile(dstates + head_lane * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    new_dS = tl.dot(new_tile, dS_tile, new_dS, input_precision=PRECISION)
                    if NEED_GATES:
                        S_tile = _tile(states + head_lane * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                        S_dS += tl.sum(S_tile.to(tl.float32) * dS_tile.to(tl.float32), 1)
                new_dS *= tl.load(gates + head_lane * (GATE_ROWS * CHUNK) + GATE_TO_END * CHUNK + token)[:, None]
                gradient += new_dS
                if NEED_GATES:
                    of_keys = _row_products(new_dS, keys, kind, PRECISION)
                    place = gate_sums + (head_lane * K_BLOCKS + k_block) * (GATE_SUMS * CHUNK)
                    tl.store(place + SUM_KEYS_TO_END * CHUNK + token, of_keys)
                    tl.store(state_products + head_lane * K_BLOCKS + k_block, tl.sum(S_dS, 0))
                if NEED_K:
                    matrix = tl.load(E + head_lane * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :]))
                    gradient += tl.dot(matrix, keys, input_precision=PRECISION)
                    if UPSTREAM:
                        place = M_transposed + head_lane * (CHUNK * CHUNK)
                        matrix = tl.load(place + (token[:, None] * CHUNK + token[None, :]))
                        gradient += tl.dot(matrix, queries, input_precision=PRECISION)
        if NEED_K:
            _store_gradient(
                dk, gradient, k, k_factors, first_token, rows, key_head, key_heads, first_key, k_token_stride,
                k_head_stride, NORMALIZED, K, K_SIZE, K_BLOCK,
            )  # fmt: skip


@kernel(budget=Budget(registers=128, shared_bytes=16384), targets=NVIDIA)
@triton.jit
def rule_gate_gradients(
    gates: Pointer.float32, chunk_indices: Pointer.int32, gate_sums: Pointer.float32, state_products: Pointer.float32,
    passing_sums: Pointer.float32, strength_sums: Pointer.float32, dg: Pointer.gate, dbeta: Pointer.strength,
    heads: Int32,
    K_BLOCKS: tl.constexpr, UPSTREAM: tl.constexpr, NEED_G: tl.constexpr, NEED_BETA: tl.constexpr,
):  # fmt: skip
    """dg and dβ of one chunk and head."""
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    slot = (program // heads).to(tl.int64)
    rows = tl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if rows == 0:
        return
    first_token = tl.load(chunk_indices + slot * INDEX_WIDTH).to(tl.int64)
    token = tl.arange(0, CHUNK)
    place = first_token * heads + program % heads + token * heads
    lane = program.to(tl.int64)
    gate_sums += lane * (K_BLOCKS * GATE_SUMS * CHUNK) + token
    gates += lane * (GATE_ROWS * CHUNK)
    zeros = tl.zeros([CHUNK], tl.float32)
    since_query, of_key, until = zeros, zeros, zeros
    through_state = tl.zeros([], tl.float32)
    for block in tl.static_range(K_BLOCKS):
        block_sums = gate_sums + block * (GATE_SUMS * CHUNK)
        if UPSTREAM:
            since_query += tl.load(block_sums)
        of_key += tl.load(block_sums + SUM_KEYS * CHUNK)
        until += tl.load(block_sums + (SUM_KEYS_TO_END * CHUNK - 1), token > 0, other=0)  # of the token before
        through_state += tl.load(state_products + lane * K_BLOCKS + block)
    if NEED_BETA:
        gradient = tl.load(strength_sums + lane * CHUNK + token) - of_key
        tl.store(dbeta + place, gradient.to(dbeta.dtype.element_ty), token < rows)
    if NEED_G:
        strength = tl.load(gates + GATE_STRENGTH * CHUNK + token)
        passing = tl.load(passing_sums + lane * CHUNK + token)
        gradient = passing + tl.cumsum(since_query - strength * of_key, reverse=True)
        gradient += tl.cumsum(until) + through_state * tl.load(gates + GATE_DECAY)
        tl.store(dg + place, gradient.to(dg.dtype.element_ty), token < rows)


# ------------------------------------------------------------------------------------------------ launches


def _key_block(shape: Shape) -> int:
    return min(32 if shape.is_float32 else 128, next_power_of_two(shape.K))


def key_blocks(shape: Shape) -> int:
    """Blocks of K that gradients are computed in."""
    return -(-pad_to_16(shape.K) // _key_block(shape))


def sum_warps(shape: Shape) -> int:
    """Warps of the kernels that add up along rows, in an order that their layout gives: by the dtype alone."""
    return 8 if shape.is_float32 else 4


def gradient_regions(shape: Shape, need: int, normalize: bool) -> dict[str, tuple[torch.dtype, int]]:
    """M, its transpose and E [chunks, H, 64, 64]; what dg and dβ are computed from; and, where q and k are normalised
    and their rows cut, the gradients of what was normalised, in float32."""
    regions: dict[str, tuple[torch.dtype, int]] = {}
    if need & (NEED_Q | NEED_K):
        regions |= dict.fromkeys(("M", "M_transposed", "E"), (shape.element, shape.lanes * CHUNK * CHUNK))
    if need & (NEED_G | NEED_BETA):
        blocks = shape.lanes * key_blocks(shape)
        regions["gate_sums"] = (torch.float32, blocks * GATE_SUMS.value * CHUNK)
        regions["state_products"] = (torch.float32, blocks)
        regions |= dict.fromkeys(("passing_sums", "strength_sums"), (torch.float32, shape.lanes * CHUNK))
    if normalize and key_blocks(shape) > 1:
        for bit, name in ((NEED_Q, "dq_normalized"), (NEED_K, "dk_normalized")):
            if need & bit:
                regions[name] = (torch.float32, shape.tokens * shape.key_heads * shape.K)
    return regions


def bind_matrices(setup: Setup, shape: Shape, upstream: bool, need: int) -> Callable[..., None]:
    """M, its transpose and E + Eᵀ; dv; what dg and dβ have of them: `launch(memory, q, k, v, do, scale, dv)`."""
    stages = setup.schedule["matrix_stages"]
    matrices = setup.either(
        rule_matrices, element=shape.element, V_SIZE=shape.V, K_BLOCK=_key_block(shape),
        V_BLOCK=min(16 if shape.is_float32 else 32, next_power_of_two(shape.V)), STAGES=stages, UPSTREAM=upstream,
        NEED_QK=bool(need & (NEED_Q | NEED_K)), NEED_V=bool(need & NEED_V),
        NEED_GATES=bool(need & (NEED_G | NEED_BETA)), WIDE=shape.is_float32, PRECISION=precision_of(shape),
        num_warps=sum_warps(shape), num_stages=stages, **shape.constants,
    )  # fmt: skip
    grid, columns = (shape.lanes,), pad_to_16(shape.V)

    def launch(
        memory: Memory, q: TokenRows, k: TokenRows, v: TokenRows, do: TokenRows | None, scale: float, dv: Tensor
    ) -> None:  # fmt: skip
        gradient, absent = do or v, memory["gates"]  # stands for a pointer that no variant reads
        matrices[is_aligned(dv)].launch(
            grid, q=q.start, k=k.start, v=v.start, do=gradient.start, gates=memory["gates"],
            chunk_indices=memory["chunk_indices"], new_values=memory["new_values"], Y=memory["Y"],
            M=memory.get("M", absent), M_transposed=memory.get("M_transposed", absent), E=memory.get("E", absent),
            dv=dv, passing_sums=memory.get("passing_sums", absent), strength_sums=memory.get("strength_sums", absent),
            key_heads=shape.key_heads, columns=columns, scale=scale, q_token_stride=q.token_stride,
            q_head_stride=q.head_stride, k_token_stride=k.token_stride, k_head_stride=k.head_stride,
            v_token_stride=v.token_stride, v_head_stride=v.head_stride, do_token_stride=gradient.token_stride,
            do_head_stride=gradient.head_stride,
        )  # fmt: skip

    return launch


def bind_gradients(setup: Setup, shape: Shape, upstream: bool, normalize: bool, need: int) -> Callable[..., None]:
    """dq and dk, as needed, and the sums for dg and dβ: `launch(memory, q, k, do, scale, dq, dk)`."""
    blocks = key_blocks(shape)
    normalized = (BY_BLOCKS if blocks > 1 else BY_ROWS) if normalize else 0
    by_blocks = normalized == BY_BLOCKS
    gradients = {}
    for aligned in (True, False):
        stages = setup.schedule["gradient_stages"]
        if normalized == BY_ROWS:  # which leaves few registers, and places without alignment take more of them
            stages = min(stages, 2 if aligned else 1)
        gradients[aligned] = setup.kernel(
            rule_gradients, element=shape.element, gradient=torch.float32 if by_blocks else shape.element,
            K_SIZE=shape.K, K_BLOCK=_key_block(shape),
            V_BLOCK=min(16 if shape.is_float32 or shape.K > 128 else 32, next_power_of_two(shape.V)), STAGES=stages,
            UPSTREAM=upstream, NEED_Q=bool(need & NEED_Q), NEED_K=bool(need & NEED_K),
            NEED_GATES=bool(need & (NEED_G | NEED_BETA)), NORMALIZED=normalized, PRECISION=precision_of(shape),
            aligned=aligned, num_warps=sum_warps(shape), num_stages=stages, **shape.constants,
        )  # fmt: skip
    unnormalize = bind_unnormalize(setup, shape) if by_blocks and need & (NEED_Q | NEED_K) else None
    grid, columns = (2 * blocks * shape.chunks * shape.key_heads,), pad_to_16(shape.V)

    def launch(
        memory: Memory, q: TokenRows, k: TokenRows, do: TokenRows | None, scale: float, dq: Tensor, dk: Tensor
    ) -> None:  # fmt: skip
        gradient, absent = do or q, memory["gates"]  # stands for a pointer that no variant reads
        gradients[is_aligned(dq, dk)].launch(
            grid, q=q.start, k=k.start, do=gradient.start, gates=memory["gates"],
            chunk_indices=memory["chunk_indices"], states=memory["states"], dstates=memory["dstates"],
            new_values=memory["new_values"], Y=memory["Y"], M=memory.get("M", absent),
            M_transposed=memory.get("M_transposed", absent), E=memory.get("E", absent),
            dq=memory.get("dq_normalized", dq), dk=memory.get("dk_normalized", dk),
            gate_sums=memory.get("gate_sums", absent), state_products=memory.get("state_products", absent),
            q_factors=memory.get("q_factors", absent), k_factors=memory.get("k_factors", absent),
            key_heads=shape.key_heads, columns=columns, scale=scale, q_token_stride=q.token_stride,
            q_head_stride=q.head_stride, k_token_stride=k.token_stride, k_head_stride=k.head_stride,
            do_token_stride=gradient.token_stride, do_head_stride=gradient.head_stride,
        )  # fmt: skip
        if unnormalize and need & NEED_Q:
            unnormalize(memory, "q", q, dq)
        if unnormalize and need & NEED_K:
            unnormalize(memory, "k", k, dk)

    return launch


def bind_gate_gradients(setup: Setup, shape: Shape, upstream: bool, need: int) -> Callable[..., None]:
    """dg and dβ, as needed: `launch(memory, dg, dbeta)`."""
    gates = setup.kernel(
        rule_gate_gradients, gate=shape.gate, strength=shape.strength, K_BLOCKS=key_blocks(shape), UPSTREAM=upstream,
        NEED_G=bool(need & NEED_G), NEED_BETA=bool(need & NEED_BETA), num_warps=2,
    )  # fmt: skip
    grid = (shape.lanes,)

    def launch(memory: Memory, dg: Tensor, dbeta: Tensor) -> None:
        gates.launch(
            grid, gates=memory["gates"], chunk_indices=memory["chunk_indices"], gate_sums=memory["gate_sums"],
            state_products=memory["state_products"], passing_sums=memory["passing_sums"],
            strength_sums=memory["strength_sums"], dg=dg, dbeta=dbeta, heads=shape.heads,
        )  # fmt: skip

    return launch
