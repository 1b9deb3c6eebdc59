"""Triton kernels of the gated delta rule's adjoint; notation and layouts of `rule_kernels.py`, P = scale·(q kᵀ ⊙ D).

    turn             W = Tᵀ (e^{Γ−G} ⊙ k),  Tᵀ Pᵀ do                       one program per chunk and key head
    walk_back        Y = Tᵀ Pᵀ do + W dS⁺                                  one per sequence or segment, value head and
                     dS = e^Γ dS⁺ + qᵀ (scale·e^G ⊙ do) − kᵀ (β e^G ⊙ Y)   block of V
    matrices         M, Mᵀ, E + Eᵀ and dv                                  one per chunk and value head
    gradients        dq, dk and the parts of dβ and dg                     two per chunk, key head and block of K
    gate_gradients   dβ and dg from their parts                            one per chunk and value head

The first two are here, matrices and gradients in `rule_gradients_kernels.py`, the last in `rule_closing_kernels.py`.
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
def token_tile(x, first, rows, token_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
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
def decays(G, low, STRICT: tl.constexpr, TURNED: tl.constexpr, WIDE: tl.constexpr):
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
    a = token_tile(left, begin, rows, left_stride, K, K_BLOCK)
    b = token_tile(right, begin, rows, right_stride, K, K_BLOCK)
    return tl.dot(a, tl.trans(b), found, input_precision=PRECISION)


@triton.jit
def products(left, right, rows, left_stride, right_stride, K: tl.constexpr, K_BLOCK: tl.constexpr,
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
        qk = products(q, k, rows, q_token_stride, k_token_stride, K, K_BLOCK, PRECISION) * scale
    if K <= K_BLOCK:
        keys = token_tile(k, 0, rows, k_token_stride, K, K_BLOCK)
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
                keys = token_tile(k, begin, rows, k_token_stride, K, K_BLOCK)
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
            P = qk * decays(G, low, False, False, WIDE)
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


KERNELS = tuple(
    kernels.register(
        kernel,
        budget=Budget(registers=255, shared_bytes=232448, spilled_elsewhere=spilled),
        targets=kernels.NVIDIA,
    )
    for kernel, spilled in {rule_turn: 1280, rule_walk_back: 64}.items()
)
