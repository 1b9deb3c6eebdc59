"""Triton kernels of the expert layer: grouped matrix products that gather their rows themselves.

Rows are the pairs of a token and one of its slots, N = T·k of them, grouped by expert: expert e has the rows from
offsets[e] to offsets[e + 1], in the order of their tokens. A product over rows is cut into tiles of ROWS rows of one
expert. The tiles of expert e have the slots from offsets[e] // ROWS + e on: at most ⌊N / ROWS⌋ + E of them in all,
known before any count is, so that grids need no waiting for the device. A slot without rows ends at once.

    up             [g; u] = gate_up[e] · x[token],  h = silu(g) ⊙ u                  reads x by token
    product        rows = h · down[e]ᵀ, or dgu · gate_up[e], some columns at a time
    sum_slots      y[t] = Σ_j weights[t, j] · rows[row of (t, j)], in the order of slots
    down_adjoint   dh = dy[token] · down[e], then through the gate                   reads dy by token
    outer          dgate_up[e] = dguᵀ · x[token], ddown[e] = dy[token]ᵀ · (w ⊙ h)    reads x, dy by token

One element has one writer. What a sum over DEPTH-sized steps adds, and in which order, is fixed by the sizes of the
layer (and, in `outer`, by the expert's own rows), never by where a row stands in its tile. Rows past the end of an
expert repeat its last one, and are not stored; in `outer`, where they would be added, they are zero on both sides.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.ops.activation.kernels import silu_parts

# ----------------------------------------------------------------------------------------- who is where


@triton.jit
def moe_experts_rows(
    permutation, weights, tokens, row_weights, count, token_stride, slot_stride,
    SLOTS: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of each row, and (WEIGHTED) its routing weight."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < count
    entry = tl.load(permutation + row, inside, other=0)
    token = (entry // SLOTS).to(tl.int32)
    tl.store(tokens + row, token, inside)
    if WEIGHTED:
        place = weights + token.to(tl.int64) * token_stride + (entry % SLOTS).to(tl.int64) * slot_stride
        weight = tl.load(place, inside, other=0)
        tl.store(row_weights + row, weight.to(row_weights.dtype.element_ty), inside)


@triton.jit
def moe_experts_tiles(
    offsets, tile_expert, tile_begin, tile_end, experts, steps, slots, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """The expert of each slot, or −1, and its rows."""
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The last expert whose first slot is not past this one.
    low = tl.zeros([BLOCK], tl.int32)
    high = low + (experts - 1)
    for _ in range(steps):
        middle = (low + high + 1) >> 1
        fits = tl.load(offsets + middle).to(tl.int32) // ROWS + middle <= slot
        low = tl.where(fits, middle, low)
        high = tl.where(fits, high, middle - 1)
    first = tl.load(offsets + low).to(tl.int32)
    end = tl.load(offsets + low + 1).to(tl.int32)
    begin = first + (slot - first // ROWS - low) * ROWS
    inside = slot < slots
    tl.store(tile_expert + slot, tl.where(begin < end, low, -1), inside)
    tl.store(tile_begin + slot, begin, inside)
    tl.store(tile_end + slot, tl.minimum(begin + ROWS, end), inside)


@triton.jit
def tile_of_program(column_tiles, GROUP: tl.constexpr):
    """The slot and the column tile of this program: GROUP slots share columns of weights while these are in cache."""
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    within = program % (GROUP * column_tiles)
    return group * GROUP + within % GROUP, within // GROUP


# ------------------------------------------------------------------------------------------- the products


@triton.jit
def moe_experts_up(
    x, gate_up, tokens, tile_expert, tile_begin, tile_end, gu, h,
    D: tl.constexpr, INNER: tl.constexpr, KEEP: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """g and u, rounded, side by side in gu (where KEEP), and h = silu(g)·u of the rounded ones."""
    slot, column_tile = tile_of_program(tl.cdiv(INNER, COLUMNS), GROUP)
    expert = tl.load(tile_expert + slot)
    if expert < 0:
        return
    begin = tl.load(tile_begin + slot)
    end = tl.load(tile_end + slot)
    row = begin + tl.arange(0, ROWS)
    token = tl.load(tokens + tl.minimum(row, end - 1)).to(tl.int64)
    # COLUMNS rows of the gate's weights, then as many of up's: one product computes both.
    lane = tl.arange(0, 2 * COLUMNS)
    unit = tl.minimum(column_tile * COLUMNS + lane % COLUMNS, INNER - 1) + (lane // COLUMNS) * INNER
    depth = tl.arange(0, DEPTH)
    left = x + token[:, None] * D + depth[None, :]
    right = gate_up + expert.to(tl.int64) * (2 * INNER * D) + (unit * D)[None, :] + depth[:, None]
    both = tl.zeros([ROWS, 2 * COLUMNS], tl.float64 if x.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, D, DEPTH):
        if D % DEPTH == 0:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, (depth < D - start)[None, :], other=0)
            b = tl.load(right, (depth < D - start)[:, None], other=0)
        both = tl.dot(a, b, both, input_precision="ieee", out_dtype=both.dtype)
        left += DEPTH
        right += DEPTH
    g, u = halves(both)
    g = g.to(gu.dtype.element_ty)
    u = u.to(gu.dtype.element_ty)
    NARROW: tl.constexpr = h.dtype.element_ty.primitive_bitwidth == 16
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < end)[:, None] & (column < INNER)[None, :]
    place = row.to(tl.int64)[:, None]
    if KEEP:
        tl.store(gu + place * (2 * INNER) + column[None, :], g, mask)
        tl.store(gu + place * (2 * INNER) + (column + INNER)[None, :], u, mask)
    value, _, d = silu_parts(g.to(both.dtype), NARROW, False)
    value = value * (u.to(both.dtype) * d)
    tl.store(h + place * INNER + column[None, :], value.to(h.dtype.element_ty), mask)


@triton.jit
def moe_experts_product(
    rows, weight, tile_expert, tile_begin, tile_end, out, chunk,
    K: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, BY_COLUMN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[row, c] = Σ_k rows[row, k] · weight[e][k, chunk·WIDTH + c], for WIDTH columns of N.

    BY_COLUMN, the weight of an expert is [N, K] and read transposed; else it is [K, N].
    """
    slot, column_tile = tile_of_program(tl.cdiv(WIDTH, COLUMNS), GROUP)
    expert = tl.load(tile_expert + slot)
    if expert < 0:
        return
    begin = tl.load(tile_begin + slot)
    end = tl.load(tile_end + slot)
    row = begin + tl.arange(0, ROWS)
    place = tl.minimum(row, end - 1).to(tl.int64)
    inner = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    column = chunk * WIDTH + inner
    depth = tl.arange(0, DEPTH)
    left = rows + place[:, None] * K + depth[None, :]
    right = weight + expert.to(tl.int64) * (K * N)
    if BY_COLUMN:
        right += (tl.minimum(column, N - 1) * K)[None, :] + depth[:, None]
    else:
        right += column[None, :] + (depth * N)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, K, DEPTH):
        if K % DEPTH == 0:
            a = tl.load(left)
        else:
            a = tl.load(left, (depth < K - start)[None, :], other=0)
        if BY_COLUMN:
            if K % DEPTH == 0:
                b = tl.load(right)
            else:
                b = tl.load(right, (depth < K - start)[:, None], other=0)
            right += DEPTH
        else:
            if K % DEPTH == 0 and WIDTH % COLUMNS == 0 and N % WIDTH == 0:
                b = tl.load(right)
            else:
                b = tl.load(right, (depth < K - start)[:, None] & (column < N)[None, :], other=0)
            right += DEPTH * N
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
        left += DEPTH
    mask = (row < end)[:, None] & ((inner < WIDTH) & (column < N))[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * WIDTH + inner[None, :], total.to(out.dtype.element_ty), mask)


