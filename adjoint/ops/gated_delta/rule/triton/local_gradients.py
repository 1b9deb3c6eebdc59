"""The part of the adjoint that each chunk computes by itself, and the tiles that the kernels of the backward share.

Notation of `eager.py`, P = scale·(q kᵀ ⊙ D). The backward computes the forward's chunks again and then

    local_gradients  W = Tᵀ (e^{Γ−G} ⊙ k),  Tᵀ Pᵀ do                       one program per chunk and key head
    reverse_scan     Y = Tᵀ Pᵀ do + W dS⁺                                  one per sequence or segment, value head and
                     dS = e^Γ dS⁺ + qᵀ (scale·e^G ⊙ do) − kᵀ (β e^G ⊙ Y)   block of V
    matrices         M, Mᵀ, E + Eᵀ and dv                                  one per chunk and value head
    gradients        dq, dk and the sums of dβ and dg                      two per chunk, key head and block of K
    gate_gradients   dβ and dg from their sums                             one per chunk and value head

Rounded to the storage type, where that is not float32: W, Tᵀ Pᵀ do; β·e^G·Y before its product; M and E; and what one
kernel leaves in memory for the next, S, v', Y and dS⁺. scale·e^G·do meets q in two parts: rounded, it would be nine
tenths of the error of the initial states' gradient. So does dS⁺ meet W, for dv and dβ where the gradient of the final
state is large. Sums are float32. One element has one writer, and every sum an order that K, V and the types fix.

A tile's transposed copy comes from the way it is read, or is the right operand: never `tl.dot(tl.trans(a), b)`, which
compilers for Hopper have got wrong in just this place.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from adjoint.core.kernels import NVIDIA, Budget, Float32, Int32, Int64x16, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, clamp_tile, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import fits
from adjoint.ops.gated_delta.rule.triton.gates import GATE_LOW, GATE_ROWS, GATE_TO_END


@triton.jit
def token_tile(x, first, rows, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns, from `first` on, of the rows of 64 tokens of which `rows` are there."""
    token = tl.arange(0, 64)[:, None]
    column = first + tl.arange(0, BLOCK)[None, :]
    place = x + (token * token_stride.to(tl.int32) + column)
    return tl.load(place, (token < rows) & fits(column, SIZE, BLOCK), other=0)


@triton.jit
def decays(G, low, STRICT: tl.constexpr, TRANSPOSED: tl.constexpr, WIDE: tl.constexpr):
    """e^{G_i−G_j} for i ≥ j, or i > j, else 0; TRANSPOSED: its transpose. `low` is what G lost in rounding."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    between = G[:, None] - G[None, :]
    if WIDE:
        between += low[:, None] - low[None, :]
    if TRANSPOSED:
        between = -between
        past = j > i if STRICT else j >= i
    else:
        past = i > j if STRICT else i >= j
    return tl.exp(tl.where(past, between, float("-inf")))


@triton.jit
def _add_product(
    left, right, begin, rows, left_stride, right_stride, total, K: tl.constexpr, K_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what K_BLOCK columns from `begin` on give."""
    a = token_tile(left, begin, rows, left_stride, K, K_BLOCK)
    b = token_tile(right, begin, rows, right_stride, K, K_BLOCK)
    return tl.dot(a, tl.trans(b), total, input_precision=PRECISION)


