"""Triton kernels of the router's losses.

Both losses are means over tokens. Their sums have an order that the tokens' numbers alone decide: runs of RUN
tokens one after the other, a run a warp, then RUNS runs one after the other, and so on. Counts are integers.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record
from adjoint.ops.moe.losses_plans import RUN, RUNS
from adjoint.ops.moe.route_kernels import LANES, load_slices, row_start, warp_sum

_RUN = tl.constexpr(RUN)
_RUNS = tl.constexpr(RUNS)


@triton.jit
def softmax_parts(slices, SLICES: tl.constexpr):
    """Each row's shift (its maximum, 0 where that is infinite) and Σ e^(logit − shift); NaN stays NaN."""
    best = tl.full(slices[0].shape, float("-inf"), tl.float32)
    for s in tl.static_range(SLICES):
        value = slices[s].to(tl.float32)
        best = tl.where(value > best, value, best)
    shift = tl.max(best, 1)
    shift = tl.where(tl.abs(shift) == float("inf"), 0.0, shift)
    total = tl.zeros(slices[0].shape, tl.float32)
    for s in tl.static_range(SLICES):
        total += tl.exp(slices[s].to(tl.float32) - shift[:, None])
    return shift, warp_sum(total)


@triton.jit
def tokens_that_count(mask, row, rows, MASKED: tl.constexpr):
    inside = row < rows
    if MASKED:
        inside = inside & (tl.load(mask + row, inside, other=0) != 0)
    return inside


