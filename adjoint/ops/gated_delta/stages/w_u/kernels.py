"""Triton kernels of `recompute_w_u`: w = T·(β·e^G·k) and u = T·(β·v), chunk by chunk, their adjoint, and launches.

One program has a chunk of one value head. Programs that run at the same time have neighbouring heads of one chunk:
their rows lie side by side in memory, and keys that several value heads share are read from cache.

Packed sequences: chunks are counted from each sequence's start, so sequence n has the slots from
⌊start / CHUNK⌋ + n on, at most one more than its share of the tokens: ⌊tokens / CHUNK⌋ + n slots are enough, known
before any length is, and grids need no waiting for the device. A slot without tokens ends at once.

A product's terms are added as a matrix instruction adds them, in an order that no schedule and no layout changes: T is
one tile. Sums along a row are halved until one number is left: the first half plus the second.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import NVIDIA, Budget, Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Launch, Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.device.row_tiles import halves
from adjoint.ops.gated_delta.arguments import SEQUENCES_OUT_OF_ORDER
from adjoint.ops.gated_delta.stages.w_u.guarantee import NEED_BETA, NEED_DECAY, NEED_K, NEED_T, NEED_V, TF32, parts_of

# --------------------------------------------------------------------------------------- where chunks lie


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@kernel(budget=Budget(registers=128, shared_bytes=4096), targets=NVIDIA, schedule=("BLOCK",))
@triton.jit
def gated_delta_bounds(
    cu_seqlens: Pointer.index, bounds: Pointer.int64, status_word: Pointer.int64, fault: Int32, count: Int32,
    time: Int64, stride: Int64, REPORT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """bounds = 0, cu_seqlens in order and within the tokens, time. REPORT: what is out of order is recorded."""
    reached = time * 0
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < count
        offset = place.to(tl.int64) * stride
        bound = tl.load(cu_seqlens + offset, inside, other=0).to(tl.int64)
        if REPORT:
            before = tl.load(cu_seqlens + offset - stride, inside & (place > 0), other=0).to(tl.int64)
            wrong = (bound < before) | (bound < 0) | (bound > time)
            wrong = wrong | ((place == 0) & (bound != 0)) | ((place == count - 1) & (bound != time))
            record(status_word, fault, place, bound, inside & wrong)
        bound = tl.where(inside, tl.minimum(tl.maximum(bound, 0), time), 0)
        upto = tl.maximum(tl.associative_scan(bound, 0, larger), reached)
        tl.store(bounds + 1 + place, upto, inside)
        reached = tl.maximum(reached, tl.max(bound, 0))
    one = tl.arange(0, 1)
    tl.store(bounds + one, one.to(tl.int64))
    tl.store(bounds + count + 1 + one, one + time)


@triton.jit
def chunk_of_slot(slot, bounds, time, stretches, steps, row_chunks, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Row of the batch, first token in it, number of tokens, and how many of them are of a sequence: all, or none."""
    if PACKED:
        # The last stretch whose first slot is not past this one.
        low = slot + time * 0 - slot
        high = low + (stretches - 1)
        for _ in range(steps):
            middle = (low + high + 1) >> 1
            fits = tl.load(bounds + middle) // CHUNK + middle <= slot
            low = tl.where(fits, middle, low)
            high = tl.where(fits, high, middle - 1)
        start = tl.load(bounds + low)
        end = tl.load(bounds + low + 1)
        row = low * 0
        first = start + (slot - start // CHUNK - low) * CHUNK
        tokens = tl.minimum(end - first, CHUNK)
        counted = tl.where((low > 0) & (low < stretches - 1), tokens, 0)
    else:
        row = slot // row_chunks
        # 64 bits from here on: offsets are its products.
        first = (slot % row_chunks) * CHUNK + time * 0
        tokens = tl.minimum(time - first, CHUNK)
        counted = tokens
    return row, first, tokens, counted


# ------------------------------------------------------------------------------------------- arithmetic


@triton.jit
def times(matrix, operand, PARTS: tl.constexpr):
    """matrix · operand in float32. PARTS 0: both have 16 bits. 1: float32 products, each as three of TF32. 2: the
    matrix, in float32, as the sum of two bfloat16 numbers, each with a product of its own, the smaller first."""
    if PARTS == 0:
        total = tl.dot(matrix, operand)
    elif PARTS == 1:
        total = tl.dot(matrix.to(tl.float32), operand.to(tl.float32), input_precision="tf32x3")
    else:
        high = matrix.to(tl.bfloat16)
        low = (matrix - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(low, operand)
        total = tl.dot(high, operand) + total
    return total


@triton.jit
def row_sums(values, TILE: tl.constexpr, LEVELS: tl.constexpr):
    """[TILE, 2^LEVELS] -> [TILE], by halves."""
    return tl.reshape(halves(values, TILE, LEVELS, 1), (TILE,))


@triton.jit
def load_tile(tensor, start, place, stride, column, mask):
    """Rows of a chunk: `start` has 64 bits, what is added within a chunk 32."""
    return tl.load(tensor + start + (place * stride)[:, None] + column, mask, other=0)


@triton.jit
def load_transposed(T, start, place, stride, inside, CHUNK: tl.constexpr):
    """T of a chunk with its axes exchanged, and 0 for tokens past the end, where its elements have been read."""
    mask = inside[None, :] & (place < CHUNK)[:, None]
    matrix = tl.load(T + start + (place * stride)[None, :] + place[:, None], mask, other=0)
    return tl.where(inside[:, None], matrix, 0)


@triton.jit
def store_tile(tensor, start, place, stride, column, values, mask):
    tl.store(tensor + start + (place * stride)[:, None] + column, values.to(tensor.dtype.element_ty), mask)


# --------------------------------------------------------------------------------------------- forward


@kernel(
    budget=Budget(registers=255, shared_bytes=166_912, spilled_elsewhere=1024), targets=NVIDIA,
    numeric={"chunk": "CHUNK", "T": "matrix", "parts": "PARTS"}, schedule=("K_COLUMNS", "V_COLUMNS"),
)  # fmt: skip
@triton.jit
def gated_delta_w_u(
    k: PointerIf16.element, v: PointerIf16.element, beta: Pointer.float32, G: Pointer.float32, T: PointerIf16.matrix,
    bounds: Pointer.int64, w: PointerIf16.element, u: PointerIf16.element,
    time: Int64, stretches: Int64, steps: Int32, row_chunks: Int32, key_heads: Int32, repeat: Int32,
    k_row: Int64If16, k_time: Int32If16, k_head: Int64If16, v_row: Int64If16, v_time: Int32If16, v_head: Int64If16,
    beta_row: Int64, beta_time: Int32, beta_head: Int64, G_row: Int64, G_time: Int32, G_head: Int64,
    T_row: Int64If16, T_time: Int32If16, T_head: Int64If16,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, K_COLUMNS: tl.constexpr,
    V_COLUMNS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """w and u of a chunk of one value head, some columns at a time.

    AHEAD, everything that is read is on its way before the first product: no load passes a barrier.
    """
    heads = key_heads * repeat
    program = tl.program_id(0)
    head = program % heads
    slot = program // heads
    row, first, tokens, counted = chunk_of_slot(slot, bounds, time, stretches, steps, row_chunks, CHUNK, PACKED)
    if tokens <= 0:
        return
    place = tl.arange(0, TILE)
    inside = place < counted
    written = (place < tokens)[:, None]
    start = row * T_row + head * T_head + first * T_time
    mask = inside[:, None] & (place < CHUNK)[None, :]
    matrix = load_tile(T, start, place, T_time, place[None, :], mask)
    # A mask that changes along a row would have its elements read one by one.
    matrix = tl.where(inside[None, :], matrix, 0)
    start = row * beta_row + head * beta_head + first * beta_time
    strength = tl.load(beta + start + place * beta_time, inside, other=0)[:, None]
    start = row * G_row + head * G_head + first * G_time
    decay = tl.load(G + start + place * G_time, inside, other=0)[:, None]
    values = row * v_row + head * v_head + first * v_time
    keys = row * k_row + (head // repeat) * k_head + first * k_time
    value_tiles = ()
    key_tiles = ()
    if AHEAD:
        for begin in tl.static_range(0, V, V_COLUMNS):
            column = begin + tl.arange(0, V_COLUMNS)[None, :]
            tile = load_tile(v, values, place, v_time, column, inside[:, None] & (column < V))
            value_tiles = value_tiles + (tile,)
        for begin in tl.static_range(0, K, K_COLUMNS):
            column = begin + tl.arange(0, K_COLUMNS)[None, :]
            tile = load_tile(k, keys, place, k_time, column, inside[:, None] & (column < K))
            key_tiles = key_tiles + (tile,)
    target = (row * time + first) * heads + head
    for begin in tl.static_range(0, V, V_COLUMNS):
        column = begin + tl.arange(0, V_COLUMNS)[None, :]
        if AHEAD:
            tile = value_tiles[begin // V_COLUMNS]
        else:
            tile = load_tile(v, values, place, v_time, column, inside[:, None] & (column < V))
        total = times(matrix, (tile.to(tl.float32) * strength).to(v.dtype.element_ty), PARTS)
        store_tile(u, target * V, place, heads * V, column, total, written & (column < V))
    from_start = tl.exp(decay)
    for begin in tl.static_range(0, K, K_COLUMNS):
        column = begin + tl.arange(0, K_COLUMNS)[None, :]
        if AHEAD:
            tile = key_tiles[begin // K_COLUMNS]
        else:
            tile = load_tile(k, keys, place, k_time, column, inside[:, None] & (column < K))
        operand = tile.to(tl.float32) * strength * from_start
        total = times(matrix, operand.to(k.dtype.element_ty), PARTS)
        store_tile(w, target * K, place, heads * K, column, total, written & (column < K))


# -------------------------------------------------------------------------------------------- backward


@kernel(
    budget=Budget(registers=255, shared_bytes=166_912, spilled_elsewhere=2560), targets=NVIDIA,
    numeric={"chunk": "CHUNK", "T": "matrix", "parts": "PARTS", "k_columns": "K_COLUMNS", "v_columns": "V_COLUMNS"},
)  # fmt: skip
@triton.jit
def gated_delta_w_u_backward(
    k: PointerIf16.element, v: PointerIf16.element, beta: Pointer.float32, G: Pointer.float32, T: PointerIf16.matrix,
    dw: PointerIf16.element, du: PointerIf16.element, bounds: Pointer.int64, dv: PointerIf16.element,
    dbeta: Pointer.float32, dG: Pointer.float32, dT: PointerIf16.matrix,
    time: Int64, stretches: Int64, steps: Int32, row_chunks: Int32, key_heads: Int32, repeat: Int32, has_dw: Int32,
    has_du: Int32, key_size: Int32, value_size: Int32,
    k_row: Int64If16, k_time: Int32If16, k_head: Int64If16, v_row: Int64If16, v_time: Int32If16, v_head: Int64If16,
    beta_row: Int64, beta_time: Int32, beta_head: Int64, G_row: Int64, G_time: Int32, G_head: Int64,
    T_row: Int64If16, T_time: Int32If16, T_head: Int64If16, dw_row: Int64If16, dw_time: Int32If16, dw_head: Int64If16,
    du_row: Int64If16, du_time: Int32If16, du_head: Int64If16,
    K: tl.constexpr, V: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
    K_COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr, PACKED: tl.constexpr, PARTS: tl.constexpr,
    PLAIN: tl.constexpr, NEED_V: tl.constexpr, NEED_BETA: tl.constexpr, NEED_DECAY: tl.constexpr,
    NEED_T: tl.constexpr,
):  # fmt: skip
    """The gradients that belong to one value head, of a chunk.

    With P = dw kᵀ and Q = du vᵀ, [i, j] for row i of T and token j, which need no operand but what is in memory:

        dT_ij = β_j·e^{G_j}·P_ij + β_j·Q_ij,   p_j = Σ_i T_ij·P_ij,   q_j = Σ_i T_ij·Q_ij
        dβ_j = q_j + e^{G_j}·p_j,   dG_j = β_j·e^{G_j}·p_j,   dv = β·(Tᵀ du)

    All matrices are held transposed, [j, i]: T and dT are read and written with their axes exchanged, so that sums run
    along rows and no left operand of a product is transposed. PLAIN is `PARTS` for two operands in the type of k.
    K and V come a second time, as key_size and value_size: loops that the compiler could count would be unrolled.
    """
    program = tl.program_id(0)
    heads = key_heads * repeat
    head = program % heads
    slot = program // heads
    row, first, tokens, counted = chunk_of_slot(slot, bounds, time, stretches, steps, row_chunks, CHUNK, PACKED)
    if tokens <= 0:
        return
    place = tl.arange(0, TILE)
    inside = place < counted
    written = place < tokens
    SUMS: tl.constexpr = NEED_BETA or NEED_DECAY
    start = row * T_row + head * T_head + first * T_time
    matrix = load_transposed(T, start, place, T_time, inside, CHUNK)
    start = row * beta_row + head * beta_head + first * beta_time
    strength = tl.load(beta + start + place * beta_time, inside, other=0)
    target = (row * time + first) * heads + head
    of_values = tl.zeros([TILE, TILE], tl.float32)
    start = row * du_row + head * du_head + first * du_time
    values = row * v_row + head * v_head + first * v_time
    for begin in range(0, value_size, V_COLUMNS):
        column = begin + tl.arange(0, V_COLUMNS)[None, :]
        mask = inside[:, None] & (column < V)
        of_u = load_tile(du, start, place, du_time, column, mask & (has_du != 0))
        if NEED_BETA or NEED_T:
            tile = load_tile(v, values, place, v_time, column, mask)
            of_values = of_values + times(tile, tl.trans(of_u), PLAIN)
        if NEED_V:
            Y = times(matrix, of_u, PARTS) * strength[:, None]
            store_tile(dv, target * V, place, heads * V, column, Y, written[:, None] & (column < V))
    if SUMS or NEED_T:
        of_keys = tl.zeros([TILE, TILE], tl.float32)
        start = row * dw_row + head * dw_head + first * dw_time
        keys = row * k_row + (head // repeat) * k_head + first * k_time
        for begin in range(0, key_size, K_COLUMNS):
            among = begin + tl.arange(0, K_COLUMNS)[None, :]
            in_keys = inside[:, None] & (among < K)
            of_w = load_tile(dw, start, place, dw_time, among, in_keys & (has_dw != 0))
            key_tile = load_tile(k, keys, place, k_time, among, in_keys)
            of_keys = of_keys + times(key_tile, tl.trans(of_w), PLAIN)
        start = row * G_row + head * G_head + first * G_time
        from_start = tl.exp(tl.load(G + start + place * G_time, inside, other=0))
        if NEED_T:
            of_T = (of_keys * from_start[:, None] + of_values) * strength[:, None]
            at = dT + target * CHUNK + (place * (heads * CHUNK))[None, :] + place[:, None]
            tl.store(at, of_T.to(dT.dtype.element_ty), written[None, :] & (place[:, None] < CHUNK))
        if SUMS:
            wide = matrix.to(tl.float32)
            along_keys = row_sums(wide * of_keys, TILE, LEVELS) * from_start
            if NEED_BETA:
                along_values = row_sums(wide * of_values, TILE, LEVELS)
                tl.store(dbeta + target + place * heads, along_values + along_keys, written)
            if NEED_DECAY:
                tl.store(dG + target + place * heads, along_keys * strength, written)


@kernel(
    budget=Budget(registers=255, shared_bytes=166_912, spilled_elsewhere=4352), targets=NVIDIA,
    numeric={"chunk": "CHUNK", "T": "matrix", "parts": "PARTS", "k_columns": "K_COLUMNS"},
)  # fmt: skip
@triton.jit
def gated_delta_w_u_backward_keys(
    beta: Pointer.float32, G: Pointer.float32, T: PointerIf16.matrix, dw: PointerIf16.element, bounds: Pointer.int64,
    dk: PointerIf16.element,
    time: Int64, stretches: Int64, steps: Int32, row_chunks: Int32, key_heads: Int32, repeat: Int32,
    beta_row: Int64, beta_time: Int32, beta_head: Int64, G_row: Int64, G_time: Int32, G_head: Int64,
    T_row: Int64If16, T_time: Int32If16, T_head: Int64If16, dw_row: Int64If16, dw_time: Int32If16, dw_head: Int64If16,
    K: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, K_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """dk = Σ β·e^G·(Tᵀ dw) over the value heads of a key head, in their order; some columns of a chunk."""
    column_tiles: tl.constexpr = (K + K_COLUMNS - 1) // K_COLUMNS
    program = tl.program_id(0)
    column = program % column_tiles * K_COLUMNS + tl.arange(0, K_COLUMNS)[None, :]
    key_head = program // column_tiles % key_heads
    slot = program // column_tiles // key_heads
    row, first, tokens, counted = chunk_of_slot(slot, bounds, time, stretches, steps, row_chunks, CHUNK, PACKED)
    if tokens <= 0:
        return
    place = tl.arange(0, TILE)
    inside = place < counted
    mask = inside[:, None] & (column < K)
    total = tl.zeros([TILE, K_COLUMNS], tl.float32)
    for step in range(repeat):
        head = key_head * repeat + step
        start = row * T_row + head * T_head + first * T_time
        matrix = load_transposed(T, start, place, T_time, inside, CHUNK)
        start = row * dw_row + head * dw_head + first * dw_time
        of_w = load_tile(dw, start, place, dw_time, column, mask)
        start = row * beta_row + head * beta_head + first * beta_time
        strength = tl.load(beta + start + place * beta_time, inside, other=0)
        start = row * G_row + head * G_head + first * G_time
        from_start = tl.exp(tl.load(G + start + place * G_time, inside, other=0))
        total += times(matrix, of_w, PARTS) * strength[:, None] * from_start[:, None]
    target = ((row * time + first) * key_heads + key_head) * K
    store_tile(dk, target, place, key_heads * K, column, total, (place < tokens)[:, None] & (column < K))


# ------------------------------------------------------------------------------------------------ launches

COLUMNS = {torch.bfloat16: 64, torch.float16: 64, torch.float32: 32}
"""Columns of a tile of the backward, whose products run along them: part of the bits."""

MAX_AHEAD = 256
"""Columns of keys and values together that a program holds in registers at once."""

MIN_TILE = 16
"""Rows and columns of the smallest matrix product."""

WARPS = (4, 8)
"""Fewest and most warps: with fewer, other matrix instructions would add in another order."""


class _Stage:
    """What both directions have in common: sizes, how chunks are numbered, kernels, and the workspace."""

    def __init__(self, setup: Setup) -> None:
        problem, self.setup, self.device = setup.problem, setup, setup.device
        element, T = self.element, self.T = problem.dtypes
        self.K, self.V, chunk, batch, time, key_heads, self.heads, self.bounds = problem.sizes
        self.chunk, self.time, self.tokens = chunk, time, batch * time
        row_chunks = -(-time // chunk)
        stretches = self.bounds + 1  # sequences, and what lies before the first and after the last
        self.slots = time // chunk + stretches if self.bounds else batch * row_chunks
        self.where = {
            "time": time, "stretches": stretches, "steps": stretches.bit_length(), "row_chunks": max(1, row_chunks),
            "key_heads": key_heads, "repeat": self.heads // max(1, key_heads),
        }  # fmt: skip
        self.parts, self.tile = parts_of(element, T), max(MIN_TILE, chunk)
        # Rows may begin at multiples of 16 elements, or none does.
        self.alignments = (False,) if self.K % 16 or self.V % 16 else (True, False)
        if self.bounds:
            self.find_bounds = {
                index: setup.kernel(
                    gated_delta_bounds, index=index, REPORT=not problem.op.endswith("_backward"),
                    BLOCK=setup.schedule["bounds_block"], num_warps=setup.schedule["bounds_warps"],
                )
                for index in (torch.int32, torch.int64)
            }  # fmt: skip
            setup.scratch(bounds=(torch.int64, self.bounds + 2))
        lines = self.tokens * self.heads
        setup.copies(
            k=(element, self.tokens * key_heads * self.K), v=(element, lines * self.V), T=(T, lines * chunk),
            dw=(element, lines * self.K), du=(element, lines * self.V),
        )  # fmt: skip

    def bind(self, kernel: Any, aligned: bool, num_stages: int = 1, **constants: Any) -> Launch:
        warps = self.setup.schedule["warps" if aligned else "unaligned_warps"]
        return self.setup.kernel(
            kernel, element=self.element, matrix=self.T, K=self.K, CHUNK=self.chunk, TILE=self.tile,
            PACKED=self.bounds > 0, PARTS=self.parts, aligned=aligned, num_stages=num_stages,
            num_warps=min(max(warps, WARPS[0]), WARPS[1]), **constants,
        )  # fmt: skip

    def order_bounds(self, cu_seqlens: Tensor | None, memory: Memory) -> Any:
        """Puts bounds in order on the device; what stands for them where nothing is packed."""
        if cu_seqlens is None:
            return status_word(self.device)
        self.find_bounds[cu_seqlens.dtype].launch(
            (1,), cu_seqlens=cu_seqlens, bounds=memory["bounds"], status_word=status_word(self.device),
            fault=SEQUENCES_OUT_OF_ORDER.row, count=self.bounds, time=self.time, stride=cu_seqlens.stride(0),
        )  # fmt: skip
        return memory["bounds"]


def _columns(most: int, size: int) -> int:
    """Columns of a tile, for rows of some size."""
    return min(most, max(MIN_TILE, 1 << max(0, size - 1).bit_length()))


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    """Of rows, tokens and heads; 0 where there is one."""
    rows, time, heads = tensor.shape[:3]
    row, token, head = tensor.stride()[:3]
    return row if rows != 1 else 0, token if time != 1 else 0, head if heads != 1 else 0


def _is_aligned(tensor: Tensor, strides: tuple[int, int, int]) -> bool:
    row, token, head = strides
    return not (tensor.data_ptr() % 16 or row % 16 or token % 16 or head % 16)


def forward(setup: Setup) -> Execute:
    """w and u."""
    stage, schedule = _Stage(setup), setup.schedule
    K, V, where, grid = stage.K, stage.V, stage.where, (stage.slots * stage.heads,)
    products = {}
    for aligned in stage.alignments:
        columns = schedule["columns" if aligned else "unaligned_columns"]
        products[aligned] = stage.bind(
            gated_delta_w_u, aligned, V=V, K_COLUMNS=_columns(columns, K), V_COLUMNS=_columns(columns, V),
            AHEAD=aligned and stage.parts != TF32 and K + V <= MAX_AHEAD,
        )  # fmt: skip
    may_align = True in products

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        k, v, beta, G, T, cu_seqlens = arguments
        w, u = outputs
        if stage.tokens * stage.heads == 0 and cu_seqlens is None:
            return
        memory = setup.memory(workspace)
        bounds = stage.order_bounds(cu_seqlens, memory)
        if cu_seqlens is not None and stage.device.type == "cpu":
            check()
        if stage.time * stage.heads * (K + V) == 0:
            return
        k, v, T = memory.contiguous("k", k), memory.contiguous("v", v), memory.contiguous("T", T)
        (k_row, k_time, k_head), (v_row, v_time, v_head) = of_k, of_v = _strides(k), _strides(v)
        (beta_row, beta_time, beta_head), (G_row, G_time, G_head) = _strides(beta), _strides(G)
        T_row, T_time, T_head = of_T = _strides(T)
        aligned = may_align and _is_aligned(k, of_k) and _is_aligned(v, of_v) and _is_aligned(T, of_T)
        products[aligned and is_aligned(w, u)].launch(
            grid, k=k, v=v, beta=beta, G=G, T=T, bounds=bounds, w=w, u=u, k_row=k_row, k_time=k_time, k_head=k_head,
            v_row=v_row, v_time=v_time, v_head=v_head, beta_row=beta_row, beta_time=beta_time, beta_head=beta_head,
            G_row=G_row, G_time=G_time, G_head=G_head, T_row=T_row, T_time=T_time, T_head=T_head, **where,
        )  # fmt: skip

    return execute


def backward(setup: Setup) -> Execute:
    """The gradients that belong to value heads, and dk, those that are needed."""
    stage, (need,) = _Stage(setup), setup.problem.options
    K, V, where, may_align = stage.K, stage.V, stage.where, True in stage.alignments
    k_columns, v_columns = (_columns(COLUMNS[stage.element], size) for size in (K, V))
    of_values, of_keys = {}, {}
    for aligned in stage.alignments:
        depth = setup.schedule["stages"] if aligned else 1
        if need & ~NEED_K:
            of_values[aligned] = stage.bind(
                gated_delta_w_u_backward, aligned, depth, V=V, LEVELS=stage.tile.bit_length() - 1,
                K_COLUMNS=k_columns, V_COLUMNS=v_columns, PLAIN=parts_of(stage.element, stage.element),
                NEED_V=bool(need & NEED_V), NEED_BETA=bool(need & NEED_BETA), NEED_DECAY=bool(need & NEED_DECAY),
                NEED_T=bool(need & NEED_T),
            )  # fmt: skip
        if need & NEED_K:
            of_keys[aligned] = stage.bind(gated_delta_w_u_backward_keys, aligned, depth, K_COLUMNS=k_columns)
    value_grid = (stage.slots * stage.heads,)
    key_grid = (stage.slots * where["key_heads"] * -(-K // k_columns),)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dw, du, k, v, beta, G, T, cu_seqlens, _ = arguments
        dk, dv, dbeta, dG, dT = outputs
        if need == 0 or stage.tokens * stage.heads == 0:
            return
        memory = setup.memory(workspace)
        bounds = stage.order_bounds(cu_seqlens, memory)
        has_dw, has_du = dw is not None, du is not None
        k, v, T = memory.contiguous("k", k), memory.contiguous("v", v), memory.contiguous("T", T)
        # What is absent is not read: any memory stands for it.
        dw = memory.contiguous("dw", dw) if has_dw else k
        du = memory.contiguous("du", du) if has_du else k
        (k_row, k_time, k_head), (v_row, v_time, v_head) = of_k, of_v = _strides(k), _strides(v)
        (beta_row, beta_time, beta_head), (G_row, G_time, G_head) = _strides(beta), _strides(G)
        T_row, T_time, T_head = of_T = _strides(T)
        (dw_row, dw_time, dw_head), (du_row, du_time, du_head) = of_dw, of_du = _strides(dw), _strides(du)
        aligned = may_align and _is_aligned(k, of_k) and _is_aligned(v, of_v) and _is_aligned(T, of_T)
        aligned = aligned and _is_aligned(dw, of_dw) and _is_aligned(du, of_du) and is_aligned(*outputs)
        if need & ~NEED_K:
            of_values[aligned].launch(
                value_grid, k=k, v=v, beta=beta, G=G, T=T, dw=dw, du=du, bounds=bounds, dv=dv, dbeta=dbeta, dG=dG,
                dT=dT, has_dw=int(has_dw), has_du=int(has_du), key_size=K, value_size=V, k_row=k_row, k_time=k_time,
                k_head=k_head, v_row=v_row, v_time=v_time, v_head=v_head, beta_row=beta_row, beta_time=beta_time,
                beta_head=beta_head, G_row=G_row, G_time=G_time, G_head=G_head, T_row=T_row, T_time=T_time,
                T_head=T_head, dw_row=dw_row, dw_time=dw_time, dw_head=dw_head, du_row=du_row, du_time=du_time,
                du_head=du_head, **where,
            )  # fmt: skip
        if need & NEED_K and K and has_dw:
            of_keys[aligned].launch(
                key_grid, beta=beta, G=G, T=T, dw=dw, bounds=bounds, dk=dk, beta_row=beta_row, beta_time=beta_time,
                beta_head=beta_head, G_row=G_row, G_time=G_time, G_head=G_head, T_row=T_row, T_time=T_time,
                T_head=T_head, dw_row=dw_row, dw_time=dw_time, dw_head=dw_head, **where,
            )  # fmt: skip
        elif need & NEED_K:
            dk.zero_()

    return execute