@triton.jit
def products(
    left, right, rows, left_stride, right_stride, K: tl.constexpr, K_BLOCK: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Every row of one tensor of keys or queries times every row of another."""
    total = tl.zeros([64, 64], tl.float32)
    if left.dtype.element_ty == tl.float32:  # rolled: float32 operands have registers for one step at a time
        for begin in tl.range(0, K, K_BLOCK):
            total = _add_product(left, right, begin, rows, left_stride, right_stride, total, K, K_BLOCK, PRECISION)
    else:
        for begin in tl.static_range(0, K, K_BLOCK):
            total = _add_product(left, right, begin, rows, left_stride, right_stride, total, K, K_BLOCK, PRECISION)
    return total


@kernel(
    budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=1280), targets=NVIDIA,
    numeric={"parts": "PARTS", "local_key_block": "K_BLOCK", "gradient_precision": "PRECISION"},
    schedule=("V_BLOCK", "STAGES"),
)  # fmt: skip
@triton.jit
def rule_local_gradients(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32,
    chunk_indices: Pointer.int32, T: Pointer16.element, W: Pointer16.element, local_gradients: Pointer16.element,
    key_heads: Int32, scale: Float32, q_token_stride: Int64x16, q_head_stride: Int64x16, k_token_stride: Int64x16,
    k_head_stride: Int64x16, do_token_stride: Int64x16, do_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What of Y does not go from chunk to chunk, for every value head of a key head.

        W = Tᵀ (e^{Γ−G} ⊙ k) [64, K],  local_gradients = Tᵀ Pᵀ do, transposed [V, 64]

    Matrices of the chunk, T, P and P T, are two numbers of the storage type each.
    """
    CHUNK: tl.constexpr = 64
    slot = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    rows = tl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if rows == 0:
        return
    first_token = tl.load(chunk_indices + slot * INDEX_WIDTH).to(tl.int64)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    i = token[:, None]
    j = token[None, :]
    q += first_token * q_token_stride + key_head * q_head_stride
    k += first_token * k_token_stride + key_head * k_head_stride
    do += first_token * do_token_stride + key_head * GROUP * do_head_stride
    lane = (slot * key_heads + key_head) * GROUP
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (PARTS * CHUNK * CHUNK)
    W += lane * (CHUNK * K)
    local_gradients += lane * (V * CHUNK)
    if UPSTREAM:
        qk = products(q, k, rows, q_token_stride, k_token_stride, K, K_BLOCK, PRECISION) * scale
    if K <= K_BLOCK:
        keys = token_tile(k, 0, rows, k_token_stride, K, K_BLOCK)
    for member in tl.range(0, GROUP, num_stages=STAGES, disable_licm=True):
        head_gates = gates + member * (GATE_ROWS * CHUNK)
        head_T = T + member * (PARTS * CHUNK * CHUNK)
        T_transposed = tl.load(head_T + (j * CHUNK + i)).to(tl.float32)
        if PARTS == 2:
            T_transposed += tl.load(head_T + CHUNK * CHUNK + (j * CHUNK + i)).to(tl.float32)
        T_transposed = tl.where(i == j, 1.0, T_transposed) * tl.load(head_gates + GATE_TO_END * CHUNK + token)[None, :]
        high = T_transposed.to(kind)
        rest = (T_transposed - high.to(tl.float32)).to(kind)
        for begin in tl.static_range(0, K, K_BLOCK):
            if K > K_BLOCK:
                keys = token_tile(k, begin, rows, k_token_stride, K, K_BLOCK)
            of_keys = tl.dot(high, keys, input_precision=PRECISION)
            if not WIDE:
                of_keys += tl.dot(rest, keys, input_precision=PRECISION)
            key = begin + tl.arange(0, K_BLOCK)[None, :]
            place = W + member * (CHUNK * K) + (i * K + key)
            tl.store(place, of_keys.to(kind), fits(key, K, K_BLOCK))
        if UPSTREAM:
            G = tl.load(head_gates + token)
            low = G
            if WIDE:
                low = tl.load(head_gates + GATE_LOW * CHUNK + token)
            P = qk * decays(G, low, False, False, WIDE)
            inverse = tl.load(head_T + (i * CHUNK + j))
            high = P.to(kind)
            P_T = tl.dot(high, inverse, P, input_precision=PRECISION)
            if not WIDE:
                P_T += tl.dot((P - high.to(tl.float32)).to(kind), inverse, input_precision=PRECISION)
            if PARTS == 2:
                P_T += tl.dot(high, tl.load(head_T + CHUNK * CHUNK + (i * CHUNK + j)), input_precision=PRECISION)
            high = P_T.to(kind)
            rest = (P_T - high.to(tl.float32)).to(kind)
            for begin in tl.static_range(0, V, V_BLOCK):
                column = begin + tl.arange(0, V_BLOCK)[:, None]
                place = do + member * do_head_stride + (j * do_token_stride.to(tl.int32) + column)
                upstream = tl.load(place, (j < rows) & (column < V), other=0)
                local_tile = tl.dot(upstream, high, input_precision=PRECISION)
                if not WIDE:
                    local_tile += tl.dot(upstream, rest, input_precision=PRECISION)
                stored = (column < V) & (j < CHUNK)
                tl.store(local_gradients + member * (V * CHUNK) + (column * CHUNK + j), local_tile.to(kind), stored)


def local_regions(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """W [chunks, H, 64, K], and Tᵀ Pᵀ do transposed, [chunks, H, V, 64]."""
    K, V = pad_to_16(shape.K), pad_to_16(shape.V)
    return {
        "W": (shape.element, shape.lanes * CHUNK * K),
        "local_gradients": (shape.element, shape.lanes * V * CHUNK),
    }


def precision_of(shape: Shape) -> str:
    """The precision of gradients' products, which 16-bit operands do not know."""
    return "tf32x3" if shape.is_float32 else "ieee"


def bind_local_gradients(setup: Setup, shape: Shape, parts: int, upstream: bool) -> Callable[..., None]:
    """W and, with an `upstream` gradient of the outputs, the local gradients of every chunk and value head, from T in
    so many parts: `launch(memory, q, k, do, scale)`."""
    schedule, keys = setup.schedule, 32 if shape.is_float32 else 64 if shape.K > 128 else 128
    stages = schedule["local_stages"]
    local = setup.kernel(
        rule_local_gradients, element=shape.element, K_BLOCK=min(keys, next_power_of_two(shape.K)),
        V_BLOCK=clamp_tile(schedule["local_block"], shape.V), PARTS=parts, STAGES=stages, UPSTREAM=upstream,
        WIDE=shape.is_float32, PRECISION=precision_of(shape), num_warps=schedule["local_warps"], num_stages=stages,
        **shape.constants,
    )  # fmt: skip
    grid = (shape.chunks * shape.key_heads,)

    def launch(memory: Memory, q: TokenRows, k: TokenRows, do: TokenRows | None, scale: float) -> None:
        gradient = do or q
        local.launch(
            grid, q=q.start, k=k.start, do=gradient.start, gates=memory["gates"],
            chunk_indices=memory["chunk_indices"], T=memory["T"], W=memory["W"],
            local_gradients=memory["local_gradients"], key_heads=shape.key_heads, scale=scale,
            q_token_stride=q.token_stride, q_head_stride=q.head_stride, k_token_stride=k.token_stride,
            k_head_stride=k.head_stride, do_token_stride=gradient.token_stride, do_head_stride=gradient.head_stride,
        )  # fmt: skip

    return launch
