"""Triton kernels of the gated delta rule's adjoint; notation and layouts of `rule_kernels.py`, P = scale·(q kᵀ ⊙ D).

    turn             W = Tᵀ (e^{Γ−G} ⊙ k),  Tᵀ Pᵀ do                       one program per chunk and key head
    walk_back        Y = Tᵀ Pᵀ do + W dS⁺                                  one per sequence or segment, value head and
                     dS = e^Γ dS⁺ + qᵀ (scale·e^G ⊙ do) − kᵀ (β e^G ⊙ Y)   block of V
    matrices         M, Mᵀ, E + Eᵀ and dv                                  one per chunk and value head
    gradients        dq, dk and the parts of dβ and dg                     two per chunk, key head and block of K
    gate_gradients   dβ and dg from their parts                            one per chunk and value head

Only the walk goes from chunk to chunk, last to first, so it is two products, one after the other, and two beside them.
It holds dSᵀ, as the forward's walk holds Sᵀ: what a product gives becomes the left operand of the next where it is, in
registers. It leaves Yᵀ [chunks, H, V, 64] and dS⁺ᵀ [chunks, H, V, K]; where a forward walks segments of a sequence at
once, so does this, see `rule_compose_back_kernels.py`. A forward cannot put T before the state like this, as w and u
do, because v − k S cancels; nothing does here. Elsewhere a tile's transposed copy is made by the way it is read, or is
the right operand: never `tl.dot(tl.trans(a), b)`, which compilers for Hopper have got wrong in just this place.

Rounded to the storage type, where that is not float32: W, Tᵀ Pᵀ do; β·e^G·Y before its product; M and E; and what one
kernel leaves in memory for the next, S, v', Y and dS⁺. scale·e^G·do meets q in two parts: rounded, it would be nine
tenths of the error of the initial states' gradient. So does dS⁺ meet W, for dv and dβ where the gradient of the final
state is large. Sums are float32. One element has one writer, and every sum an order that K, V and the types fix.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget

# ------------------------------------------------------------------------------------------------- tiles


@triton.jit
def _token_tile(x, first, rows, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns, from `first` on, of the rows of 64 tokens of which `rows` are there."""
    token = tl.arange(0, 64)[:, None]
    column = first + tl.arange(0, BLOCK)[None, :]
    place = x + (token * token_stride.to(tl.int32) + column)
    # Where every column is there no mask is kept for them: registers are what is scarce.
    if SIZE % BLOCK == 0:
        return tl.load(place, token < rows, other=0)
    else:
        return tl.load(place, (token < rows) & (column < SIZE), other=0)


@triton.jit
def _tile(x, first, first_column, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ROW_BLOCK: tl.constexpr,
          COLUMN_BLOCK: tl.constexpr):  # fmt: skip
    """A block of a matrix [ROWS, COLUMNS]."""
    row = first + tl.arange(0, ROW_BLOCK)[:, None]
    column = first_column + tl.arange(0, COLUMN_BLOCK)[None, :]
    if ROWS % ROW_BLOCK == 0 and COLUMNS % COLUMN_BLOCK == 0:
        return tl.load(x + (row * COLUMNS + column))
    else:
        return tl.load(x + (row * COLUMNS + column), (row < ROWS) & (column < COLUMNS), other=0)


@triton.jit
def _turned_tile(x, first, ROWS: tl.constexpr, ROW_BLOCK: tl.constexpr):
    """The transpose of some rows of a matrix [ROWS, 64]."""
    row = first + tl.arange(0, ROW_BLOCK)[None, :]
    column = tl.arange(0, 64)[:, None]
    if ROWS % ROW_BLOCK == 0:
        return tl.load(x + (row * 64 + column))
    else:
        return tl.load(x + (row * 64 + column), row < ROWS, other=0)


@triton.jit
def _decays(G, low, STRICT: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr):
    """e^{G_i−G_j} for i ≥ j, or i > j, else 0; TURNED: its transpose. `low` is what G lost in rounding."""
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    between = G[:, None] - G[None, :]
    if WIDE:
        between += low[:, None] - low[None, :]
    if TURNED:
        between = -between
        past = j > i if STRICT else j >= i
    else:
        past = i > j if STRICT else i >= j
    return tl.exp(tl.where(past, between, float("-inf")))


