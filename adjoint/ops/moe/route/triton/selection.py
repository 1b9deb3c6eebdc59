"""The order of experts, and the best of a row.

Every expert becomes one integer, its key, and keys are ordered as the selection orders experts: the score lies in the
high bits, mapped so that integers compare as floats do, and 65535 − expert in the low 16, so that no two keys are equal
and ties go to the lower expert. Each lane sorts the keys of its slices once, by a network; the best of the row is then
the best head of 32 lists, and taking it costs one reduction over the warp and one step of the list it came from.

16-bit logits compared as given need 32 bits for that. Everything else takes 64.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

import triton
import triton.language as tl

from adjoint.ops.moe.kernels import LANES, exponential_sum

SOFTMAX = tl.constexpr(0)
"""The value of SCORE that stands for a softmax; a sigmoid is 1."""
NO_EXPERT_32 = tl.constexpr(-(2**31))
NO_EXPERT_64 = tl.constexpr(-(2**63))
"""Keys below those of all experts."""
_RANK_BITS = tl.constexpr(65536)
_UNROLLED = tl.constexpr(16)

# ---------------------------------------------------------------------------------------- keys of experts


@triton.jit
def order_of(value):
    """An integer for each float, in the order of floats; ±0 are one, NaN is below all; 16 or 32 bits of it used."""
    if value.dtype == tl.float32:
        bits = value.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        sign = bits >> 31
        return tl.where(magnitude > 0x7F800000, NO_EXPERT_32, (magnitude ^ sign) - sign)
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
        return order_of(value).to(tl.int64) * 4294967296 + rank
    else:
        return order_of(value) * _RANK_BITS + rank


@triton.jit
def expert_of(key):
    return 65535 - (key & 0xFFFF).to(tl.int32)


@triton.jit
def experts_of(keys, SLOT_GROUPS: tl.constexpr):
    experts = ()
    for g in tl.static_range(SLOT_GROUPS):
        experts = experts + (expert_of(keys[g]),)
    return experts


@triton.jit
def score_of(key, NARROW: tl.constexpr):
    """The score in a key, as float32; NARROW is the type of scores in 32-bit keys."""
    if key.dtype == tl.int64:
        order = (key >> 32).to(tl.int32)
        sign = order >> 31
        bits = ((order ^ sign) - sign) | (sign & NO_EXPERT_32)
        value = bits.to(tl.float32, bitcast=True)
        return tl.where(order == NO_EXPERT_32, float("nan"), value)
    else:
        order = key >> 16
        sign = order >> 31
        bits = ((order ^ sign) - sign) | (sign & 0x8000)
        value = bits.to(tl.int16).to(NARROW, bitcast=True).to(tl.float32)
        return tl.where(order == -32768, float("nan"), value)


@triton.jit
def logit_keys(slices, no_expert, EXPERTS: tl.constexpr, SLICES: tl.constexpr):
    """Keys of the logits as they are."""
    lane = tl.arange(0, LANES)
    keys = ()
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        key = key_of(slices[s], expert[None, :])
        if s * LANES + LANES > EXPERTS:
            key = tl.where((expert < EXPERTS)[None, :], key, no_expert)
        keys = keys + (key,)
    return keys


@triton.jit
def sigmoid_64(x):
    """σ(x) in float64, without overflow on either side."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x < 0, small, 1.0) / (1.0 + small)


