"""Triton kernels of `recompute_w_u`: w = T·(β·e^G·k) and u = T·(β·v), chunk by chunk, and their adjoint.

One program has a chunk of one value head. Programs that run at the same time have neighbouring heads of one chunk:
their rows lie side by side in memory, and keys that several value heads share are read from cache.

Packed sequences: chunks are counted from each sequence's start, so sequence n has the slots from
⌊start / CHUNK⌋ + n on, at most one more than its share of the tokens: ⌊tokens / CHUNK⌋ + n slots are enough, known
before any length is, and grids need no waiting for the device. A slot without tokens ends at once.

A product's terms are added as a matrix instruction adds them, in an order that no schedule and no layout changes: T is
one tile. Sums along a row are halved until one number is left: the first half plus the second.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record

# --------------------------------------------------------------------------------------- where chunks lie


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def gated_delta_bounds(
    cu_seqlens, bounds, status_word, fault, count, time, stride, REPORT: tl.constexpr, BLOCK: tl.constexpr
):
    """bounds = 0, cu_seqlens in order and within the tokens, time: before the first and after the last is nothing.

    REPORT, what is out of order is recorded.
    """
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
    """matrix · operand in float32.

    PARTS 0: both have 16 bits. 1: float32 products, each as three of TF32. 2: the matrix, in float32, as the sum of two
    bfloat16 numbers, each with a product of its own, the smaller first.
    """
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
def row_sums(values, LEVELS: tl.constexpr):
    """[rows, 2^LEVELS] -> [rows]: halves are added until one column is left, whatever the layout of threads.

    `tl.sum` of more than two adds in the order of the layout, which follows the alignment of what was loaded.
    """
    rows: tl.constexpr = values.shape[0]
    for _ in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, (rows, 2, values.shape[1] // 2)), 1)
    return tl.reshape(values, (rows,))


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


@triton.jit
def gated_delta_w_u(
    k, v, beta, G, T, bounds, w, u,
    time, stretches, steps, row_chunks, key_heads, repeat,
    k_row, k_time, k_head, v_row, v_time, v_head, beta_row, beta_time, beta_head,
    G_row, G_time, G_head, T_row, T_time, T_head,
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
    own = (row * time + first) * heads + head
    for begin in tl.static_range(0, V, V_COLUMNS):
        column = begin + tl.arange(0, V_COLUMNS)[None, :]
        if AHEAD:
            tile = value_tiles[begin // V_COLUMNS]
        else:
            tile = load_tile(v, values, place, v_time, column, inside[:, None] & (column < V))
        total = times(matrix, (tile.to(tl.float32) * strength).to(v.dtype.element_ty), PARTS)
        store_tile(u, own * V, place, heads * V, column, total, written & (column < V))
    from_start = tl.exp(decay)
    for begin in tl.static_range(0, K, K_COLUMNS):
        column = begin + tl.arange(0, K_COLUMNS)[None, :]
        if AHEAD:
            tile = key_tiles[begin // K_COLUMNS]
        else:
            tile = load_tile(k, keys, place, k_time, column, inside[:, None] & (column < K))
        operand = tile.to(tl.float32) * strength * from_start
        total = times(matrix, operand.to(k.dtype.element_ty), PARTS)
        store_tile(w, own * K, place, heads * K, column, total, written & (column < K))


# -------------------------------------------------------------------------------------------- backward


@triton.jit
def gated_delta_w_u_backward(
    k, v, beta, G, T, dw, du, bounds, dv, dbeta, dG, dT,
    time, stretches, steps, row_chunks, key_heads, repeat, has_dw, has_du, key_size, value_size,
    k_row, k_time, k_head, v_row, v_time, v_head, beta_row, beta_time, beta_head,
    G_row, G_time, G_head, T_row, T_time, T_head, dw_row, dw_time, dw_head, du_row, du_time, du_head,
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
    own = (row * time + first) * heads + head
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
            store_tile(dv, own * V, place, heads * V, column, Y, written[:, None] & (column < V))
    if SUMS or NEED_T:
        of_keys = tl.zeros([TILE, TILE], tl.float32)
        start = row * dw_row + head * dw_head + first * dw_time
        keys = row * k_row + (head // repeat) * k_head + first * k_time
        for begin in range(0, key_size, K_COLUMNS):
            among = begin + tl.arange(0, K_COLUMNS)[None, :]
            known = inside[:, None] & (among < K)
            of_w = load_tile(dw, start, place, dw_time, among, known & (has_dw != 0))
            key_tile = load_tile(k, keys, place, k_time, among, known)
            of_keys = of_keys + times(key_tile, tl.trans(of_w), PLAIN)
        start = row * G_row + head * G_head + first * G_time
        from_start = tl.exp(tl.load(G + start + place * G_time, inside, other=0))
        if NEED_T:
            of_T = (of_keys * from_start[:, None] + of_values) * strength[:, None]
            at = dT + own * CHUNK + (place * (heads * CHUNK))[None, :] + place[:, None]
            tl.store(at, of_T.to(dT.dtype.element_ty), written[None, :] & (place[:, None] < CHUNK))
        if SUMS:
            wide = matrix.to(tl.float32)
            along_keys = row_sums(wide * of_keys, LEVELS) * from_start
            if NEED_BETA:
                along_values = row_sums(wide * of_values, LEVELS)
                tl.store(dbeta + own + place * heads, along_values + along_keys, written)
            if NEED_DECAY:
                tl.store(dG + own + place * heads, along_keys * strength, written)


@triton.jit
def gated_delta_w_u_backward_keys(
    beta, G, T, dw, bounds, dk,
    time, stretches, steps, row_chunks, key_heads, repeat,
    beta_row, beta_time, beta_head, G_row, G_time, G_head, T_row, T_time, T_head, dw_row, dw_time, dw_head,
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
    own = ((row * time + first) * key_heads + key_head) * K
    store_tile(dk, own, place, key_heads * K, column, total, (place < tokens)[:, None] & (column < K))


_SPILLED_ELSEWHERE = {gated_delta_w_u: 1024, gated_delta_w_u_backward: 2048, gated_delta_w_u_backward_keys: 4096}

KERNELS = (
    kernels.register(gated_delta_bounds, budget=Budget(registers=128, shared_bytes=4096), targets=kernels.NVIDIA),
    *(
        kernels.register(
            kernel,
            budget=Budget(registers=255, shared_bytes=166_912, spilled_elsewhere=spilled),
            targets=kernels.NVIDIA,
        )
        for kernel, spilled in _SPILLED_ELSEWHERE.items()
    ),
)
