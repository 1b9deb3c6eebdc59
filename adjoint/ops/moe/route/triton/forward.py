"""The k best experts of each token, and their weights.

Scores that are compared (sigmoid, or anything with a bias) are computed in float64 and rounded once to float32:
the selection then hardly depends on whose exponential was used. Weights are computed in float32.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Kernel, Pointer, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.ops.moe.kernels import LANES, exponential_sum, load_slices, row_maximum, row_start, sum_by_halves, warp_sum
from adjoint.ops.moe.route.triton.selection import (
    NO_EXPERT_32,
    NO_EXPERT_64,
    SOFTMAX,
    experts_of,
    key_of,
    logit_keys,
    put,
    row_best,
    score_keys,
    score_of,
    sigmoid_64,
    sort_lists,
    take_best,
)

# ------------------------------------------------------------------------------------------------ weights


@triton.jit
def slot_is_used(group, K: tl.constexpr):
    return tl.arange(0, LANES)[None, :] + group * LANES < K


@triton.jit
def load_chosen(start, experts, inside, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The logits of chosen experts, as float32."""
    values = ()
    for g in tl.static_range(SLOT_GROUPS):
        mask = inside[:, None] & slot_is_used(g, K)
        values = values + (tl.load(start[:, None] + experts[g].to(tl.int64), mask, other=0.0).to(tl.float32),)
    return values


