"""The inverse of each chunk's matrix, T = (I + β ⊙ (k kᵀ ⊙ D°))⁻¹, and the scores P = scale·(q kᵀ ⊙ D) within a chunk.

One program per chunk and key head. T is stored without its diagonal of ones: what the ones multiply is added in
float32.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from adjoint.core.kernels import NVIDIA, Budget, Float32, Int32, Int64x16, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_LOW, GATE_ROWS, GATE_STRENGTH

_BUDGET = Budget(registers=255, shared_bytes=98304)


@triton.jit
def _product(a, b, WIDE: tl.constexpr):
    """a·b of small float32 matrices; in 16-bit types as three products of halves, 2^-16 of the terms."""
    if WIDE:
        return tl.dot(a, b, input_precision="ieee")
    a_high = a.to(tl.bfloat16)
    b_high = b.to(tl.bfloat16)
    a_low = (a - a_high.to(tl.float32)).to(tl.bfloat16)
    b_low = (b - b_high.to(tl.float32)).to(tl.bfloat16)
    return tl.dot(a_high, b_high) + (tl.dot(a_high, b_low) + tl.dot(a_low, b_high))


@triton.jit
def fits(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """index < SIZE, for indices of whole blocks: known without a comparison where blocks divide the size."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    return index < SIZE


@triton.jit
def _key_rows(x, token, count, token_stride, column, K: tl.constexpr, K_STEP: tl.constexpr):
    """Some columns of rows of tokens, [..., K_STEP]; zeros past the end of the sequence."""
    token = tl.expand_dims(token, -1)
    inside = (token < count) & fits(column, K, K_STEP)
    return tl.load(x + token * token_stride.to(tl.int32) + column, inside, other=0)


