"""Triton kernels of the router.

A row of logits lies across one warp: lane l of slice s holds expert 32·s + l. Every expert becomes one integer
whose order is the order of the selection: its score in the high bits, mapped so that integers compare as floats
do, and 65535 − expert in the low 16, so that no two are equal and ties go to the lower expert. Each lane sorts
its own slices once, by a network; the best of the row is then the best head of 32 lists, and taking it costs one
reduction over the warp and one step of the list it came from.

16-bit logits compared as given need 32 bits for that. Everything else takes 64.

Scores that are compared (sigmoid, or anything with a bias) are computed in float64 and rounded once to float32:
the selection then hardly depends on whose exponential was used. Weights are computed in float32.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget

LANES = tl.constexpr(32)
"""Experts of a slice, and slots of a row of results: a warp's width, so that no reduction depends on a layout."""

_RANK_BITS = tl.constexpr(65536)
_NOBODY_32 = tl.constexpr(-(2**31))
_NOBODY_64 = tl.constexpr(-(2**63))
_SOFTMAX = tl.constexpr(0)
_UNROLLED = tl.constexpr(16)

# ---------------------------------------------------------------------------------------- keys of experts


@triton.jit
def ordered(value):
    """An integer for each float, in the order of floats; ±0 are one, NaN is below all; 16 or 32 bits of it used."""
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        sign = bits >> 31
        return tl.where(magnitude > 0x7F800000, _NOBODY_32, (magnitude ^ sign) - sign)
    else:
        infinity: tl.constexpr = 0x7F80 if value.dtype == tl.bfloat16 else 0x7C00
        bits = value.to(tl.int16, bitcast=True).to(tl.int32)
        magnitude = bits & 0x7FFF
        sign = bits >> 31
        return tl.where(magnitude > infinity, -32768, (magnitude ^ sign) - sign)


@triton.jit
def key_of(value, expert):
    """The key of an expert with a score: 32 bits for 16-bit floats, else 64."""
    rank = 65535 - expert
    if value.dtype == tl.float32:
        return ordered(value).to(tl.int64) * 4294967296 + rank
    else:
        return ordered(value) * _RANK_BITS + rank


@triton.jit
def expert_of(key):
    return 65535 - (key & 0xFFFF).to(tl.int32)


@triton.jit
def score_of(key, NARROW: tl.constexpr):
    """The score in a key, as float32; NARROW is the type of scores in 32-bit keys."""
    if key.dtype == tl.int64:
        order = (key >> 32).to(tl.int32)
        sign = order >> 31
        bits = ((order ^ sign) - sign) | (sign & _NOBODY_32)
        value = bits.to(tl.float32, bitcast=True)
        return tl.where(order == _NOBODY_32, float("nan"), value)
    else:
        order = key >> 16
        sign = order >> 31
        bits = ((order ^ sign) - sign) | (sign & 0x8000)
        value = bits.to(tl.int16).to(NARROW, bitcast=True).to(tl.float32)
        return tl.where(order == -32768, float("nan"), value)


# --------------------------------------------------------------------------------------- lists of a lane


@triton.jit
def exchange_apart(lists, SLICES: tl.constexpr, RUN: tl.constexpr, APART: tl.constexpr):
    """One layer of Batcher's odd-even merge sort of runs of RUN: elements APART from each other, larger first."""
    for i in tl.static_range(SLICES - APART):
        if i >= APART % RUN and (i - APART % RUN) % (2 * APART) < APART and i // (2 * RUN) == (i + APART) // (2 * RUN):
            first = lists[i]
            second = lists[i + APART]
            if first.dtype == tl.int64:
                larger = first > second
                high = tl.where(larger, first, second)
                low = tl.where(larger, second, first)
            else:
                high = tl.maximum(first, second)
                low = tl.minimum(first, second)
            lists = lists[:i] + (high,) + lists[i + 1 : i + APART] + (low,) + lists[i + APART + 1 :]
    return lists


@triton.jit
def sort_lists(lists, SLICES: tl.constexpr, LEVELS: tl.constexpr):
    """Sorts what each lane holds, largest first; 2^LEVELS ≥ SLICES."""
    for level in tl.static_range(LEVELS):
        for step in tl.static_range(level + 1):
            lists = exchange_apart(lists, SLICES, 2**level, 2 ** (level - step))
    return lists