@triton.jit
def largest_chosen(values, SCORE: tl.constexpr, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    """The largest of x, or of min(x, 0) for a sigmoid, among the chosen logits; NaN left out."""
    best = tl.full(values[0].shape, float("-inf"), tl.float32)
    for g in tl.static_range(SLOT_GROUPS):
        value = values[g] if SCORE == SOFTMAX else tl.where(values[g] > 0, 0.0, values[g])
        best = tl.where(slot_is_used(g, K) & (value > best), value, best)
    return tl.max(best, 1)


@triton.jit
def weights_of(
    values, maximum, total, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, MAXIMUM_IS_CHOSEN: tl.constexpr,
    K: tl.constexpr, SLOT_GROUPS: tl.constexpr,
):  # fmt: skip
    """Weights of the chosen logits; `total` is Σ e^(logit − maximum) over the row.

    A row with +∞, or with nothing above −∞, gives NaN. σ(x) = e^min(x, 0) / (1 + e^−|x|) is divided by the largest
    of its numerators before it is summed, so that a row of very negative logits does not underflow.
    """
    reference = maximum
    if RENORMALIZE and not MAXIMUM_IS_CHOSEN:
        reference = largest_chosen(values, SCORE, K, SLOT_GROUPS)
    parts = ()
    sums = tl.zeros(values[0].shape, tl.float32)
    for g in tl.static_range(SLOT_GROUPS):
        value = values[g]
        if SCORE == SOFTMAX:
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
        if RENORMALIZE or SCORE == SOFTMAX:
            weight = weight / total
        if not MAXIMUM_IS_CHOSEN:  # otherwise ∞ − ∞ is NaN already
            weight = tl.where((tl.abs(maximum) == float("inf"))[:, None], float("nan"), weight)
        weights = weights + (weight,)
    return weights


@triton.jit
def store_rows(weights, indices, values, experts, row, inside, K: tl.constexpr, SLOT_GROUPS: tl.constexpr):
    for g in tl.static_range(SLOT_GROUPS):
        slot = tl.arange(0, LANES)[None, :] + g * LANES
        mask = inside[:, None] & (slot < K)
        tl.store(weights + row[:, None] * K + slot, values[g], mask)
        tl.store(indices + row[:, None] * K + slot, experts[g].to(tl.int64), mask)


# -------------------------------------------------------------------------------------- among all experts


@kernel(budget=Budget(registers=112, shared_bytes=4096, spilled_elsewhere=8), schedule=("ROWS",))
@triton.jit
def moe_route_forward(
    logits: Pointer.element, bias: Pointer.float32, weights: Pointer.float32, indices: Pointer.int64, rows: Int32,
    inner: Int32, outer: Int64, step: Int64, bias_stride: Int64,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr, SLICES: tl.constexpr, LEVELS: tl.constexpr, SLOT_GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The K best experts of each row and their weights; a row a warp."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    start = logits + row_start(row, inner, outer, step, SPLIT)
    slices = load_slices(start, inside, EXPERTS, SLICES)
    AS_GIVEN: tl.constexpr = SCORE == SOFTMAX and not BIASED
    if AS_GIVEN:
        no_expert: tl.constexpr = NO_EXPERT_64 if logits.dtype.element_ty == tl.float32 else NO_EXPERT_32
        keys = logit_keys(slices, no_expert, EXPERTS, SLICES)
        best, first = take_best(sort_lists(keys, SLICES, LEVELS), no_expert, SLICES, K, SLOT_GROUPS)
        experts = experts_of(best, SLOT_GROUPS)
        values = ()
        for g in tl.static_range(SLOT_GROUPS):
            values = values + (score_of(best[g], logits.dtype.element_ty),)
        maximum = score_of(first, logits.dtype.element_ty)
    else:
        maximum = row_maximum(slices, SLICES)
        keys = score_keys(slices, bias, bias_stride, maximum, EXPERTS, SLICES, SCORE, BIASED)
        best, first = take_best(sort_lists(keys, SLICES, LEVELS), NO_EXPERT_64, SLICES, K, SLOT_GROUPS)
        experts = experts_of(best, SLOT_GROUPS)
        values = load_chosen(start, experts, inside, K, SLOT_GROUPS)
    total = maximum
    if SCORE == SOFTMAX and not RENORMALIZE:
        total = exponential_sum(slices, maximum, tl.float32, SLICES)
    row_weights = weights_of(values, maximum, total, SCORE, RENORMALIZE, AS_GIVEN, K, SLOT_GROUPS)
    store_rows(weights, indices, row_weights, experts, row, inside, K, SLOT_GROUPS)


def route(setup: Setup) -> Execute:
    """Chooses among all experts."""
    slices = -(-setup.problem.sizes[0] // LANES.value)
    warps = setup.schedule["warps"]
    rows = setup.schedule["rows_per_warp"] * warps
    return _route(setup, moe_route_forward, rows, SLICES=slices, LEVELS=(slices - 1).bit_length(), ROWS=rows)


# ------------------------------------------------------------------------------------- in the best groups


@kernel(budget=Budget(registers=128, shared_bytes=4096))
@triton.jit
def moe_route_grouped(
    logits: Pointer.element, bias: Pointer.float32, weights: Pointer.float32, indices: Pointer.int64, rows: Int32,
    inner: Int32, outer: Int64, step: Int64, bias_stride: Int64,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, BIASED: tl.constexpr, RENORMALIZE: tl.constexpr,
    SPLIT: tl.constexpr, GROUPS: tl.constexpr, GROUPS_KEPT: tl.constexpr, GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr, LEVELS: tl.constexpr, SLOT_GROUPS: tl.constexpr,
):  # fmt: skip
    """The K best experts of the best groups, a row a program; a group scores the sum of its two best.

    `rows` is there to launch both kernels alike: no program is past the last row.
    """
    row = tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64)
    start = logits + row_start(row, inner, outer, step, SPLIT)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)
    member = tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * SIZE + member[None, :]
    is_expert = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    pointers = tl.broadcast_to(start[:, None], [GROUP_BLOCK, MEMBER_BLOCK]) + expert.to(tl.int64)
    x = tl.load(pointers, is_expert, other=float("-inf")).to(tl.float32)
    flat = tl.reshape(x, [1, GROUP_BLOCK * MEMBER_BLOCK])
    maximum = tl.max(tl.where(flat == flat, flat, float("-inf")), 1)
    score = x
    if BIASED or SCORE != SOFTMAX:
        wide = x.to(tl.float64)
        if SCORE == SOFTMAX:
            scaled = flat.to(tl.float64) - maximum[:, None].to(tl.float64)
            total_64 = sum_by_halves(tl.where(flat == flat, tl.exp(scaled), 0.0), LEVELS)
            score = (tl.exp(wide - maximum[:, None].to(tl.float64)) / total_64).to(tl.float32)
        else:
            score = sigmoid_64(wide).to(tl.float32)
        if BIASED:
            score += tl.load(bias + expert * bias_stride, is_expert, other=0.0)
    key = tl.where(is_expert, key_of(score, expert), NO_EXPERT_64)

    best = tl.max(key, 1)
    group_score = score_of(best, tl.float32)
    if SIZE > 1:
        group_score += score_of(tl.max(tl.where(key == best[:, None], NO_EXPERT_64, key), 1), tl.float32)
    group_key = tl.where(group < GROUPS, key_of(group_score, group), NO_EXPERT_64)
    is_kept = group < 0
    for _ in range(GROUPS_KEPT):
        winner = group_key == tl.max(group_key, 0)
        is_kept = is_kept | winner
        group_key = tl.where(winner, NO_EXPERT_64, group_key)

    key = tl.reshape(tl.where(is_kept[:, None], key, NO_EXPERT_64), [1, GROUP_BLOCK * MEMBER_BLOCK])
    slots = ()
    for _ in tl.static_range(SLOT_GROUPS):
        slots = slots + (tl.full([1, LANES], NO_EXPERT_64, tl.int64),)
    for i in range(K):
        next_best = row_best(key)
        slots = put(slots, next_best, i, SLOT_GROUPS)
        key = tl.where(key == next_best[:, None], NO_EXPERT_64, key)
    experts = experts_of(slots, SLOT_GROUPS)
    inside = row >= 0
    values = load_chosen(start, experts, inside, K, SLOT_GROUPS)
    total = maximum
    if SCORE == SOFTMAX and not RENORMALIZE:
        terms = tl.where(flat == flat, tl.exp(flat - maximum[:, None]), 0.0)
        total = sum_by_halves(terms, LEVELS)
    row_weights = weights_of(values, maximum, total, SCORE, RENORMALIZE, False, K, SLOT_GROUPS)
    store_rows(weights, indices, row_weights, experts, row, inside, K, SLOT_GROUPS)


def route_in_groups(setup: Setup) -> Execute:
    """Chooses among the experts of the best groups."""
    _, _, groups, groups_kept, _ = setup.problem.options
    group_block = triton.next_power_of_2(groups)
    member_block = triton.next_power_of_2(setup.problem.sizes[0] // groups)
    return _route(
        setup, moe_route_grouped, 1, GROUPS=groups, GROUPS_KEPT=groups_kept, GROUP_BLOCK=group_block,
        MEMBER_BLOCK=member_block, LEVELS=(group_block * member_block - 1).bit_length(),
    )  # fmt: skip


# ----------------------------------------------------------------------------------------------- launches


def _route(setup: Setup, kernel: Kernel, rows_per_program: int, **constants: Any) -> Execute:
    """Launches either kernel."""
    problem = setup.problem
    k, score, _, _, renormalize = problem.options
    experts, *rows = problem.sizes  # the number of rows is part of a problem where there is something to copy
    launches = [
        setup.kernel(
            kernel, element=problem.dtypes[0], EXPERTS=experts, K=k, SCORE=SOFTMAX.value if score == "softmax" else 1,
            BIASED=len(problem.dtypes) > 1, RENORMALIZE=renormalize, SLOT_GROUPS=-(-k // LANES.value), SPLIT=split,
            num_warps=setup.schedule["warps"], **constants,
        )
        for split in (False, True)
    ]  # fmt: skip
    setup.copies(logits=(problem.dtypes[0], experts * sum(rows)))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        logits, bias, *_ = arguments
        weights, indices = outputs
        count = weights.numel() // k
        if count == 0:
            return
        x = setup.memory(workspace).rows("logits", logits)
        launches[x.outer != 0].launch(
            (-(-count // rows_per_program),), logits=x.tensor, bias=weights if bias is None else bias, weights=weights,
            indices=indices, rows=count, inner=x.inner, outer=x.outer, step=x.step,
            bias_stride=1 if bias is None else bias.stride(0),
        )  # fmt: skip

    return execute