@triton.jit
def _chunk_matrix(gram, gates, i, j, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """β_i·gram·e^{G_i−G_j} where i > j, else 0."""
    between = tl.load(gates + i) - tl.load(gates + j)
    if WIDE:
        between += tl.load(gates + GATE_LOW * CHUNK + i) - tl.load(gates + GATE_LOW * CHUNK + j)
    strength = tl.load(gates + GATE_STRENGTH * CHUNK + i)
    past = i > j
    return tl.where(past, strength * (gram * tl.exp(tl.where(past, between, 0.0))), 0.0)


@triton.jit
def store_parts(T, value, i, j, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    """A matrix in one number of the storage type, or in two that add up to it."""
    kind = T.dtype.element_ty
    place = T + i * CHUNK + j
    rounded = value.to(kind)
    tl.store(place, rounded)
    if PARTS == 2:
        tl.store(place + CHUNK * CHUNK, (value - rounded.to(tl.float32)).to(kind))


@kernel(budget=_BUDGET, targets=NVIDIA, numeric={"parts": "PARTS", "inverse_step": "K_STEP", "precision": "PRECISION"})
@triton.jit
def rule_chunk_inverse(
    k: Pointer16.element, gates: Pointer16.float32, chunk_indices: Pointer.int32, T: Pointer16.element,
    key_heads: Int32, k_token_stride: Int64x16, k_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, K_STEP: tl.constexpr, PARTS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T − I of every value head of a key head.

    Diagonal blocks of 2, then pairs of blocks into one of twice the size, up to 64: the inverse of [[X, 0], [Z, Y]] is
    [[X⁻¹, 0], [−Y⁻¹ Z X⁻¹, Y⁻¹]]. Up to 16 the four blocks of the diagonal are worked on together, and a pair of blocks
    as T − T·Z·T, where T holds the smaller inverses and Z what is between them.
    """
    CHUNK: tl.constexpr = 64
    slot = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = tl.program_id(0) % key_heads
    count = tl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if count == 0:
        return
    first = tl.load(chunk_indices + slot * INDEX_WIDTH)
    k += first.to(tl.int64) * k_token_stride + key_head.to(tl.int64) * k_head_stride
    lane = tl.arange(0, 16)
    four = tl.arange(0, 4)[:, None] * 16 + lane[None, :]  # rows of the diagonal blocks
    two = tl.arange(0, 2)[:, None] * 32 + lane[None, :]  # rows above the middle of each half
    half = tl.arange(0, 32)
    gram_16 = tl.zeros([4, 16, 16], tl.float32)
    gram_32 = tl.zeros([2, 16, 16], tl.float32)
    gram_64 = tl.zeros([32, 32], tl.float32)
    for start in range(0, K_BLOCK, K_STEP):
        column = start + tl.arange(0, K_STEP)
        k_four = _key_rows(k, four, count, k_token_stride, column[None, None, :], K, K_STEP)
        k_upper = _key_rows(k, two, count, k_token_stride, column[None, None, :], K, K_STEP)
        k_lower = _key_rows(k, two + 16, count, k_token_stride, column[None, None, :], K, K_STEP)
        k_first = _key_rows(k, half, count, k_token_stride, column[None, :], K, K_STEP)
        k_second = _key_rows(k, half + 32, count, k_token_stride, column[None, :], K, K_STEP)
        gram_16 += tl.dot(k_four, tl.permute(k_four, (0, 2, 1)), input_precision=PRECISION)
        gram_32 += tl.dot(k_lower, tl.permute(k_upper, (0, 2, 1)), input_precision=PRECISION)
        gram_64 += tl.dot(k_second, tl.trans(k_first), input_precision=PRECISION)
    i, j = lane[None, :, None], lane[None, None, :]
    i_16, j_16 = four[:, :, None], four[:, None, :]
    i_32, j_32 = two[:, :, None] + 16, two[:, None, :]
    i_64, j_64 = half[:, None] + 32, half[None, :]
    for member in range(GROUP):
        head = slot * (key_heads * GROUP) + key_head * GROUP + member
        head_gates = gates + head * (GATE_ROWS * CHUNK)
        A = _chunk_matrix(gram_16, head_gates, i_16, j_16, CHUNK, WIDE)
        # Blocks of 2: the inverse of [[1, 0], [a, 1]] is [[1, 0], [−a, 1]].
        inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -A, 0.0))
        for level in tl.static_range(1, 4):  # blocks of 2^level are there
            between = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), A, 0.0)
            inverse -= _product(inverse, _product(between, inverse, WIDE), WIDE)
        upper, lower = tl.split(tl.permute(tl.reshape(inverse, (2, 2, 16, 16)), (0, 2, 3, 1)))
        A = _chunk_matrix(gram_32, head_gates, i_32, j_32, CHUNK, WIDE)
        corner_32 = -_product(lower, _product(A, upper, WIDE), WIDE)
        # The two inverses of size 32, from their blocks: [half, row of blocks, 16, column of blocks, 16].
        block_row = tl.arange(0, 2)[None, :, None, None, None]
        block_column = tl.arange(0, 2)[None, None, None, :, None]
        diagonal = tl.reshape(inverse, (2, 2, 16, 16))[:, :, :, None, :]
        corner = corner_32[:, None, :, None, :]
        blocks_32 = tl.where(block_row == block_column, diagonal, tl.where(block_row > block_column, corner, 0.0))
        upper_32, lower_32 = tl.split(tl.permute(tl.reshape(blocks_32, (2, 32, 32)), (1, 2, 0)))
        A = _chunk_matrix(gram_64, head_gates, i_64, j_64, CHUNK, WIDE)
        corner_64 = -_product(lower_32, _product(A, upper_32, WIDE), WIDE)
        out = T + head * (PARTS * CHUNK * CHUNK)
        store_parts(out, tl.where(i == j, 0.0, inverse), i_16, j_16, PARTS, CHUNK)
        store_parts(out, corner_32, i_32, j_32, PARTS, CHUNK)
        store_parts(out, corner_64, i_64, j_64, PARTS, CHUNK)
        store_parts(out, tl.zeros([2, 16, 16], tl.float32), i_32 - 16, j_32 + 16, PARTS, CHUNK)
        store_parts(out, tl.zeros([32, 32], tl.float32), i_64 - 32, j_64 + 32, PARTS, CHUNK)


@kernel(budget=_BUDGET, targets=("sm_90",), numeric=("SCORE_PARTS", "PRECISION"))  # plans for others have `rule_output`
@triton.jit
def rule_scores(
    q: Pointer16.element, k: Pointer16.element, gates: Pointer16.float32, chunk_indices: Pointer.int32,
    P: Pointer16.element, key_heads: Int32, scale: Float32, q_token_stride: Int64x16, q_head_stride: Int64x16,
    k_token_stride: Int64x16, k_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, SCORE_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P = scale·(q kᵀ) ⊙ D of every value head of a key head, 0 above the diagonal; for a scan that writes o itself."""
    CHUNK: tl.constexpr = 64
    slot = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = tl.program_id(0) % key_heads
    count = tl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if count == 0:
        return
    first = tl.load(chunk_indices + slot * INDEX_WIDTH).to(tl.int64)
    row = tl.arange(0, CHUNK)
    column = tl.arange(0, K_BLOCK)
    inside = (row < count)[:, None] & fits(column, K, K_BLOCK)[None, :]
    q += first * q_token_stride + key_head.to(tl.int64) * q_head_stride
    k += first * k_token_stride + key_head.to(tl.int64) * k_head_stride
    queries = tl.load(q + row[:, None] * q_token_stride.to(tl.int32) + column[None, :], inside, other=0)
    keys = tl.load(k + row[:, None] * k_token_stride.to(tl.int32) + column[None, :], inside, other=0)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    past = row[:, None] >= row[None, :]
    lane = (slot * key_heads + key_head) * GROUP
    gates += lane * (GATE_ROWS * CHUNK)
    P += lane * (SCORE_PARTS * CHUNK * CHUNK)
    for _ in range(GROUP):
        G = tl.load(gates + row)
        decay = tl.exp(tl.where(past, G[:, None] - G[None, :], 0.0))
        store_parts(P, tl.where(past, scores * decay, 0.0), row[:, None], row[None, :], SCORE_PARTS, CHUNK)
        gates += GATE_ROWS * CHUNK
        P += SCORE_PARTS * CHUNK * CHUNK


def inverse_region(shape: Shape, parts: int) -> dict[str, tuple[torch.dtype, int]]:
    """T [chunks, H, parts, 64, 64]."""
    return {"T": (shape.element, shape.lanes * parts * CHUNK * CHUNK)}


def score_region(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """P [chunks, H, 64, 64]."""
    return {"P": (shape.element, shape.lanes * CHUNK * CHUNK)}


def bind_chunk_inverse(setup: Setup, shape: Shape, parts: int) -> Callable[..., None]:
    """T − I of every chunk and value head, an element in so many `parts`: `launch(memory, k)`."""
    block = next_power_of_two(shape.K)
    inverse = setup.kernel(
        rule_chunk_inverse, element=shape.element, GROUP=shape.group, K=pad_to_16(shape.K), K_BLOCK=block,
        K_STEP=min(block, 32 if shape.is_float32 else 128), PARTS=parts, WIDE=shape.is_float32, PRECISION="ieee",
        num_warps=setup.schedule["inverse_warps"],
    )  # fmt: skip
    grid = (shape.chunks * shape.key_heads,)

    def launch(memory: Memory, k: TokenRows) -> None:
        inverse.launch(
            grid, k=k.start, gates=memory["gates"], chunk_indices=memory["chunk_indices"], T=memory["T"],
            key_heads=shape.key_heads, k_token_stride=k.token_stride, k_head_stride=k.head_stride,
        )  # fmt: skip

    return launch


def bind_scores(setup: Setup, shape: Shape) -> Callable[..., None]:
    """P of every chunk and value head: `launch(memory, q, k, scale)`."""
    scores = setup.kernel(
        rule_scores, element=shape.element, GROUP=shape.group, K=pad_to_16(shape.K),
        K_BLOCK=next_power_of_two(shape.K), SCORE_PARTS=1, PRECISION="ieee",
    )  # fmt: skip
    grid = (shape.chunks * shape.key_heads,)

    def launch(memory: Memory, q: TokenRows, k: TokenRows, scale: float) -> None:
        scores.launch(
            grid, q=q.start, k=k.start, gates=memory["gates"], chunk_indices=memory["chunk_indices"], P=memory["P"],
            key_heads=shape.key_heads, scale=scale, q_token_stride=q.token_stride, q_head_stride=q.head_stride,
            k_token_stride=k.token_stride, k_head_stride=k.head_stride,
        )  # fmt: skip

    return launch