@triton.jit
def step_lists(lists, taken, nobody, HELD: tl.constexpr, KEPT: tl.constexpr):
    """The first KEPT of each list of HELD, after its head was taken where `taken`."""
    shorter = ()
    for i in tl.static_range(KEPT):
        if i + 1 < HELD:
            shorter = shorter + (tl.where(taken, lists[i + 1], lists[i]),)
        else:
            shorter = shorter + (tl.where(taken, nobody, lists[i]),)
    return shorter


@triton.jit
def row_best(key):
    """The largest key of each row. Halves of 64 bits one after the other: a warp has an instruction for 32."""
    if key.dtype == tl.int64:
        high = (key >> 32).to(tl.int32)
        best_high = tl.max(high, 1)
        rank = tl.where(high == best_high[:, None], (key & 0xFFFF).to(tl.int32), -1)
        return best_high.to(tl.int64) * 4294967296 + tl.max(rank, 1).to(tl.int64)
    else:
        return tl.max(key, 1)


@triton.jit
def put(chosen, best, i, SLOT_GROUPS: tl.constexpr):
    """Puts what is best for slot i into its place."""
    slot = tl.arange(0, LANES)[None, :]
    changed = ()
    for g in tl.static_range(SLOT_GROUPS):
        changed = changed + (tl.where(slot + g * LANES == i, best[:, None], chosen[g]),)
    return changed