@triton.jit
def _add_product(left, right, begin, rows, left_stride, right_stride, found, K: tl.constexpr, K_BLOCK: tl.constexpr,
                 PRECISION: tl.constexpr):  # fmt: skip
    """Adds what K_BLOCK columns from `begin` on give."""
    a = _token_tile(left, begin, rows, left_stride, K, K_BLOCK)
    b = _token_tile(right, begin, rows, right_stride, K, K_BLOCK)
    return tl.dot(a, tl.trans(b), found, input_precision=PRECISION)


@triton.jit
def _products(left, right, rows, left_stride, right_stride, K: tl.constexpr, K_BLOCK: tl.constexpr,
              PRECISION: tl.constexpr):  # fmt: skip
    """Every row of one tensor of keys or queries times every row of another."""
    found = tl.zeros([64, 64], tl.float32)
    if left.dtype.element_ty == tl.float32:  # rolled: float32 operands have registers for one step at a time
        for begin in tl.range(0, K, K_BLOCK):
            found = _add_product(left, right, begin, rows, left_stride, right_stride, found, K, K_BLOCK, PRECISION)
    else:
        for begin in tl.static_range(0, K, K_BLOCK):
            found = _add_product(left, right, begin, rows, left_stride, right_stride, found, K, K_BLOCK, PRECISION)
    return found


# -------------------------------------------------------------------------------------- before the walk back