@triton.jit
def moe_balance_runs(
    logits, indices, mask, sums, counts, status_word, fault, rows, runs,
    inner, outer_stride, inner_stride,
    EXPERTS: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """For each run of tokens, the sum of every expert's probability, and how often each was chosen.

    `counts` has one column more: the tokens that count.
    """
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    shares = ()
    chosen = ()
    for _ in tl.static_range(SLICES):
        shares = shares + (tl.zeros([ROWS, LANES], tl.float32),)
        chosen = chosen + (tl.zeros([ROWS, LANES], tl.int32),)
    tokens = tl.zeros([ROWS], tl.int32)
    for n in range(0, tl.minimum(rows - tl.program_id(0) * ROWS * _RUN, _RUN)):  # its first run is the longest
        row = run * _RUN + n
        counted = tokens_that_count(mask, row, rows, MASKED)
        start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
        slices = load_slices(start, counted, EXPERTS, SLICES)
        shift, total = softmax_parts(slices, SLICES)
        added = ()
        for s in tl.static_range(SLICES):
            share = tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total
            added = added + (shares[s] + tl.where(counted[:, None], share, 0.0),)
        shares = added
        for first in range(0, K, LANES):
            slot = first + tl.arange(0, LANES)[None, :]
            used = counted[:, None] & (slot < K)
            place = row[:, None] * K + slot
            expert = tl.load(indices + place, used, other=-1).to(tl.int64)
            valid = (expert >= 0) & (expert < EXPERTS)
            record(status_word, fault, place, expert, used & (valid == 0))
            known = tl.where(valid, expert, -1).to(tl.int32)
            for i in range(first, tl.minimum(first + LANES, K)):  # from the lane that holds it to all of them
                named = tl.max(tl.where(slot == i, known, -1), 1)[:, None]
                more = ()
                for s in tl.static_range(SLICES):
                    more = more + (chosen[s] + (named == lane + s * LANES).to(tl.int32),)
                chosen = more
        tokens += counted.to(tl.int32)
    there = run < runs
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        in_row = there[:, None] & (expert < EXPERTS)
        tl.store(sums + run[:, None] * EXPERTS + expert, shares[s], in_row)
        tl.store(counts + run[:, None] * (EXPERTS + 1) + expert, chosen[s], in_row)
    tl.store(counts + run * (EXPERTS + 1) + EXPERTS, tokens, there)


@triton.jit
def moe_z_runs(
    logits, mask, sums, counts, rows, runs, inner, outer_stride, inner_stride,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each run of tokens, the sum of logsumexp² and the number of tokens that count."""
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    tokens = tl.zeros([ROWS], tl.int32)
    for n in range(0, tl.minimum(rows - tl.program_id(0) * ROWS * _RUN, _RUN)):  # its first run is the longest
        row = run * _RUN + n
        counted = tokens_that_count(mask, row, rows, MASKED)
        start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
        slices = load_slices(start, counted, EXPERTS, SLICES)
        shift, sum_of = softmax_parts(slices, SLICES)
        size = shift + tl.log(tl.max(sum_of, 1))  # which is one value in all places
        total += tl.where(counted, size * size, 0.0)
        tokens += counted.to(tl.int32)
    there = run < runs
    tl.store(sums + run, total, there)
    tl.store(counts + run, tokens, there)


@triton.jit
def moe_add_runs(sums, counts, sums_above, counts_above, count, width, counts_width, BLOCK: tl.constexpr):
    """Rows of the level above: sums of RUNS rows [count, width] of each, one after the other."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.int32)
    for n in range(0, tl.minimum(count - tl.program_id(0) * _RUNS, _RUNS)):
        source = row * _RUNS + n
        total += tl.load(sums + source * width + column, column < width, other=0.0)
        number += tl.load(counts + source * counts_width + column, column < counts_width, other=0)
    tl.store(sums_above + row * width + column, total, column < width)
    tl.store(counts_above + row * counts_width + column, number, column < counts_width)


@triton.jit
def moe_balance_finish(
    sums, counts, loss, load, EXPERTS: tl.constexpr, SLICES: tl.constexpr
):  # fmt: skip
    """loss = E·Σ f·P; and what the backward needs: f, and the number of tokens."""
    lane = tl.arange(0, LANES)[None, :]
    tokens = tl.load(counts + EXPERTS + tl.zeros([1], tl.int64)).to(tl.float32)
    safe = tl.where(tokens == 0, 1.0, tokens)
    total = tl.zeros([1, LANES], tl.float32)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        share = tl.load(sums + expert, expert < EXPERTS, other=0.0) / safe[:, None]
        fraction = tl.load(counts + expert, expert < EXPERTS, other=0).to(tl.float32) / safe[:, None]
        total += fraction * share
        tl.store(load + expert, fraction, expert < EXPERTS)
    one = tl.arange(0, 1)
    tl.store(load + EXPERTS + one, tokens)
    tl.store(loss + one, tl.max(warp_sum(total), 1) * EXPERTS)


@triton.jit
def moe_z_finish(sums, counts, loss, tokens):
    one = tl.arange(0, 1)
    number = tl.load(counts + one).to(tl.float32)
    tl.store(loss + one, tl.load(sums + one) / tl.where(number == 0, 1.0, number))
    tl.store(tokens + one, number)


@triton.jit
def moe_balance_backward(
    upstream, logits, mask, load, dlogits, rows, inner, outer_stride, inner_stride,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = dloss·E/tokens·p·(f − Σ p·f), and 0 for tokens that do not count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    counted = tokens_that_count(mask, row, rows, MASKED)
    start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
    slices = load_slices(start, counted, EXPERTS, SLICES)
    shift, total = softmax_parts(slices, SLICES)
    one = tl.arange(0, 1)
    tokens = tl.load(load + EXPERTS + one)
    scale = tl.load(upstream + one) * (EXPERTS / tl.where(tokens == 0, 1.0, tokens))
    products = tl.zeros([ROWS, LANES], tl.float32)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        fraction = tl.load(load + expert, expert < EXPERTS, other=0.0)
        products += fraction * (tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total)
    mean = warp_sum(products)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        fraction = tl.load(load + expert, expert < EXPERTS, other=0.0)
        share = tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total
        slope = scale[:, None] * (share * (fraction - mean))
        slope = tl.where(counted[:, None], slope, 0.0).to(dlogits.dtype.element_ty)
        tl.store(dlogits + row[:, None] * EXPERTS + expert, slope, (row < rows)[:, None] & (expert < EXPERTS))


@triton.jit
def moe_z_backward(
    upstream, logits, mask, tokens, dlogits, rows, inner, outer_stride, inner_stride,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = 2·dloss/tokens·logsumexp·p, and 0 for tokens that do not count."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    counted = tokens_that_count(mask, row, rows, MASKED)
    start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
    slices = load_slices(start, counted, EXPERTS, SLICES)
    shift, total = softmax_parts(slices, SLICES)
    one = tl.arange(0, 1)
    number = tl.load(tokens + one)
    scale = tl.load(upstream + one) * (2.0 / tl.where(number == 0, 1.0, number)) * (shift + tl.log(tl.max(total, 1)))
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        share = tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total
        slope = tl.where(counted[:, None], scale[:, None] * share, 0.0).to(dlogits.dtype.element_ty)
        tl.store(dlogits + row[:, None] * EXPERTS + expert, slope, (row < rows)[:, None] & (expert < EXPERTS))


KERNELS = (
    kernels.register(moe_balance_runs, budget=Budget(registers=168, shared_bytes=4096)),
    kernels.register(moe_z_runs, budget=Budget(registers=64, shared_bytes=4096)),
    kernels.register(moe_add_runs, budget=Budget(registers=64, shared_bytes=4096)),
    kernels.register(moe_balance_finish, budget=Budget(registers=64, shared_bytes=4096)),
    kernels.register(moe_z_finish, budget=Budget(registers=32, shared_bytes=4096)),
    kernels.register(moe_balance_backward, budget=Budget(registers=128, shared_bytes=4096)),
    kernels.register(moe_z_backward, budget=Budget(registers=128, shared_bytes=4096)),
)