@triton.jit
def take_best(lists, nobody, SLICES: tl.constexpr, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The K largest keys of each row of sorted lists, largest first, in groups of slots; and the largest by itself.

    What is left of a list shortens with what is left to take, as long as K is small enough to be unrolled.
    """
    best = row_best(lists[0])
    first = best
    chosen = ()
    for _ in tl.static_range(SLOT_GROUPS):
        chosen = chosen + (tl.where(tl.arange(0, LANES)[None, :] == 0, best[:, None], nobody),)
    if K <= _UNROLLED:
        for i in tl.static_range(1, K):
            lists = step_lists(
                lists,
                lists[0] == best[:, None],
                nobody,
                SLICES if K - i + 1 > SLICES else K - i + 1,
                SLICES if K - i > SLICES else K - i,
            )
            best = row_best(lists[0])
            chosen = put(chosen, best, i, SLOT_GROUPS)
    else:
        for i in range(1, K):
            lists = step_lists(lists, lists[0] == best[:, None], nobody, SLICES, SLICES)
            best = row_best(lists[0])
            chosen = put(chosen, best, i, SLOT_GROUPS)
    return chosen, first


# ------------------------------------------------------------------------------------------------ sums


@triton.jit
def warp_sum(values):
    """Each row's sum of 32, in all of its places: lanes 16 apart, then 8, 4, 2 and 1, whatever the layout of threads.

    `tl.sum` adds in the order of the layout that the compiler has chosen, which differs between versions, numbers of
    warps and ways to load what is summed.
    """
    lane = tl.arange(0, LANES)[None, :] + tl.zeros(values.shape, tl.int32)
    for step in tl.static_range(5):
        values += tl.gather(values, lane ^ (16 // 2**step), 1)
    return values


@triton.jit
def halve(values, WIDTH: tl.constexpr):
    """[1, WIDTH] -> [1, WIDTH / 2]: the first half plus the second, whatever the layout of threads."""
    first, second = tl.split(tl.permute(tl.reshape(values, [1, 2, WIDTH // 2]), [0, 2, 1]))
    return first + second


@triton.jit
def sum_by_halves(values, WIDTH: tl.constexpr, LEVELS: tl.constexpr):
    """[1, WIDTH] -> [1, 1], WIDTH = 2^LEVELS."""
    for level in tl.static_range(LEVELS):
        values = halve(values, WIDTH // 2**level)
    return values


# ------------------------------------------------------------------------------------------------ rows


@triton.jit
def row_start(row, inner, outer_stride, inner_stride, SPLIT: tl.constexpr):
    """Where rows begin; with SPLIT they lie along two axes, the inner one of a given size."""
    if SPLIT:
        return (row // inner) * outer_stride + (row % inner) * inner_stride
    else:
        return row * inner_stride


@triton.jit
def load_slices(row_pointers, inside, EXPERTS: tl.constexpr, SLICES: tl.constexpr):
    """The logits of rows, as one tensor [rows, 32] a slice, and −∞ past the last expert."""
    lane = tl.arange(0, LANES)
    slices = ()
    for s in tl.static_range(SLICES):
        if s * LANES + LANES <= EXPERTS:
            mask = inside[:, None] & (lane >= 0)[None, :]
        else:
            mask = inside[:, None] & (lane + s * LANES < EXPERTS)[None, :]
        pointers = row_pointers[:, None] + (lane + s * LANES)[None, :]
        slices = slices + (tl.load(pointers, mask, other=float("-inf")),)
    return slices


@triton.jit
def largest(slices, SLICES: tl.constexpr):
    """The largest logit of each row, NaN left out, in float32; −∞ where there is none."""
    best = tl.full(slices[0].shape, float("-inf"), tl.float32)
    for s in tl.static_range(SLICES):
        value = slices[s].to(tl.float32)
        best = tl.where(value > best, value, best)
    return tl.max(best, 1)


@triton.jit
def exponential_sum(slices, top, WIDE: tl.constexpr, SLICES: tl.constexpr):
    """Σ e^(logit − top) over each row, NaN left out: a lane's slices in order, then halves of the warp."""
    total = tl.zeros(slices[0].shape, WIDE)
    for s in tl.static_range(SLICES):
        value = slices[s].to(tl.float32)
        term = tl.exp(value.to(WIDE) - top[:, None].to(WIDE))
        total += tl.where(value == value, term, 0.0)
    return warp_sum(total)


@triton.jit
def sigmoid_64(x):
    """σ(x) in float64, without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def score_keys(
    slices, bias, bias_stride, top,
    EXPERTS: tl.constexpr, SLICES: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Keys of float64 scores, rounded to float32, plus the bias in float32."""
    lane = tl.arange(0, LANES)
    total = exponential_sum(slices, top, tl.float64, SLICES) if SCORE == _SOFTMAX else top
    keys = ()
    for s in tl.static_range(SLICES):
        x = slices[s].to(tl.float32).to(tl.float64)
        if SCORE == _SOFTMAX:
            score = (tl.exp(x - top[:, None].to(tl.float64)) / total).to(tl.float32)
        else:
            score = sigmoid_64(x).to(tl.float32)
        expert = lane + s * LANES
        if BIASED:
            score += tl.load(bias + expert * bias_stride, expert < EXPERTS, other=0.0)[None, :]
        keys = keys + (tl.where((expert < EXPERTS)[None, :], key_of(score, expert[None, :]), _NOBODY_64),)
    return keys


@triton.jit
def logit_keys(slices, nobody, EXPERTS: tl.constexpr, SLICES: tl.constexpr):
    """Keys of the logits as they are."""
    lane = tl.arange(0, LANES)
    keys = ()
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        key = key_of(slices[s], expert[None, :])
        if s * LANES + LANES > EXPERTS:
            key = tl.where((expert < EXPERTS)[None, :], key, nobody)
        keys = keys + (key,)
    return keys


@triton.jit
def slot_is_used(group, K: tl.constexpr):
    return tl.arange(0, LANES)[None, :] + group * LANES < K


@triton.jit
def largest_chosen(values, SCORE: tl.constexpr, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The largest of x, or of min(x, 0) for a sigmoid, among the chosen logits; NaN left out."""
    best = tl.full(values[0].shape, float("-inf"), tl.float32)
    for g in tl.static_range(SLOT_GROUPS):
        value = values[g] if SCORE == _SOFTMAX else tl.where(values[g] > 0, 0.0, values[g])
        best = tl.where(slot_is_used(g, K) & (value > best), value, best)
    return tl.max(best, 1)


@triton.jit
def weights_of(
    values, top, total, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, TOP_IS_CHOSEN: tl.constexpr,
    K: tl.constexpr, SLOT_GROUPS: tl.constexpr,
):  # fmt: skip
    """Weights of the chosen logits; `top` and `total` are the row's maximum and Σ e^(logit − top).

    A row with +∞, or with nothing above −∞, gives NaN. σ(x) = e^min(x, 0) / (1 + e^−|x|) is divided by the largest
    of its numerators before it is summed, so that a row of very negative logits does not underflow.
    """
    reference = top
    if RENORMALIZE and not TOP_IS_CHOSEN:
        reference = largest_chosen(values, SCORE, K, SLOT_GROUPS)
    parts = ()
    sums = tl.zeros(values[0].shape, tl.float32)
    for g in tl.static_range(SLOT_GROUPS):
        value = values[g]
        if SCORE == _SOFTMAX:
            part = tl.exp(value - reference[:, None])
        else:
            least = tl.where(value > 0, 0.0, value)
            if RENORMALIZE:
                least -= reference[:, None]
            part = tl.exp(least) / (1.0 + tl.exp(-tl.abs(value)))
        sums += tl.where(slot_is_used(g, K), part, 0.0)
        parts = parts + (part,)
    if RENORMALIZE:
        total = warp_sum(sums)
    weights = ()
    for g in tl.static_range(SLOT_GROUPS):
        weight = parts[g]
        if RENORMALIZE or SCORE == _SOFTMAX:
            weight = weight / total
        if SCORE != _SOFTMAX or not TOP_IS_CHOSEN:  # otherwise ∞ − ∞ has said it
            weight = tl.where((tl.abs(top) == float("inf"))[:, None], float("nan"), weight)
        weights = weights + (weight,)
    return weights


# --------------------------------------------------------------------------------------------- forward


@triton.jit
def store_rows(weights, indices, values, experts, row, inside, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    for g in tl.static_range(SLOT_GROUPS):
        slot = tl.arange(0, LANES)[None, :] + g * LANES
        mask = inside[:, None] & (slot < K)
        tl.store(weights + row[:, None] * K + slot, values[g], mask)
        tl.store(indices + row[:, None] * K + slot, experts[g].to(tl.int64), mask)


@triton.jit
def experts_of(keys, SLOT_GROUPS: tl.constexpr):
    experts = ()
    for g in tl.static_range(SLOT_GROUPS):
        experts = experts + (expert_of(keys[g]),)
    return experts


@triton.jit
def load_chosen(start, experts, inside, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The logits of chosen experts, as float32."""
    values = ()
    for g in tl.static_range(SLOT_GROUPS):
        mask = inside[:, None] & slot_is_used(g, K)
        values = values + (tl.load(start[:, None] + experts[g].to(tl.int64), mask, other=0.0).to(tl.float32),)
    return values


@triton.jit
def moe_route_forward(
    logits, bias, weights, indices, rows, inner, outer_stride, inner_stride, bias_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr, SLICES: tl.constexpr, LEVELS: tl.constexpr, SLOT_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The K best experts of each row and their weights; a row a warp."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
    slices = load_slices(start, inside, EXPERTS, SLICES)
    AS_GIVEN: tl.constexpr = SCORE == _SOFTMAX and not BIASED
    if AS_GIVEN:
        nobody: tl.constexpr = _NOBODY_64 if logits.dtype.element_ty == tl.float32 else _NOBODY_32
        keys = logit_keys(slices, nobody, EXPERTS, SLICES)
        chosen, first = take_best(sort_lists(keys, SLICES, LEVELS), nobody, SLICES, K, SLOT_GROUPS)
        experts = experts_of(chosen, SLOT_GROUPS)
        values = ()
        for g in tl.static_range(SLOT_GROUPS):
            values = values + (score_of(chosen[g], logits.dtype.element_ty),)
        top = score_of(first, logits.dtype.element_ty)
    else:
        top = largest(slices, SLICES)
        keys = score_keys(slices, bias, bias_stride, top, EXPERTS, SLICES, SCORE, BIASED)
        chosen, first = take_best(sort_lists(keys, SLICES, LEVELS), _NOBODY_64, SLICES, K, SLOT_GROUPS)
        experts = experts_of(chosen, SLOT_GROUPS)
        values = load_chosen(start, experts, inside, K, SLOT_GROUPS)
    total = top
    if SCORE == _SOFTMAX and not RENORMALIZE:
        total = exponential_sum(slices, top, tl.float32, SLICES)
    found = weights_of(values, top, total, SCORE, RENORMALIZE, AS_GIVEN, K, SLOT_GROUPS)
    store_rows(weights, indices, found, experts, row, inside, K, SLOT_GROUPS)


@triton.jit
def moe_route_grouped(
    logits, bias, weights, indices, inner, outer_stride, inner_stride, bias_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr, LEVELS: tl.constexpr, SLOT_GROUPS: tl.constexpr,
):  # fmt: skip
    """The K best experts of the KEPT best groups, a row a program; a group scores the sum of its two best."""
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)
    member = tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * SIZE + member[None, :]
    there = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    pointers = tl.broadcast_to(start[:, None], [GROUP_BLOCK, MEMBER_BLOCK]) + expert.to(tl.int64)
    x = tl.load(pointers, there, other=float("-inf")).to(tl.float32)
    flat = tl.reshape(x, [1, GROUP_BLOCK * MEMBER_BLOCK])
    top = tl.max(tl.where(flat == flat, flat, float("-inf")), 1)
    score = x
    if BIASED or SCORE != _SOFTMAX:
        wide = x.to(tl.float64)
        if SCORE == _SOFTMAX:
            scaled = flat.to(tl.float64) - top[:, None].to(tl.float64)
            total_64 = sum_by_halves(tl.where(flat == flat, tl.exp(scaled), 0.0), GROUP_BLOCK * MEMBER_BLOCK, LEVELS)
            score = (tl.exp(wide - top[:, None].to(tl.float64)) / total_64).to(tl.float32)
        else:
            score = sigmoid_64(wide).to(tl.float32)
        if BIASED:
            score += tl.load(bias + expert * bias_stride, there, other=0.0)
    key = tl.where(there, key_of(score, expert), _NOBODY_64)

    best = tl.max(key, 1)
    group_score = score_of(best, tl.float32)
    if SIZE > 1:
        group_score += score_of(tl.max(tl.where(key == best[:, None], _NOBODY_64, key), 1), tl.float32)
    group_key = tl.where(group < GROUPS, key_of(group_score, group), _NOBODY_64)
    kept = group < 0
    for _ in range(KEPT):
        winner = group_key == tl.max(group_key, 0)
        kept = kept | winner
        group_key = tl.where(winner, _NOBODY_64, group_key)

    key = tl.reshape(tl.where(kept[:, None], key, _NOBODY_64), [1, GROUP_BLOCK * MEMBER_BLOCK])
    chosen = ()
    for _ in tl.static_range(SLOT_GROUPS):
        chosen = chosen + (tl.full([1, LANES], _NOBODY_64, tl.int64),)
    for i in range(K):
        next_best = row_best(key)
        chosen = put(chosen, next_best, i, SLOT_GROUPS)
        key = tl.where(key == next_best[:, None], _NOBODY_64, key)
    experts = experts_of(chosen, SLOT_GROUPS)
    inside = row >= 0
    values = load_chosen(start, experts, inside, K, SLOT_GROUPS)
    total = top
    if SCORE == _SOFTMAX and not RENORMALIZE:
        terms = tl.where(flat == flat, tl.exp(flat - top[:, None]), 0.0)
        total = sum_by_halves(terms, GROUP_BLOCK * MEMBER_BLOCK, LEVELS)
    found = weights_of(values, top, total, SCORE, RENORMALIZE, False, K, SLOT_GROUPS)
    store_rows(weights, indices, found, experts, row, inside, K, SLOT_GROUPS)


# -------------------------------------------------------------------------------------------- backward


@triton.jit
def chosen_gradient(
    weights, indices, gradient, row, inside, start,
    inner, outer_stride, inner_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
):  # fmt: skip
    """For each group of slots the gradients of chosen logits, their experts and which are there; and Σ weight·gradient.

    The gradient of a softmax over all experts has a further term, for every expert: −p·Σ weight·gradient.
    """
    held = ()
    products = tl.zeros([row.shape[0], LANES], tl.float32)
    for g in tl.static_range(SLOT_GROUPS):
        slot = tl.arange(0, LANES)[None, :] + g * LANES
        used = inside[:, None] & (slot < K)
        weight = tl.load(weights + row[:, None] * K + slot, used, other=0.0)
        expert = tl.load(indices + row[:, None] * K + slot, used, other=0)
        place = row_start(row, inner, outer_stride, inner_stride, SPLIT)[:, None] + slot
        upstream = tl.load(gradient + place, used, other=0.0)
        products += weight * upstream
        held = held + ((weight, expert, upstream, used & (expert >= 0) & (expert < EXPERTS)),)
    dot = warp_sum(products)
    slopes = ()
    for g in tl.static_range(SLOT_GROUPS):
        weight, expert, upstream, used = held[g]
        if SCORE == _SOFTMAX or RENORMALIZE:
            slope = weight * (upstream - dot)
        else:
            slope = weight * upstream
        if SCORE != _SOFTMAX:
            x = tl.load(start[:, None] + expert, used, other=0.0).to(tl.float32)
            small = tl.exp(-tl.abs(x))
            slope *= tl.where(x < 0, 1.0, small) / (1.0 + small)
        slopes = slopes + ((slope, expert, used),)
    return slopes, dot


@triton.jit
def store_chosen(dlogits, slopes, row, EXPERTS: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The chosen gradients over what the program has written, which the barrier puts first."""
    tl.debug_barrier()
    for g in tl.static_range(SLOT_GROUPS):
        slope, expert, used = slopes[g]
        tl.store(dlogits + row[:, None] * EXPERTS + expert, slope.to(dlogits.dtype.element_ty), used)


@triton.jit
def moe_route_backward(
    weights, indices, gradient, logits, dlogits, rows, inner, outer_stride, inner_stride,
    logits_inner, logits_outer_stride, logits_inner_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    SLOT_GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Zeros, and then, by the same program, the gradients of the chosen logits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)[None, :]
    zero = tl.zeros([ROWS, BLOCK], dlogits.dtype.element_ty)
    tl.store(dlogits + row[:, None] * EXPERTS + column, zero, inside[:, None] & (column < EXPERTS))
    start = logits + row_start(row, logits_inner, logits_outer_stride, logits_inner_stride, SPLIT)
    slopes, _ = chosen_gradient(
        weights, indices, gradient, row, inside, start,
        inner, outer_stride, inner_stride,
        EXPERTS, K, SCORE, RENORMALIZE, SPLIT, SLOT_GROUPS,
    )  # fmt: skip
    store_chosen(dlogits, slopes, row, EXPERTS, SLOT_GROUPS)


@triton.jit
def moe_route_backward_dense(
    weights, indices, gradient, logits, dlogits, rows, inner, outer_stride, inner_stride,
    logits_inner, logits_outer_stride, logits_inner_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
    SLICES: tl.constexpr, SLOT_GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of a softmax over all experts: −p·Σ weight·gradient, and the chosen ones over it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    start = logits + row_start(row, logits_inner, logits_outer_stride, logits_inner_stride, SPLIT)
    slopes, dot = chosen_gradient(
        weights, indices, gradient, row, inside, start,
        inner, outer_stride, inner_stride,
        EXPERTS, K, _SOFTMAX, False, SPLIT, SLOT_GROUPS,
    )  # fmt: skip
    slices = load_slices(start, inside, EXPERTS, SLICES)
    top = largest(slices, SLICES)
    total = exponential_sum(slices, top, tl.float32, SLICES)
    for s in tl.static_range(SLICES):
        column = tl.arange(0, LANES)[None, :] + s * LANES
        value = slices[s].to(tl.float32)
        share = tl.exp(value - top[:, None]) / total
        share = tl.where(value == value, share, 0.0)
        value = (-share * dot).to(dlogits.dtype.element_ty)
        tl.store(dlogits + row[:, None] * EXPERTS + column, value, inside[:, None] & (column < EXPERTS))
    store_chosen(dlogits, slopes, row, EXPERTS, SLOT_GROUPS)


KERNELS = (
    kernels.register(moe_route_forward, budget=Budget(registers=112, shared_bytes=4096)),
    kernels.register(moe_route_grouped, budget=Budget(registers=128, shared_bytes=4096)),
    kernels.register(moe_route_backward, budget=Budget(registers=64, shared_bytes=4096)),
    kernels.register(moe_route_backward_dense, budget=Budget(registers=128, shared_bytes=4096)),
)