@triton.jit
def halves(both):
    """The left and the right half of the columns."""
    rows: tl.constexpr = both.shape[0]
    columns: tl.constexpr = both.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(both, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def gate_adjoint(
    dh, gu, weight, row, end, first_column, dgu, scaled, INNER: tl.constexpr, HIDDEN: tl.constexpr, SCALED: tl.constexpr
):
    """Stores dgu and w·h of some columns, and gives h·dh of them."""
    NARROW: tl.constexpr = gu.dtype.element_ty.primitive_bitwidth == 16
    column = first_column + tl.arange(0, dh.shape[1])
    inside = (row < end)[:, None] & (column < INNER)[None, :]
    place = row.to(tl.int64)[:, None]
    g = tl.load(gu + place * (2 * INNER) + column[None, :], inside, other=0).to(dh.dtype)
    u = tl.load(gu + place * (2 * INNER) + (column + INNER)[None, :], inside, other=0).to(dh.dtype)
    value, slope, d = silu_parts(g, NARROW, False)
    h = value * (u * d)
    if SCALED:
        tl.store(scaled + place * INNER + column[None, :], (weight * h).to(scaled.dtype.element_ty), inside)
    if HIDDEN:
        gated = (weight * dh) * d
        dg = gated * (u * (d * (0.5 * slope))) * 2.0
        tl.store(dgu + place * (2 * INNER) + column[None, :], dg.to(dgu.dtype.element_ty), inside)
        tl.store(
            dgu + place * (2 * INNER) + (column + INNER)[None, :], (gated * value).to(dgu.dtype.element_ty), inside
        )
    return h * dh


@triton.jit
def moe_experts_down_adjoint(
    dy, down, gu, tokens, row_weights, tile_expert, tile_begin, tile_end, dgu, scaled, partials, count,
    D: tl.constexpr, INNER: tl.constexpr, HIDDEN: tl.constexpr, SCALED: tl.constexpr, WEIGHTS: tl.constexpr,
    LEVELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dh = dy[token] · down[e], and from it, with g and u as saved and w the row's weight:

    HIDDEN   dgu      = w·dh·u·silu'(g) and w·dh·silu(g), side by side
    SCALED   scaled   = w·h
    WEIGHTS  partials = Σ h·dh over COLUMNS = 2^(LEVELS + 2) columns: the sum of its quarters, neighbours by neighbours
    """
    slot, column_tile = tile_of_program(tl.cdiv(INNER, COLUMNS), GROUP)
    expert = tl.load(tile_expert + slot)
    if expert < 0:
        return
    begin = tl.load(tile_begin + slot)
    end = tl.load(tile_end + slot)
    row = begin + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    dh = tl.zeros([ROWS, COLUMNS], tl.float64 if dy.dtype.element_ty == tl.float64 else tl.float32)
    if HIDDEN or WEIGHTS:
        token = tl.load(tokens + tl.minimum(row, end - 1)).to(tl.int64)
        depth = tl.arange(0, DEPTH)
        left = dy + token[:, None] * D + depth[None, :]
        right = down + expert.to(tl.int64) * (D * INNER) + column[None, :] + (depth * INNER)[:, None]
        for start in range(0, D, DEPTH):
            if D % DEPTH == 0:
                a = tl.load(left)
            else:
                a = tl.load(left, (depth < D - start)[None, :], other=0)
            if D % DEPTH == 0 and INNER % COLUMNS == 0:
                b = tl.load(right)
            else:
                b = tl.load(right, (depth < D - start)[:, None] & (column < INNER)[None, :], other=0)
            dh = tl.dot(a, b, dh, input_precision="ieee", out_dtype=dh.dtype)
            left += DEPTH
            right += DEPTH * INNER
    # A quarter of the columns at a time: together, g, u and what follows from them would not fit in registers.
    QUARTER: tl.constexpr = COLUMNS // 4
    first_column = column_tile * COLUMNS
    weight = tl.load(row_weights + row, row < end, other=0)[:, None]
    low, high = halves(dh)
    first, second = halves(low)
    third, fourth = halves(high)
    total = gate_adjoint(first, gu, weight, row, end, first_column, dgu, scaled, INNER, HIDDEN, SCALED)
    first_column += QUARTER
    total += gate_adjoint(second, gu, weight, row, end, first_column, dgu, scaled, INNER, HIDDEN, SCALED)
    first_column += QUARTER
    total += gate_adjoint(third, gu, weight, row, end, first_column, dgu, scaled, INNER, HIDDEN, SCALED)
    first_column += QUARTER
    total += gate_adjoint(fourth, gu, weight, row, end, first_column, dgu, scaled, INNER, HIDDEN, SCALED)
    if WEIGHTS:
        # Two at a time: a sum of more has the order that the tile's layout gives it, which follows the alignment.
        for _ in tl.static_range(LEVELS):
            total = tl.sum(tl.reshape(total, (ROWS, total.shape[1] // 2, 2)), 2)
        tl.store(partials + column_tile.to(tl.int64) * count + row, tl.reshape(total, (ROWS,)), row < end)


@triton.jit
def moe_experts_outer(
    left, right, tokens, offsets, out,
    M: tl.constexpr, N: tl.constexpr, LEFT_BY_TOKEN: tl.constexpr, RIGHT_BY_TOKEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[e] = Σ left[row, :]ᵀ · right[row, :] over the expert's rows, in their order; zeros where it has none."""
    row_tiles: tl.constexpr = (M + ROWS - 1) // ROWS
    column_tiles: tl.constexpr = (N + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    expert = program // (row_tiles * column_tiles)
    within = program % (row_tiles * column_tiles)
    # GROUP rows of tiles at a time; the last group may have fewer.
    group = within // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    within = within % (GROUP * column_tiles)
    m = (group * GROUP + within % height) * ROWS + tl.arange(0, ROWS)
    n = (within // height) * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.load(offsets + expert).to(tl.int32)
    end = tl.load(offsets + expert + 1).to(tl.int32)
    depth = tl.arange(0, DEPTH)
    total = tl.zeros([ROWS, COLUMNS], tl.float64 if left.dtype.element_ty == tl.float64 else tl.float32)
    # Tokens are read a step ahead: addresses that wait for them would halve the depth of the pipeline.
    token = tl.load(tokens + begin + depth, begin + depth < end, other=0)
    for first in range(begin, end, DEPTH):
        place = first + depth
        inside = place < end
        from_left = token if LEFT_BY_TOKEN else place
        from_right = token if RIGHT_BY_TOKEN else place
        in_left = inside[None, :]
        if M % ROWS != 0:
            in_left = in_left & (m < M)[:, None]
        in_right = inside[:, None]
        if N % COLUMNS != 0:
            in_right = in_right & (n < N)[None, :]
        a = tl.load(left + from_left.to(tl.int64)[None, :] * M + m[:, None], in_left, other=0)
        b = tl.load(right + from_right.to(tl.int64)[:, None] * N + n[None, :], in_right, other=0)
        total = tl.dot(a, b, total, input_precision="ieee", out_dtype=total.dtype)
        token = tl.load(tokens + place + DEPTH, place + DEPTH < end, other=0)
    target = out + expert.to(tl.int64) * (M * N) + (m * N)[:, None] + n[None, :]
    tl.store(target, total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])


# ---------------------------------------------------------------------------------------- sums over slots


@triton.jit
def moe_experts_sum_slots(
    rows, inverse, weights, offsets, out, count, experts, chunk, token_stride, slot_stride,
    SLOTS: tl.constexpr, N: tl.constexpr, WIDTH: tl.constexpr, WEIGHTED: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """out[t, chunk·WIDTH + c] = Σ_j w[t, j] · rows[inverse[t, j], c] for WIDTH columns, slot after slot.

    An entry whose expert is out of range has a row past the last expert's, which nobody has written: it adds nothing.
    """
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inner = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    column = chunk * WIDTH + inner
    inside = token < count
    in_row = (inner < WIDTH) & (column < N)
    valid_rows = tl.load(offsets + experts)
    total = tl.zeros([TOKENS, BLOCK], tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32)
    for first in range(0, SLOTS, UNROLL):
        for step in tl.static_range(UNROLL):  # loads of several rows are on their way at once
            slot = first + step
            known = inside & (slot < SLOTS)
            row = tl.load(inverse + token * SLOTS + slot, known, other=0)
            valid = known & (row < valid_rows)
            mask = valid[:, None] & in_row[None, :]
            term = tl.load(rows + row.to(tl.int64)[:, None] * WIDTH + inner[None, :], mask, other=0).to(total.dtype)
            if WEIGHTED:
                weight = tl.load(weights + token * token_stride + slot * slot_stride, valid, other=0)
                term = weight.to(total.dtype)[:, None] * term
            total += term
    mask = inside[:, None] & in_row[None, :]
    tl.store(out + token[:, None] * N + column[None, :], total.to(out.dtype.element_ty), mask)


@triton.jit
def moe_experts_sum_partials(partials, inverse, offsets, out, count, experts, tiles, BLOCK: tl.constexpr):
    """The gradient of each entry's routing weight: its row's partial sums, one after the other; 0 out of range."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    row = tl.load(inverse + entry, inside, other=0)
    valid = inside & (row < tl.load(offsets + experts))
    total = tl.zeros([BLOCK], partials.dtype.element_ty)
    partial = partials + row.to(tl.int64)
    for _ in range(tiles):
        total += tl.load(partial, valid, other=0)
        partial += count
    tl.store(out + entry, total.to(out.dtype.element_ty), inside)


_SMALL = Budget(registers=64)
_PRODUCT = Budget(registers=255, shared_bytes=232448)

KERNELS = (
    kernels.register(moe_experts_rows, budget=_SMALL),
    kernels.register(moe_experts_tiles, budget=_SMALL),
    kernels.register(moe_experts_up, budget=_PRODUCT),
    kernels.register(moe_experts_product, budget=_PRODUCT),
    kernels.register(moe_experts_down_adjoint, budget=_PRODUCT),
    kernels.register(moe_experts_outer, budget=_PRODUCT),
    kernels.register(moe_experts_sum_slots, budget=Budget(registers=128)),
    kernels.register(moe_experts_sum_partials, budget=_SMALL),
)