@triton.jit
def rule_turn(
    q, k, do, gates, places, T, W, local, key_heads, scale,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, do_token_stride, do_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What of Y does not go from chunk to chunk, for every value head of a key head.

        W = Tᵀ (e^{Γ−G} ⊙ k) [64, K],  local = Tᵀ Pᵀ do, transposed [V, 64]

    Matrices of the chunk, T, P and P T, are two numbers of the storage type each.
    """
    CHUNK: tl.constexpr = 64
    slot = (tl.program_id(0) // key_heads).to(tl.int64)
    key_head = (tl.program_id(0) % key_heads).to(tl.int64)
    rows = tl.load(places + slot * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + slot * 4).to(tl.int64)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    i = token[:, None]
    j = token[None, :]
    q += at * q_token_stride + key_head * q_head_stride
    k += at * k_token_stride + key_head * k_head_stride
    do += at * do_token_stride + key_head * GROUP * do_head_stride
    lane = (slot * key_heads + key_head) * GROUP
    gates += lane * (5 * CHUNK)
    T += lane * (PARTS * CHUNK * CHUNK)
    W += lane * (CHUNK * K)
    local += lane * (V * CHUNK)
    if UPSTREAM:
        qk = _products(q, k, rows, q_token_stride, k_token_stride, K, K_BLOCK, PRECISION) * scale
    if K <= K_BLOCK:
        keys = _token_tile(k, 0, rows, k_token_stride, K, K_BLOCK)
    for member in tl.range(0, GROUP, num_stages=STAGES, disable_licm=True):
        own_gates = gates + member * (5 * CHUNK)
        own_T = T + member * (PARTS * CHUNK * CHUNK)
        turned = tl.load(own_T + (j * CHUNK + i)).to(tl.float32)
        if PARTS == 2:
            turned += tl.load(own_T + CHUNK * CHUNK + (j * CHUNK + i)).to(tl.float32)
        turned = tl.where(i == j, 1.0, turned) * tl.load(own_gates + 4 * CHUNK + token)[None, :]
        high = turned.to(kind)
        rest = (turned - high.to(tl.float32)).to(kind)
        for begin in tl.static_range(0, K, K_BLOCK):
            if K > K_BLOCK:
                keys = _token_tile(k, begin, rows, k_token_stride, K, K_BLOCK)
            of_keys = tl.dot(high, keys, input_precision=PRECISION)
            if not WIDE:
                of_keys += tl.dot(rest, keys, input_precision=PRECISION)
            key = begin + tl.arange(0, K_BLOCK)[None, :]
            place = W + member * (CHUNK * K) + (i * K + key)
            if K % K_BLOCK == 0:
                tl.store(place, of_keys.to(kind))
            else:
                tl.store(place, of_keys.to(kind), (i < CHUNK) & (key < K))
        if UPSTREAM:
            G = tl.load(own_gates + token)
            low = G
            if WIDE:
                low = tl.load(own_gates + CHUNK + token)
            P = qk * _decays(G, low, False, False, WIDE)
            solve = tl.load(own_T + (i * CHUNK + j))
            high = P.to(kind)
            both = tl.dot(high, solve, P, input_precision=PRECISION)
            if not WIDE:
                both += tl.dot((P - high.to(tl.float32)).to(kind), solve, input_precision=PRECISION)
            if PARTS == 2:
                both += tl.dot(high, tl.load(own_T + CHUNK * CHUNK + (i * CHUNK + j)), input_precision=PRECISION)
            high = both.to(kind)
            rest = (both - high.to(tl.float32)).to(kind)
            for begin in tl.static_range(0, V, V_BLOCK):
                column = begin + tl.arange(0, V_BLOCK)[:, None]
                place = do + member * do_head_stride + (j * do_token_stride.to(tl.int32) + column)
                upstream = tl.load(place, (j < rows) & (column < V), other=0)
                found = tl.dot(upstream, high, input_precision=PRECISION)
                if not WIDE:
                    found += tl.dot(upstream, rest, input_precision=PRECISION)
                there = (column < V) & (j < CHUNK)
                tl.store(local + member * (V * CHUNK) + (column * CHUNK + j), found.to(kind), there)


# ------------------------------------------------------------------------------------------ the walk back


@triton.jit
def rule_walk_back(
    q, k, do, gates, W, local, spans, begins, firsts, dfinal_state, dinitial_state, dstarts, Y, dstates, heads, scale,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, do_token_stride, do_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, FINAL: tl.constexpr,
    INITIAL: tl.constexpr, SEGMENTED: tl.constexpr, TRANSITION: tl.constexpr, SEGMENT: tl.constexpr,
    BACK: tl.constexpr, WHOLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one span and value head, for V_BLOCK columns of V and all of K; transposed.

    A span is a whole sequence, of up to WHOLE tokens where that is not 0, or (SEGMENTED) a segment of BACK tokens of a
    longer one: the last ends with the gradient of the final state, any other with what `dstarts`, [places, H, V, K] in
    float32, has of the segment after it. With TRANSITION the others end with 0, and what every segment but the first
    then begins with is all that is stored: in `dstarts`. `spans` are of SEGMENT tokens.
    UPSTREAM, FINAL: whether there is a gradient of the outputs, of the final state. INITIAL: whether that of the
    initial state is wanted.
    """
    CHUNK: tl.constexpr = 64
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    span = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    if SEGMENTED:
        if tl.load(spans + span * 4 + 1) == 0:
            return
        sequence = tl.load(spans + span * 4 + 2).to(tl.int64)
        index = tl.load(spans + span * 4 + 3)
        begin = tl.load(begins + sequence)
        count = tl.load(begins + sequence + 1) - begin
        if (count <= WHOLE) | (index % (BACK // SEGMENT) != 0):
            return
        if TRANSITION:  # noqa: SIM102  (a constant, and what only the GPU knows)
            if index == 0:
                return
        first = (begin + index * SEGMENT).to(tl.int64)
        ends_here = count - index * SEGMENT <= BACK
        count = tl.minimum(count - index * SEGMENT, BACK)
        slot = tl.load(firsts + sequence) + index * (SEGMENT // CHUNK)
        # A sequence has a place for each of its segments but the first, and no two meet: see `saved_states`.
        after = (begin // BACK + index // (BACK // SEGMENT)).to(tl.int64)
    else:
        sequence = span
        first = tl.load(begins + span).to(tl.int64)
        count = tl.load(begins + span + 1) - tl.load(begins + span)
        slot = tl.load(firsts + span)
        if WHOLE > 0:  # noqa: SIM102
            if count > WHOLE:
                return
    chunks = tl.cdiv(count, CHUNK)
    last = tl.maximum(chunks - 1, 0)
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    row = tl.arange(0, CHUNK)
    kind = k.dtype.element_ty

    state_place = (sequence * heads + head) * (K_SIZE * V_SIZE)
    dS = tl.zeros([V_BLOCK, K_BLOCK], tl.float32)
    if FINAL:
        in_state = (k_column < K_SIZE)[:, None] & (v_row < V_SIZE)[None, :]
        if SEGMENTED:
            in_state &= ends_here
        given = dfinal_state + state_place + (k_column[:, None] * V_SIZE + v_row[None, :])
        dS = tl.trans(tl.load(given, in_state, other=0.0))
    if SEGMENTED and not TRANSITION:  # noqa: SIM102
        if not ends_here:
            end = dstarts + (after * heads + head) * (V * K)
            there = (v_row < V)[:, None] & (k_column < K)[None, :]
            dS = tl.load(end + (v_row[:, None] * K + k_column[None, :]), there, other=0.0)

    # Bases move from chunk to chunk, and offsets stay: 32 bits each.
    token = first + last.to(tl.int64) * CHUNK
    q += token * q_token_stride + (head // GROUP).to(tl.int64) * q_head_stride
    k += token * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
    do += token * do_token_stride + head.to(tl.int64) * do_head_stride
    lane = (slot + last).to(tl.int64) * heads + head
    gates += lane * (5 * CHUNK)
    W += lane * (CHUNK * K)
    local += lane * (V * CHUNK)
    Y += lane * (V * CHUNK)
    dstates += lane * (V * K)
    q_offset = row[:, None] * q_token_stride.to(tl.int32) + k_column[None, :]
    k_offset = row[:, None] * k_token_stride.to(tl.int32) + k_column[None, :]
    W_offset = row[:, None] * K + k_column[None, :]
    do_offset = row[None, :] * do_token_stride.to(tl.int32) + v_row[:, None]
    values_offset = v_row[:, None] * CHUNK + row[None, :]
    dstates_offset = v_row[:, None] * K + k_column[None, :]
    # Masks for what is there always cost registers: none where blocks divide sizes.
    EVEN: tl.constexpr = K % K_BLOCK == 0 and V % V_BLOCK == 0
    in_keys = (k_column < K)[None, :]
    in_values = (v_row < V)[:, None]
    rows = count - last * CHUNK
    over = tl.load(gates + 4 * CHUNK - 1, mask=count > 0, other=0.0)
    for step in tl.range(0, chunks, num_stages=STAGES, disable_licm=True):
        narrow = dS.to(kind)
        if EVEN:
            if not TRANSITION:
                tl.store(dstates + dstates_offset, narrow)
            turned = tl.load(W + W_offset)
            keys = tl.load(k + k_offset, (row < rows)[:, None], other=0)
        else:
            if not TRANSITION:
                tl.store(dstates + dstates_offset, narrow, in_values & in_keys)
            turned = tl.load(W + W_offset, (row < CHUNK)[:, None] & in_keys, other=0)
            keys = tl.load(k + k_offset, (row < rows)[:, None] & in_keys, other=0)
        strength = tl.load(gates + 2 * CHUNK + row)
        from_start = tl.load(gates + 3 * CHUNK + row)
        found = tl.zeros([V_BLOCK, CHUNK], tl.float32)
        if kind != tl.float32:
            found = tl.dot((dS - narrow.to(tl.float32)).to(kind), tl.trans(turned), input_precision=PRECISION)
        found = tl.dot(narrow, tl.trans(turned), found, input_precision=PRECISION)
        dS *= over
        if UPSTREAM:
            if EVEN:
                found += tl.load(local + values_offset).to(tl.float32)
                upstream = tl.load(do + do_offset, (row < rows)[None, :], other=0)
                queries = tl.load(q + q_offset, (row < rows)[:, None], other=0)
            else:
                found += tl.load(local + values_offset, in_values & (row < CHUNK)[None, :], other=0).to(tl.float32)
                upstream = tl.load(do + do_offset, in_values & (row < rows)[None, :], other=0)
                queries = tl.load(q + q_offset, (row < rows)[:, None] & in_keys, other=0)
            grown = upstream.to(tl.float32) * (from_start * scale)[None, :]
            high = grown.to(kind)
            if kind != tl.float32:
                dS = tl.dot((grown - high.to(tl.float32)).to(kind), queries, dS, input_precision=PRECISION)
            dS = tl.dot(high, queries, dS, input_precision=PRECISION)
        if TRANSITION:
            pass
        elif EVEN:
            tl.store(Y + values_offset, found.to(kind))
        else:
            tl.store(Y + values_offset, found.to(kind), in_values & (row < CHUNK)[None, :])
        dS = tl.dot((found * -(strength * from_start)[None, :]).to(kind), keys, dS, input_precision=PRECISION)
        rows = CHUNK
        q -= CHUNK * q_token_stride
        k -= CHUNK * k_token_stride
        gates -= heads * (5 * CHUNK)
        W -= heads * (CHUNK * K)
        local -= heads * (V * CHUNK)
        do -= CHUNK * do_token_stride
        Y -= heads * (V * CHUNK)
        dstates -= heads * (V * K)
        # A chunk ahead, because the next product would wait for it.
        over = tl.load(gates + 4 * CHUNK - 1, mask=step + 1 < chunks, other=0.0)
    # 0, and known after the loop alone: or places would be kept in registers through it.
    later = tl.minimum(rows, 0)
    if TRANSITION:
        place = dstarts + ((after - 1) * heads + head) * (V * K) + later
        tl.store(place + (v_row[:, None] * K + k_column[None, :]), dS, (v_row < V)[:, None] & (k_column < K)[None, :])
    elif INITIAL:
        program += later
        head = (program // blocks) % heads
        sequence = (program // (heads * blocks)).to(tl.int64)
        in_state = (k_column < K_SIZE)[None, :] & (v_row < V_SIZE)[:, None]
        if SEGMENTED:
            span = sequence
            sequence = tl.load(spans + span * 4 + 2).to(tl.int64)
            in_state &= tl.load(spans + span * 4 + 3) == 0
        place = dinitial_state + (sequence * heads + head) * (K_SIZE * V_SIZE)
        tl.store(place + (k_column[None, :] * V_SIZE + v_row[:, None]), dS, in_state)


# ------------------------------------------------------------------------------------------- the gradients


@triton.jit
def _passing(through, kind: tl.constexpr, PRECISION: tl.constexpr):
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


@triton.jit
def rule_matrices(
    q, k, v, do, gates, places, new, Y, M, M_turned, E, dv, passing, besides, key_heads, columns, scale,
    q_token_stride, q_head_stride, k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    do_token_stride, do_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, NEED_QK: tl.constexpr, NEED_V: tl.constexpr,
    NEED_GATES: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The chunk's matrices of one value head, for dq and dk: M = scale·(do v'ᵀ) ⊙ D, Mᵀ, and E + Eᵀ with
    E = β ⊙ N, N = −(Y v'ᵀ) ⊙ D°; each, and each transpose, by a product of its own. And dv = β ⊙ Y.

    For dg what M and E send through D, in `passing` [chunks, H, 64]; for dβ the rows of Y ⊙ v and N ⊙ k kᵀ, summed, in
    `besides` [chunks, H, 64]. `columns` is V as a number the compiler does not know: loops it unrolls have no registers
    left.
    """
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    heads = key_heads * GROUP
    slot = program // heads
    head = program % heads
    rows = tl.load(places + slot.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + slot.to(tl.int64) * 4)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    i = token[:, None]
    j = token[None, :]
    gates += program.to(tl.int64) * (5 * CHUNK)
    new += program.to(tl.int64) * (V * CHUNK)
    Y += program.to(tl.int64) * (V * CHUNK)
    v += at.to(tl.int64) * v_token_stride + head.to(tl.int64) * v_head_stride
    do += at.to(tl.int64) * do_token_stride + head.to(tl.int64) * do_head_stride
    do_new = tl.zeros([CHUNK, CHUNK], tl.float32)
    new_do = tl.zeros([CHUNK, CHUNK], tl.float32)
    Y_new = tl.zeros([CHUNK, CHUNK], tl.float32)
    new_Y = tl.zeros([CHUNK, CHUNK], tl.float32)
    Y_v = tl.zeros([CHUNK], tl.float32)
    for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
        Y_tile = _turned_tile(Y, begin, V, V_BLOCK)
        if NEED_QK or NEED_GATES:
            new_tile = _turned_tile(new, begin, V, V_BLOCK)
            Y_new = tl.dot(Y_tile, tl.trans(new_tile), Y_new, input_precision=PRECISION)
            if NEED_QK:
                new_Y = tl.dot(new_tile, tl.trans(Y_tile), new_Y, input_precision=PRECISION)
            if UPSTREAM:
                do_tile = _token_tile(do, begin, rows, do_token_stride, V, V_BLOCK)
                do_new = tl.dot(do_tile, tl.trans(new_tile), do_new, input_precision=PRECISION)
                if NEED_QK:
                    new_do = tl.dot(new_tile, tl.trans(do_tile), new_do, input_precision=PRECISION)
        wide = Y_tile.to(tl.float32)
        if NEED_V:
            strength = tl.load(gates + 2 * CHUNK + token)
            column = begin + tl.arange(0, V_BLOCK)[None, :]
            place = dv + (at.to(tl.int64) * heads + head) * V_SIZE + (i * (heads * V_SIZE) + column)
            tl.store(place, (wide * strength[:, None]).to(kind), (i < rows) & (column < V_SIZE))
        if NEED_GATES:
            v_tile = _token_tile(v, begin, rows, v_token_stride, V, V_BLOCK)
            Y_v += tl.sum(wide * v_tile.to(tl.float32), 1)
    if NEED_QK or NEED_GATES:
        beta = tl.load(gates + 2 * CHUNK + token)
        G = tl.load(gates + token)
        low = G
        if WIDE:
            low = tl.load(gates + CHUNK + token)
        if NEED_QK:
            if UPSTREAM:
                tl.store(
                    M_turned + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j),
                    (new_do * (_decays(G, low, False, True, WIDE) * scale)).to(kind),
                )
            new_Y *= _decays(G, low, True, True, WIDE) * beta[None, :]
        if UPSTREAM:
            do_new *= _decays(G, low, False, False, WIDE) * scale
            if NEED_QK:
                tl.store(M + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j), do_new.to(kind))
        Y_new *= -_decays(G, low, True, False, WIDE)
        if NEED_QK:
            tl.store(
                E + program.to(tl.int64) * (CHUNK * CHUNK) + (i * CHUNK + j), (Y_new * beta[:, None] - new_Y).to(kind)
            )
        if NEED_GATES:
            k += at.to(tl.int64) * k_token_stride + (head // GROUP).to(tl.int64) * k_head_stride
            q += at.to(tl.int64) * q_token_stride + (head // GROUP).to(tl.int64) * q_head_stride
            Y_new *= _products(k, k, rows, k_token_stride, k_token_stride, K, K_BLOCK, PRECISION)
            tl.store(besides + program.to(tl.int64) * CHUNK + token, Y_v + tl.sum(Y_new, 1))
            Y_new *= beta[:, None]
            if UPSTREAM:
                do_new *= _products(q, k, rows, q_token_stride, k_token_stride, K, K_BLOCK, PRECISION)
                Y_new += tl.where(i > j, do_new, 0.0)
            tl.store(passing + program.to(tl.int64) * CHUNK + token, _passing(Y_new, kind, PRECISION))


@triton.jit
def _unnormalized(y, gradient, factor, first_key, rows, token_stride, K: tl.constexpr, K_BLOCK: tl.constexpr):
    """The gradient of x for one of y = factor·x: factor·(dy − y (y·dy))."""
    wide = _token_tile(y, first_key, rows, token_stride, K, K_BLOCK).to(tl.float32)
    along = tl.sum(wide * gradient, 1)
    return (gradient - wide * along[:, None]) * factor[:, None]


@triton.jit
def _along(x, y, kind: tl.constexpr, PRECISION: tl.constexpr):
    """The rows of float32 x, rounded, times the rows of y, one each: the diagonal of x yᵀ.

    A product, though most of it is thrown away: y is in shared memory for others, and in registers there is no room.
    """
    i = tl.arange(0, 64)[:, None]
    j = tl.arange(0, 64)[None, :]
    found = tl.dot(x.to(kind), tl.trans(y), input_precision=PRECISION)
    return tl.sum(tl.where(i == j, found, 0.0), 1)


@triton.jit
def _store_gradient(
    out, gradient, x, factors, at, rows, key_head, key_heads, first_key, token_stride, head_stride,
    NORMALIZED: tl.constexpr, K: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rounds and stores the gradient of a chunk's q or k, taken back through their normalisation where there is one."""
    # 0, and no constant: what has it is found here, not kept in registers since the caller had the same places.
    nothing = tl.minimum(rows, 0)
    token = tl.arange(0, 64) + nothing
    if NORMALIZED == 1:
        place = factors + at.to(tl.int64) * key_heads + key_head + token * key_heads
        x += at.to(tl.int64) * token_stride + key_head.to(tl.int64) * head_stride
        factor = tl.load(place, token < rows, other=0)
        gradient = _unnormalized(x, gradient, factor, first_key + nothing, rows, token_stride, K, K_BLOCK)
    key = first_key + tl.arange(0, K_BLOCK)[None, :]
    place = out + (at.to(tl.int64) * key_heads + key_head) * K_SIZE + (token[:, None] * (key_heads * K_SIZE) + key)
    tl.store(place, gradient.to(out.dtype.element_ty), (token[:, None] < rows) & (key < K_SIZE))


@triton.jit
def rule_gradients(
    q, k, do, gates, places, states, dstates, new, Y, M, M_turned, E, dq, dk, parts, kept, q_factors, k_factors,
    key_heads, columns, scale, q_token_stride, q_head_stride, k_token_stride, k_head_stride,
    do_token_stride, do_head_stride,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, K_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, STAGES: tl.constexpr, UPSTREAM: tl.constexpr, NEED_Q: tl.constexpr, NEED_K: tl.constexpr,
    NEED_GATES: tl.constexpr, NORMALIZED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk and key head, K_BLOCK columns of K: dq by one program, dk by the next.

        dq = Σ over value heads of scale·e^G ⊙ (do Sᵀ) + M k
        dk = Σ over value heads of Mᵀ q + (E + Eᵀ) k − β e^G ⊙ (Y Sᵀ) + e^{Γ−G} ⊙ (v' dS⁺ᵀ)

    Each leaves what dg and dβ need of it, sums over the block's columns, in `parts` [chunks, H, K blocks, 3, 64]: of
    q·(scale e^G do Sᵀ), of k·(e^G Y Sᵀ), of k·(e^{Γ−G} v' dS⁺ᵀ); and ⟨S, dS⁺⟩ in `kept` [chunks, H, K blocks].

    NORMALIZED is 1 where q and k are normalised copies and the block is all of K: gradients pass through the norms.
    """
    CHUNK: tl.constexpr = 64
    K_BLOCKS: tl.constexpr = (K + K_BLOCK - 1) // K_BLOCK
    program = tl.program_id(0)
    k_block = (program // 2) % K_BLOCKS
    key_head = (program // (2 * K_BLOCKS)) % key_heads
    slot = program // (2 * K_BLOCKS * key_heads)
    rows = tl.load(places + slot.to(tl.int64) * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + slot.to(tl.int64) * 4)
    kind = k.dtype.element_ty
    token = tl.arange(0, CHUNK)
    first_key = k_block * K_BLOCK
    lane = (slot * key_heads + key_head) * GROUP
    keys = _token_tile(
        k + at.to(tl.int64) * k_token_stride + key_head.to(tl.int64) * k_head_stride,
        first_key,
        rows,
        k_token_stride,
        K,
        K_BLOCK,
    )
    queries = _token_tile(
        q + at.to(tl.int64) * q_token_stride + key_head.to(tl.int64) * q_head_stride,
        first_key,
        rows,
        q_token_stride,
        K,
        K_BLOCK,
    )
    gradient = tl.zeros([CHUNK, K_BLOCK], tl.float32)
    if program % 2 == 0:
        if UPSTREAM and (NEED_Q or NEED_GATES):
            do += at.to(tl.int64) * do_token_stride + (key_head * GROUP).to(tl.int64) * do_head_stride
            for member in tl.range(0, GROUP, disable_licm=True):
                own = (lane + member).to(
                    tl.int64
                )  # places are found from it, each where it is used: registers are scarce
                do_S = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    do_tile = _token_tile(do + member * do_head_stride, begin, rows, do_token_stride, V, V_BLOCK)
                    S_tile = _tile(states + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    do_S = tl.dot(do_tile, S_tile, do_S, input_precision=PRECISION)
                do_S *= (tl.load(gates + own * (5 * CHUNK) + 3 * CHUNK + token) * scale)[:, None]
                gradient += do_S
                if NEED_GATES:
                    of_queries = _along(do_S, queries, kind, PRECISION)
                    tl.store(parts + (own * K_BLOCKS + k_block) * (3 * CHUNK) + token, of_queries)
                if NEED_Q:
                    gradient += tl.dot(
                        tl.load(M + own * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :])),
                        keys,
                        input_precision=PRECISION,
                    )
        if NEED_Q:
            _store_gradient(
                dq, gradient, q, q_factors, at, rows, key_head, key_heads, first_key, q_token_stride, q_head_stride,
                NORMALIZED, K, K_SIZE, K_BLOCK,
            )  # fmt: skip
    else:
        if NEED_K or NEED_GATES:
            for member in tl.range(0, GROUP, disable_licm=True):
                own = (lane + member).to(tl.int64)
                Y_S = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    Y_tile = _turned_tile(Y + own * (V * CHUNK), begin, V, V_BLOCK)
                    S_tile = _tile(states + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    Y_S = tl.dot(Y_tile, S_tile, Y_S, input_precision=PRECISION)
                Y_S *= tl.load(gates + own * (5 * CHUNK) + 3 * CHUNK + token)[:, None]
                gradient -= Y_S * tl.load(gates + own * (5 * CHUNK) + 2 * CHUNK + token)[:, None]
                if NEED_GATES:
                    of_keys = _along(Y_S, keys, kind, PRECISION)
                    tl.store(parts + (own * K_BLOCKS + k_block) * (3 * CHUNK) + CHUNK + token, of_keys)
                new_dS = tl.zeros([CHUNK, K_BLOCK], tl.float32)
                S_dS = tl.zeros([V_BLOCK], tl.float32)
                for begin in tl.range(0, columns, V_BLOCK, num_stages=STAGES, disable_licm=True):
                    new_tile = _turned_tile(new + own * (V * CHUNK), begin, V, V_BLOCK)
                    dS_tile = _tile(dstates + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                    new_dS = tl.dot(new_tile, dS_tile, new_dS, input_precision=PRECISION)
                    if NEED_GATES:
                        S_tile = _tile(states + own * (V * K), begin, first_key, V, K, V_BLOCK, K_BLOCK)
                        S_dS += tl.sum(S_tile.to(tl.float32) * dS_tile.to(tl.float32), 1)
                new_dS *= tl.load(gates + own * (5 * CHUNK) + 4 * CHUNK + token)[:, None]
                gradient += new_dS
                if NEED_GATES:
                    of_keys = _along(new_dS, keys, kind, PRECISION)
                    tl.store(parts + (own * K_BLOCKS + k_block) * (3 * CHUNK) + 2 * CHUNK + token, of_keys)
                    tl.store(kept + own * K_BLOCKS + k_block, tl.sum(S_dS, 0))
                if NEED_K:
                    gradient += tl.dot(
                        tl.load(E + own * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :])),
                        keys,
                        input_precision=PRECISION,
                    )
                    if UPSTREAM:
                        gradient += tl.dot(
                            tl.load(M_turned + own * (CHUNK * CHUNK) + (token[:, None] * CHUNK + token[None, :])),
                            queries,
                            input_precision=PRECISION,
                        )
        if NEED_K:
            _store_gradient(
                dk, gradient, k, k_factors, at, rows, key_head, key_heads, first_key, k_token_stride, k_head_stride,
                NORMALIZED, K, K_SIZE, K_BLOCK,
            )  # fmt: skip


_SPILLED_ELSEWHERE = {rule_turn: 1280, rule_walk_back: 64, rule_matrices: 384, rule_gradients: 128}

KERNELS = tuple(
    kernels.register(
        kernel,
        budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=spilled),
        targets=kernels.NVIDIA,
    )
    for kernel, spilled in _SPILLED_ELSEWHERE.items()
)