@triton.jit
def score_keys(
    slices, bias, bias_stride, maximum,
    EXPERTS: tl.constexpr, SLICES: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """Keys of float64 scores, rounded to float32, plus the bias in float32."""
    lane = tl.arange(0, LANES)
    total = exponential_sum(slices, maximum, tl.float64, SLICES) if SCORE == SOFTMAX else maximum
    keys = ()
    for s in tl.static_range(SLICES):
        x = slices[s].to(tl.float32).to(tl.float64)
        if SCORE == SOFTMAX:
            score = (tl.exp(x - maximum[:, None].to(tl.float64)) / total).to(tl.float32)
        else:
            score = sigmoid_64(x).to(tl.float32)
        expert = lane + s * LANES
        if BIASED:
            score += tl.load(bias + expert * bias_stride, expert < EXPERTS, other=0.0)[None, :]
        keys = keys + (tl.where((expert < EXPERTS)[None, :], key_of(score, expert[None, :]), NO_EXPERT_64),)
    return keys


# --------------------------------------------------------------------------------------- lists of a lane


@triton.jit
def exchange_at_distance(lists, SLICES: tl.constexpr, RUN: tl.constexpr, DISTANCE: tl.constexpr):
    """One layer of Batcher's odd-even merge sort of runs of RUN: exchanges elements at a DISTANCE, larger first."""
    for i in tl.static_range(SLICES - DISTANCE):
        if (
            i >= DISTANCE % RUN
            and (i - DISTANCE % RUN) % (2 * DISTANCE) < DISTANCE
            and i // (2 * RUN) == (i + DISTANCE) // (2 * RUN)
        ):
            first = lists[i]
            second = lists[i + DISTANCE]
            if first.dtype == tl.int64:
                larger = first > second
                high = tl.where(larger, first, second)
                low = tl.where(larger, second, first)
            else:
                high = tl.maximum(first, second)
                low = tl.minimum(first, second)
            lists = lists[:i] + (high,) + lists[i + 1 : i + DISTANCE] + (low,) + lists[i + DISTANCE + 1 :]
    return lists


@triton.jit
def sort_lists(lists, SLICES: tl.constexpr, LEVELS: tl.constexpr):
    """Sorts the list of each lane, largest first; 2^LEVELS ≥ SLICES."""
    for level in tl.static_range(LEVELS):
        for step in tl.static_range(level + 1):
            lists = exchange_at_distance(lists, SLICES, 2**level, 2 ** (level - step))
    return lists


@triton.jit
def remove_heads(lists, is_best, no_expert, LENGTH: tl.constexpr, NEW_LENGTH: tl.constexpr):
    """The first NEW_LENGTH elements of lists of LENGTH, without the head where `is_best`."""
    shorter = ()
    for i in tl.static_range(NEW_LENGTH):
        if i + 1 < LENGTH:
            shorter = shorter + (tl.where(is_best, lists[i + 1], lists[i]),)
        else:
            shorter = shorter + (tl.where(is_best, no_expert, lists[i]),)
    return shorter


# ------------------------------------------------------------------------------------------ best of a row


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
def put(slots, best, i, SLOT_GROUPS: tl.constexpr):
    """Slots with the best key of each row in slot i."""
    slot = tl.arange(0, LANES)[None, :]
    changed = ()
    for g in tl.static_range(SLOT_GROUPS):
        changed = changed + (tl.where(slot + g * LANES == i, best[:, None], slots[g]),)
    return changed


@triton.jit
def take_best(lists, no_expert, SLICES: tl.constexpr, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The K largest keys of each row of sorted lists, largest first, in groups of slots; and the largest by itself.

    Lists shorten with the number of keys still to come, as long as K is small enough to be unrolled.
    """
    best = row_best(lists[0])
    first = best
    slots = ()
    for _ in tl.static_range(SLOT_GROUPS):
        slots = slots + (tl.where(tl.arange(0, LANES)[None, :] == 0, best[:, None], no_expert),)
    if K <= _UNROLLED:
        for i in tl.static_range(1, K):
            lists = remove_heads(
                lists, lists[0] == best[:, None], no_expert, SLICES if K - i + 1 > SLICES else K - i + 1,
                SLICES if K - i > SLICES else K - i,
            )  # fmt: skip
            best = row_best(lists[0])
            slots = put(slots, best, i, SLOT_GROUPS)
    else:
        for i in range(1, K):
            lists = remove_heads(lists, lists[0] == best[:, None], no_expert, SLICES, SLICES)
            best = row_best(lists[0])
            slots = put(slots, best, i, SLOT_GROUPS)
    return slots, first
