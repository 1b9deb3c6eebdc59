"""Triton kernels of the forward: the inverse of each chunk's matrix, the walk from chunk to chunk, the outputs.

One chunk of 64 tokens of one value head, `S` the state it begins with, `G` the running sum of g and `Γ` its last:

    prepare  T = (I + β ⊙ (k kᵀ ⊙ D°))⁻¹                       one program per chunk and key head
    walk     r = β ⊙ (v − e^G ⊙ (k S)),  v' = T r               one program per sequence, value head and block of V
             S ← e^Γ S + kᵀ (e^{Γ−G} ⊙ v')
    output   o = scale·(e^G ⊙ (q S) + (q kᵀ ⊙ D) v')            one program per chunk, key head and block of V

Where few heads would leave most of a card idle, the walk goes over segments of a long sequence at once. A segment makes
M S + B of a state S it begins with: `rule_walk` gives M and B, `rule_compose` the state at the start of every segment,
and `rule_walk` then walks each from there. Cuts are at fixed positions from the start of a sequence.

Only the walk goes from chunk to chunk, so it is three products and little else. It computes with everything
transposed: an accumulator then becomes the left operand of the next product where it is, in registers. T is stored
without its diagonal of ones: what the ones multiply is added in float32. A chunk's products read k, v and q past the
end of a sequence as 0, its β as 0 and its T as I.

A dot adds its terms in an order that is fixed by its instruction; nothing else here adds along an axis.
"""

from dataclasses import replace

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget

# ----------------------------------------------------------------------------------------------- prepare


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
def _fits(index, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """index < SIZE, for indices of whole blocks: known without a comparison where blocks divide the size."""
    if SIZE % BLOCK == 0:
        return tl.full(index.shape, 1, tl.int1)
    return index < SIZE


@triton.jit
def _rows(x, token, count, token_stride, column, K: tl.constexpr, K_STEP: tl.constexpr):
    """Some columns of rows of tokens, [..., K_STEP]; zeros past the end of the sequence."""
    token = tl.expand_dims(token, -1)
    inside = (token < count) & _fits(column, K, K_STEP)
    return tl.load(x + token * token_stride.to(tl.int32) + column, inside, other=0)


@triton.jit
def _matrix(gram, gates, i, j, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """β_i·gram·e^{G_i−G_j} where i > j, else 0."""
    between = tl.load(gates + i) - tl.load(gates + j)
    if WIDE:
        between += tl.load(gates + CHUNK + i) - tl.load(gates + CHUNK + j)
    strength = tl.load(gates + 2 * CHUNK + i)
    past = i > j
    return tl.where(past, strength * (gram * tl.exp(tl.where(past, between, 0.0))), 0.0)


@triton.jit
def _store_matrix(T, value, i, j, PARTS: tl.constexpr, CHUNK: tl.constexpr):
    kind = T.dtype.element_ty
    place = T + i * CHUNK + j
    rounded = value.to(kind)
    tl.store(place, rounded)
    if PARTS == 2:
        tl.store(place + CHUNK * CHUNK, (value - rounded.to(tl.float32)).to(kind))


@triton.jit
def rule_prepare(
    k, gates, places, T, key_heads, k_token_stride, k_head_stride,
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
    count = tl.load(places + slot * 4 + 1)
    if count == 0:
        return
    first = tl.load(places + slot * 4)
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
        k_four = _rows(k, four, count, k_token_stride, column[None, None, :], K, K_STEP)
        k_upper = _rows(k, two, count, k_token_stride, column[None, None, :], K, K_STEP)
        k_lower = _rows(k, two + 16, count, k_token_stride, column[None, None, :], K, K_STEP)
        k_first = _rows(k, half, count, k_token_stride, column[None, :], K, K_STEP)
        k_second = _rows(k, half + 32, count, k_token_stride, column[None, :], K, K_STEP)
        gram_16 += tl.dot(k_four, tl.permute(k_four, (0, 2, 1)), input_precision=PRECISION)
        gram_32 += tl.dot(k_lower, tl.permute(k_upper, (0, 2, 1)), input_precision=PRECISION)
        gram_64 += tl.dot(k_second, tl.trans(k_first), input_precision=PRECISION)
    i, j = lane[None, :, None], lane[None, None, :]
    i_16, j_16 = four[:, :, None], four[:, None, :]
    i_32, j_32 = two[:, :, None] + 16, two[:, None, :]
    i_64, j_64 = half[:, None] + 32, half[None, :]
    for member in range(GROUP):
        head = slot * (key_heads * GROUP) + key_head * GROUP + member
        own = gates + head * (5 * CHUNK)
        A = _matrix(gram_16, own, i_16, j_16, CHUNK, WIDE)
        # Blocks of 2: the inverse of [[1, 0], [a, 1]] is [[1, 0], [−a, 1]].
        inverse = tl.where(i == j, 1.0, tl.where(i // 2 == j // 2, -A, 0.0))
        for level in tl.static_range(1, 4):  # blocks of 2^level are there
            between = tl.where((i >> (level + 1) == j >> (level + 1)) & (i >> level != j >> level), A, 0.0)
            inverse -= _product(inverse, _product(between, inverse, WIDE), WIDE)
        upper, lower = tl.split(tl.permute(tl.reshape(inverse, (2, 2, 16, 16)), (0, 2, 3, 1)))
        A = _matrix(gram_32, own, i_32, j_32, CHUNK, WIDE)
        corner_32 = -_product(lower, _product(A, upper, WIDE), WIDE)
        # The two inverses of size 32, from their blocks: [half, row of blocks, 16, column of blocks, 16].
        block_row = tl.arange(0, 2)[None, :, None, None, None]
        block_column = tl.arange(0, 2)[None, None, None, :, None]
        diagonal = tl.reshape(inverse, (2, 2, 16, 16))[:, :, :, None, :]
        corner = corner_32[:, None, :, None, :]
        whole = tl.where(block_row == block_column, diagonal, tl.where(block_row > block_column, corner, 0.0))
        above, below = tl.split(tl.permute(tl.reshape(whole, (2, 32, 32)), (1, 2, 0)))
        A = _matrix(gram_64, own, i_64, j_64, CHUNK, WIDE)
        corner_64 = -_product(below, _product(A, above, WIDE), WIDE)
        out = T + head * (PARTS * CHUNK * CHUNK)
        _store_matrix(out, tl.where(i == j, 0.0, inverse), i_16, j_16, PARTS, CHUNK)
        _store_matrix(out, corner_32, i_32, j_32, PARTS, CHUNK)
        _store_matrix(out, corner_64, i_64, j_64, PARTS, CHUNK)
        _store_matrix(out, tl.zeros([2, 16, 16], tl.float32), i_32 - 16, j_32 + 16, PARTS, CHUNK)
        _store_matrix(out, tl.zeros([32, 32], tl.float32), i_64 - 32, j_64 + 32, PARTS, CHUNK)


# ------------------------------------------------------------------------------------------------ scores


@triton.jit
def rule_scores(
    q, k, gates, places, P, key_heads, scale, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, K_BLOCK: tl.constexpr, SCORE_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """P = scale·(q kᵀ) ⊙ D of every value head of a key head, 0 above the diagonal; for a walk that writes o itself."""
    CHUNK: tl.constexpr = 64
    slot = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = tl.program_id(0) % key_heads
    count = tl.load(places + slot * 4 + 1)
    if count == 0:
        return
    first = tl.load(places + slot * 4).to(tl.int64)
    row = tl.arange(0, CHUNK)
    column = tl.arange(0, K_BLOCK)
    inside = (row < count)[:, None] & _fits(column, K, K_BLOCK)[None, :]
    q += first * q_token_stride + key_head.to(tl.int64) * q_head_stride
    k += first * k_token_stride + key_head.to(tl.int64) * k_head_stride
    queries = tl.load(q + row[:, None] * q_token_stride.to(tl.int32) + column[None, :], inside, other=0)
    keys = tl.load(k + row[:, None] * k_token_stride.to(tl.int32) + column[None, :], inside, other=0)
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
    past = row[:, None] >= row[None, :]
    lane = (slot * key_heads + key_head) * GROUP
    gates += lane * (5 * CHUNK)
    P += lane * (SCORE_PARTS * CHUNK * CHUNK)
    for _ in range(GROUP):
        G = tl.load(gates + row)
        decay = tl.exp(tl.where(past, G[:, None] - G[None, :], 0.0))
        _store_matrix(P, tl.where(past, scores * decay, 0.0), row[:, None], row[None, :], SCORE_PARTS, CHUNK)
        gates += 5 * CHUNK
        P += SCORE_PARTS * CHUNK * CHUNK


# -------------------------------------------------------------------------------------------------- walk


@triton.jit
def rule_walk(
    k, v, gates, T, spans, begins, firsts, initial_state, saved, states, new, final_state, heads,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, PARTS: tl.constexpr, SEGMENTED: tl.constexpr, INITIAL: tl.constexpr,
    SAVE: tl.constexpr, FINAL: tl.constexpr, TRANSITION: tl.constexpr, SEGMENT: tl.constexpr, BACK: tl.constexpr,
    WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the start of every chunk, and v' of every chunk, of one span; both transposed, [V, ...].

    A span is a whole sequence, or (SEGMENTED) a segment of one, which begins with a saved state unless it is the first.
    With TRANSITION it is what a segment makes of any state, M S + B: the columns of M, from those of the identity and
    without values, then those of B, from 0. Their transposes, [K + V, K] in float32, are all that is stored: in the
    place of final states. With V = 0 there is M alone, for the way back: of segments of BACK tokens of sequences of
    more than WHOLE, but for the first and the last of each.
    K and V are the widths of rows in memory, K_SIZE and V_SIZE those of states.
    """
    CHUNK: tl.constexpr = 64
    LINES: tl.constexpr = K + V if TRANSITION else V
    blocks: tl.constexpr = (LINES + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    span = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    if SEGMENTED:
        count = tl.load(spans + span * 4 + 1)
        if count == 0:
            return
        first = tl.load(spans + span * 4).to(tl.int64)
        sequence = tl.load(spans + span * 4 + 2).to(tl.int64)
        index = tl.load(spans + span * 4 + 3)
        if TRANSITION and V == 0:
            whole = tl.load(begins + sequence + 1) - tl.load(begins + sequence)
            is_between = (index > 0) & (whole - index * SEGMENT > BACK)
            if (whole <= WHOLE) | (index % (BACK // SEGMENT) != 0) | (not is_between):
                return
            count *= BACK // SEGMENT  # from SEGMENT: BACK, which a loop that knows it would be unrolled for
    else:
        sequence = span
        first = tl.load(begins + span).to(tl.int64)
        count = tl.load(begins + span + 1) - tl.load(begins + span)
        index = 0
    slot = (tl.load(firsts + sequence) + index * (SEGMENT // CHUNK)).to(tl.int64)
    kept = (tl.load(begins + sequence) // SEGMENT + index).to(tl.int64) - 1  # where the state at its start is saved
    if TRANSITION and V == 0:
        kept = (tl.load(begins + sequence) // BACK + index // (BACK // SEGMENT)).to(tl.int64) - 1
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    row = tl.arange(0, CHUNK)
    kind = k.dtype.element_ty

    size: tl.constexpr = K_SIZE * V_SIZE
    in_state = _fits(k_column, K_SIZE, K_BLOCK)[:, None] & _fits(v_row, V_SIZE, V_BLOCK)[None, :]
    state_place = k_column[:, None] * V_SIZE + v_row[None, :]
    S = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    if INITIAL:
        start = initial_state + (sequence * heads + head) * size
        S = tl.trans(tl.load(start + state_place, in_state & (index == 0), other=0.0))
    if TRANSITION:
        unit = (v_row[:, None] == k_column[None, :]) & (v_row < K)[:, None]
        S = tl.where(unit, 1.0, 0.0)
    elif SEGMENTED:  # noqa: SIM102  (a constant, and what only the GPU knows)
        if index > 0:
            S = tl.trans(tl.load(saved + (kept * heads + head) * size + state_place, in_state, other=0.0))

    # Bases move from chunk to chunk, and offsets stay: 32 bits each.
    k += first * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
    v += first * v_token_stride + head.to(tl.int64) * v_head_stride
    lane = slot * heads + head
    gates += lane * (5 * CHUNK)
    T += lane * (PARTS * CHUNK * CHUNK)
    new += lane * (V * CHUNK)
    states += lane * (V * K)
    k_offset = row[:, None] * k_token_stride.to(tl.int32) + k_column[None, :]
    in_keys = _fits(k_column, K, K_BLOCK)
    if TRANSITION:
        v_column = v_row - K
        in_values = (v_column >= 0) & (v_column < V)
    else:
        v_column = v_row
        in_values = _fits(v_row, V, V_BLOCK)
    v_offset = row[:, None] * v_token_stride.to(tl.int32) + v_column[None, :]
    T_offset = row[:, None] * CHUNK + row[None, :]
    new_offset = v_row[:, None] * CHUNK + row[None, :]
    states_offset = v_row[:, None] * K + k_column[None, :]
    stored = in_values[:, None] & in_keys[None, :]
    over = tl.load(gates + 4 * CHUNK - 1, mask=count > 0)
    next_over = tl.load(gates + heads * (5 * CHUNK) + 4 * CHUNK - 1, mask=count > CHUNK)
    for chunk in range(tl.cdiv(count, CHUNK)):
        if SAVE:  # noqa: SIM102
            if (chunk > 0) & (chunk % (SEGMENT // CHUNK) == 0):
                place = saved + ((kept + chunk // (SEGMENT // CHUNK)) * heads + head) * size
                tl.store(place + state_place, tl.trans(S), in_state)
        narrow = S.to(kind)
        if not TRANSITION:
            tl.store(states + states_offset, narrow, stored)
        left = count - chunk * CHUNK
        keys = tl.load(k + k_offset, (row < left)[:, None] & in_keys[None, :], other=0)
        values = tl.load(v + v_offset, (row < left)[:, None] & in_values[None, :], other=0)
        strength = tl.load(gates + 2 * CHUNK + row)
        from_start = tl.load(gates + 3 * CHUNK + row)
        solve = tl.load(T + T_offset)
        fresh = strength[None, :] * tl.trans(values).to(tl.float32)
        old = (strength * from_start)[None, :]
        known = tl.dot(narrow, tl.trans(keys), input_precision=PRECISION)
        residual = fresh - old * known
        rounded = residual.to(kind)
        found = tl.dot(rounded, tl.trans(solve), residual, input_precision=PRECISION)
        if PARTS == 2:
            rest = tl.load(T + CHUNK * CHUNK + T_offset)
            found = tl.dot(rounded, tl.trans(rest), found, input_precision=PRECISION)
        to_end = tl.load(gates + 4 * CHUNK + row)
        S = tl.dot((to_end[None, :] * found).to(kind), keys, S * over, input_precision=PRECISION)
        if not TRANSITION:
            tl.store(new + new_offset, found.to(kind), in_values[:, None] & tl.full([1, CHUNK], 1, tl.int1))
        k += CHUNK * k_token_stride
        v += CHUNK * v_token_stride
        gates += heads * (5 * CHUNK)
        T += heads * (PARTS * CHUNK * CHUNK)
        new += heads * (V * CHUNK)
        states += heads * (V * K)
        # Two chunks ahead, because the next chunk would wait for it.
        over = next_over + 0.0  # an operation: loops that pass a value on as it is are not pipelined
        next_over = tl.load(gates + heads * (5 * CHUNK) + 4 * CHUNK - 1, mask=left > 2 * CHUNK)
    if TRANSITION:
        line = final_state + ((kept if V == 0 else span) * heads + head) * (LINES * K)
        tl.store(
            line + v_row[:, None] * K + k_column[None, :], S, _fits(v_row, LINES, V_BLOCK)[:, None] & in_keys[None, :]
        )
    elif FINAL:
        if SEGMENTED:  # the last of its sequence
            in_state &= first + count == tl.load(begins + sequence + 1)
        tl.store(final_state + (sequence * heads + head) * size + state_place, tl.trans(S), in_state)


@triton.jit
def rule_compose(
    transitions, begins, segment_firsts, initial_state, saved, heads,
    K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, INITIAL: tl.constexpr, SEGMENT: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state at the start of every segment but the first: S ← M S + B, in float32.

    One program per sequence, head and block of V.
    """
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    LINES: tl.constexpr = K + V
    size: tl.constexpr = K_SIZE * V_SIZE
    program = tl.program_id(0)
    sequence = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    begin = tl.load(begins + sequence)
    count = tl.load(begins + sequence + 1) - begin
    if count <= SEGMENT:
        return
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    in_keys = _fits(k_column, K, K_BLOCK)
    in_state = _fits(k_column, K_SIZE, K_BLOCK)[:, None] & _fits(v_row, V_SIZE, V_BLOCK)[None, :]
    state_place = k_column[:, None] * V_SIZE + v_row[None, :]
    S = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    if INITIAL:
        start = initial_state + (sequence * heads + head) * size
        S = tl.trans(tl.load(start + state_place, in_state, other=0.0))
    segment = tl.load(segment_firsts + sequence).to(tl.int64)
    transitions += (segment * heads + head) * (LINES * K)
    saved += ((begin // SEGMENT).to(tl.int64) * heads + head) * size
    M_offset = k_column[:, None] * K + k_column[None, :]
    B_offset = (K + v_row)[:, None] * K + k_column[None, :]
    for _ in tl.range(0, tl.cdiv(count, SEGMENT) - 1, num_stages=STAGES):
        M = tl.load(transitions + M_offset, in_keys[:, None] & in_keys[None, :], other=0.0)
        B = tl.load(transitions + B_offset, _fits(v_row, V, V_BLOCK)[:, None] & in_keys[None, :], other=0.0)
        S = tl.dot(S, M, B, input_precision=PRECISION)
        tl.store(saved + state_place, tl.trans(S), in_state)
        transitions += heads * (LINES * K)
        saved += heads * size


# ------------------------------------------------------------------------------------------------ output


@triton.jit
def rule_output(
    q, k, gates, places, states, new, out, key_heads, scale,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, K_STEP: tl.constexpr, V_BLOCK: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o of one chunk and the value heads of a key head, for V_BLOCK columns.

    Where K_STEP is less than a row, products over K are added up in steps: float32 operands take too many registers.
    """
    CHUNK: tl.constexpr = 64
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    slot = (program // (key_heads * blocks)).to(tl.int64)
    key_head = (program // blocks) % key_heads
    count = tl.load(places + slot * 4 + 1)
    if count == 0:
        return
    first = tl.load(places + slot * 4).to(tl.int64)
    heads = key_heads * GROUP
    row = tl.arange(0, CHUNK)
    k_column = tl.arange(0, K_BLOCK)
    v_column = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    kind = q.dtype.element_ty
    in_keys = _fits(k_column, K, K_BLOCK)
    in_values = _fits(v_column, V, V_BLOCK)
    inside = (row < count)[:, None] & in_keys[None, :]
    q += first * q_token_stride + key_head.to(tl.int64) * q_head_stride
    k += first * k_token_stride + key_head.to(tl.int64) * k_head_stride
    q_offset = row[:, None] * q_token_stride.to(tl.int32)
    k_offset = row[:, None] * k_token_stride.to(tl.int32)
    if K_STEP == K_BLOCK:
        queries = tl.load(q + q_offset + k_column[None, :], inside, other=0)
        keys = tl.load(k + k_offset + k_column[None, :], inside, other=0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    else:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for step in range(0, K_BLOCK, K_STEP):
            column = step + tl.arange(0, K_STEP)[None, :]
            here = (row < count)[:, None] & (column < K)
            queries = tl.load(q + q_offset + column, here, other=0)
            keys = tl.load(k + k_offset + column, here, other=0)
            scores += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    past = row[:, None] >= row[None, :]
    lane = slot * heads + key_head * GROUP
    gates += lane * (5 * CHUNK)
    states += lane * (V * K)
    new += lane * (V * CHUNK)
    out += (first * heads + key_head * GROUP) * V_SIZE
    states_offset = v_column[:, None] * K + k_column[None, :]
    new_offset = v_column[:, None] * CHUNK + row[None, :]
    out_offset = row[:, None] * (heads * V_SIZE) + v_column[None, :]
    for _ in range(GROUP):
        values = tl.load(new + new_offset, in_values[:, None] & tl.full([1, CHUNK], 1, tl.int1), other=0)
        G = tl.load(gates + row)
        from_start = tl.load(gates + 3 * CHUNK + row)
        between = G[:, None] - G[None, :]
        if WIDE:
            low = tl.load(gates + CHUNK + row)
            between += low[:, None] - low[None, :]
        decayed = scores * tl.where(past, tl.exp(tl.where(past, between, 0.0)), 0.0)
        rounded = decayed.to(kind)
        if K_STEP == K_BLOCK:
            state = tl.load(states + states_offset, in_values[:, None] & in_keys[None, :], other=0)
            seen = tl.dot(queries, tl.trans(state), input_precision=PRECISION)
        else:
            seen = tl.zeros([CHUNK, V_BLOCK], tl.float32)
            for step in range(0, K_BLOCK, K_STEP):
                column = step + tl.arange(0, K_STEP)[None, :]
                queries = tl.load(q + q_offset + column, (row < count)[:, None] & (column < K), other=0)
                state_place = states + v_column[:, None] * K + column
                state = tl.load(state_place, in_values[:, None] & (column < K), other=0)
                seen += tl.dot(queries, tl.trans(state), input_precision=PRECISION)
        seen *= from_start[:, None]
        total = tl.dot(rounded, tl.trans(values), seen, input_precision=PRECISION)
        if not WIDE:  # scores in two parts: with nearly equal keys their rounding is most of the error
            rest = (decayed - rounded.to(tl.float32)).to(kind)
            total += tl.dot(rest, tl.trans(values), input_precision=PRECISION)
        total *= scale
        tl.store(out + out_offset, total.to(kind), (row < count)[:, None] & _fits(v_column, V_SIZE, V_BLOCK)[None, :])
        gates += 5 * CHUNK
        states += V * K
        new += V * CHUNK
        out += V_SIZE


_SMALL = Budget(registers=255, shared_bytes=98304)
_LARGE = Budget(registers=255, shared_bytes=232448)

KERNELS = (
    kernels.register(rule_prepare, budget=_SMALL, targets=kernels.NVIDIA),
    kernels.register(rule_scores, budget=_SMALL, targets=kernels.NVIDIA),
    kernels.register(rule_walk, budget=replace(_LARGE, spilled_elsewhere=64), targets=kernels.NVIDIA),
    kernels.register(rule_compose, budget=_LARGE, targets=kernels.NVIDIA),
    kernels.register(rule_output, budget=_LARGE, targets=kernels.NVIDIA),
)
