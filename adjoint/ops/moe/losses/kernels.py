"""Triton kernels of the router's losses.

Both losses are means over tokens. Their sums have an order that the tokens' numbers alone decide: runs of RUN
tokens one after the other, a run a warp, then RUNS runs one after the other, and so on. Counts are integers.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Budget, Int32, Int64, Kernel, Pointer, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.ops.moe.losses.faults import INDEX_OUT_OF_RANGE
from adjoint.ops.moe.losses.plans import RUN, RUNS, levels
from adjoint.ops.moe.rows import Copies
from adjoint.ops.moe.warp_rows import LANES, load_slices, row_start, warp_sum


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


# ------------------------------------------------------------------------------------- sums over tokens


@kernel(budget=Budget(registers=168, shared_bytes=4096), numeric=("RUN",), schedule=("ROWS",))
@triton.jit
def moe_balance_runs(
    logits: Pointer.element, indices: Pointer.index, mask: Pointer.uint8, sums: Pointer.float32, counts: Pointer.int32,
    status_word: Pointer.int64, fault: Int32, rows: Int32, runs: Int32,
    inner: Int32, outer_stride: Int64, inner_stride: Int64,
    EXPERTS: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
    RUN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """For each run of tokens, the sum of every expert's probability, and how often each was chosen.

    `counts` has one column more: the tokens that count.
    """
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    shares = ()
    choices = ()
    for _ in tl.static_range(SLICES):
        shares = shares + (tl.zeros([ROWS, LANES], tl.float32),)
        choices = choices + (tl.zeros([ROWS, LANES], tl.int32),)
    tokens = tl.zeros([ROWS], tl.int32)
    for n in range(0, tl.minimum(rows - tl.program_id(0) * ROWS * RUN, RUN)):  # its first run is the longest
        row = run * RUN + n
        counted = tokens_that_count(mask, row, rows, MASKED)
        start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
        slices = load_slices(start, counted, EXPERTS, SLICES)
        shift, total = softmax_parts(slices, SLICES)
        new_shares = ()
        for s in tl.static_range(SLICES):
            share = tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total
            new_shares = new_shares + (shares[s] + tl.where(counted[:, None], share, 0.0),)
        shares = new_shares
        for first in range(0, K, LANES):
            slot = first + tl.arange(0, LANES)[None, :]
            used = counted[:, None] & (slot < K)
            place = row[:, None] * K + slot
            expert = tl.load(indices + place, used, other=-1).to(tl.int64)
            valid = (expert >= 0) & (expert < EXPERTS)
            record(status_word, fault, place, expert, used & (valid == 0))
            valid_expert = tl.where(valid, expert, -1).to(tl.int32)
            for i in range(first, tl.minimum(first + LANES, K)):  # from the lane that has it to all of them
                choice = tl.max(tl.where(slot == i, valid_expert, -1), 1)[:, None]
                new_choices = ()
                for s in tl.static_range(SLICES):
                    new_choices = new_choices + (choices[s] + (choice == lane + s * LANES).to(tl.int32),)
                choices = new_choices
        tokens += counted.to(tl.int32)
    inside = run < runs
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        in_row = inside[:, None] & (expert < EXPERTS)
        tl.store(sums + run[:, None] * EXPERTS + expert, shares[s], in_row)
        tl.store(counts + run[:, None] * (EXPERTS + 1) + expert, choices[s], in_row)
    tl.store(counts + run * (EXPERTS + 1) + EXPERTS, tokens, inside)


@kernel(budget=Budget(registers=64, shared_bytes=4096), numeric=("RUN",), schedule=("ROWS",))
@triton.jit
def moe_z_runs(
    logits: Pointer.element, mask: Pointer.uint8, sums: Pointer.float32, counts: Pointer.int32, rows: Int32,
    runs: Int32, inner: Int32, outer_stride: Int64, inner_stride: Int64,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """For each run of tokens, the sum of logsumexp² and the number of tokens that count."""
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    tokens = tl.zeros([ROWS], tl.int32)
    for n in range(0, tl.minimum(rows - tl.program_id(0) * ROWS * RUN, RUN)):  # its first run is the longest
        row = run * RUN + n
        counted = tokens_that_count(mask, row, rows, MASKED)
        start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
        slices = load_slices(start, counted, EXPERTS, SLICES)
        shift, exponentials = softmax_parts(slices, SLICES)
        size = shift + tl.log(tl.max(exponentials, 1))  # which is one value in all places
        total += tl.where(counted, size * size, 0.0)
        tokens += counted.to(tl.int32)
    inside = run < runs
    tl.store(sums + run, total, inside)
    tl.store(counts + run, tokens, inside)


@kernel(budget=Budget(registers=64, shared_bytes=4096), numeric=("RUNS",), schedule=("BLOCK",))
@triton.jit
def moe_add_runs(
    sums: Pointer.float32, counts: Pointer.int32, sums_above: Pointer.float32, counts_above: Pointer.int32,
    count: Int32, width: Int32, counts_width: Int32, RUNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of the level above: sums of RUNS rows [count, width] of each, one after the other."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.int32)
    for n in range(0, tl.minimum(count - tl.program_id(0) * RUNS, RUNS)):
        source = row * RUNS + n
        total += tl.load(sums + source * width + column, column < width, other=0.0)
        number += tl.load(counts + source * counts_width + column, column < counts_width, other=0)
    tl.store(sums_above + row * width + column, total, column < width)
    tl.store(counts_above + row * counts_width + column, number, column < counts_width)


# ---------------------------------------------------------------------------------------------- losses


@kernel(budget=Budget(registers=64, shared_bytes=4096))
@triton.jit
def moe_balance_finish(
    sums: Pointer.float32, counts: Pointer.int32, loss: Pointer.float32, saved: Pointer.float32,
    EXPERTS: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """loss = E·Σ f·P; `saved` are f and the number of tokens."""
    lane = tl.arange(0, LANES)[None, :]
    tokens = tl.load(counts + EXPERTS + tl.zeros([1], tl.int64)).to(tl.float32)
    safe = tl.where(tokens == 0, 1.0, tokens)
    total = tl.zeros([1, LANES], tl.float32)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        share = tl.load(sums + expert, expert < EXPERTS, other=0.0) / safe[:, None]
        fraction = tl.load(counts + expert, expert < EXPERTS, other=0).to(tl.float32) / safe[:, None]
        total += fraction * share
        tl.store(saved + expert, fraction, expert < EXPERTS)
    one = tl.arange(0, 1)
    tl.store(saved + EXPERTS + one, tokens)
    tl.store(loss + one, tl.max(warp_sum(total), 1) * EXPERTS)


@kernel(budget=Budget(registers=32, shared_bytes=4096))
@triton.jit
def moe_z_finish(sums: Pointer.float32, counts: Pointer.int32, loss: Pointer.float32, saved: Pointer.float32):
    """loss = the mean; `saved` is the number of tokens."""
    one = tl.arange(0, 1)
    number = tl.load(counts + one).to(tl.float32)
    tl.store(loss + one, tl.load(sums + one) / tl.where(number == 0, 1.0, number))
    tl.store(saved + one, number)


# -------------------------------------------------------------------------------------------- gradients


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("ROWS",))
@triton.jit
def moe_balance_backward(
    dloss: Pointer.float32, logits: Pointer.element, mask: Pointer.uint8, saved: Pointer.float32,
    dlogits: Pointer.element, rows: Int32, inner: Int32, outer_stride: Int64, inner_stride: Int64,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = dloss·E/tokens·p·(f − Σ p·f), and 0 for tokens that do not count; `saved` are f and the number of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    counted = tokens_that_count(mask, row, rows, MASKED)
    start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
    slices = load_slices(start, counted, EXPERTS, SLICES)
    shift, total = softmax_parts(slices, SLICES)
    one = tl.arange(0, 1)
    tokens = tl.load(saved + EXPERTS + one)
    scale = tl.load(dloss + one) * (EXPERTS / tl.where(tokens == 0, 1.0, tokens))
    products = tl.zeros([ROWS, LANES], tl.float32)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        fraction = tl.load(saved + expert, expert < EXPERTS, other=0.0)
        products += fraction * (tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total)
    mean = warp_sum(products)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        fraction = tl.load(saved + expert, expert < EXPERTS, other=0.0)
        share = tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total
        slope = scale[:, None] * (share * (fraction - mean))
        slope = tl.where(counted[:, None], slope, 0.0).to(dlogits.dtype.element_ty)
        tl.store(dlogits + row[:, None] * EXPERTS + expert, slope, (row < rows)[:, None] & (expert < EXPERTS))


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("ROWS",))
@triton.jit
def moe_z_backward(
    dloss: Pointer.float32, logits: Pointer.element, mask: Pointer.uint8, saved: Pointer.float32,
    dlogits: Pointer.element, rows: Int32, inner: Int32, outer_stride: Int64, inner_stride: Int64,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = 2·dloss/tokens·logsumexp·p, and 0 for tokens that do not count; `saved` is the number of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    counted = tokens_that_count(mask, row, rows, MASKED)
    start = logits + row_start(row, inner, outer_stride, inner_stride, SPLIT)
    slices = load_slices(start, counted, EXPERTS, SLICES)
    shift, total = softmax_parts(slices, SLICES)
    one = tl.arange(0, 1)
    number = tl.load(saved + one)
    scale = tl.load(dloss + one) * (2.0 / tl.where(number == 0, 1.0, number)) * (shift + tl.log(tl.max(total, 1)))
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        share = tl.exp(slices[s].to(tl.float32) - shift[:, None]) / total
        slope = tl.where(counted[:, None], scale[:, None] * share, 0.0).to(dlogits.dtype.element_ty)
        tl.store(dlogits + row[:, None] * EXPERTS + expert, slope, (row < rows)[:, None] & (expert < EXPERTS))


# ----------------------------------------------------------------------------------------------- launches


def _either_layout(setup: Setup, kernel: Kernel, **constants: Any) -> list[Launch]:
    """A kernel for logits along one axis, and for logits along two."""
    problem, warps = setup.problem, setup.schedule["warps"]
    experts = problem.sizes[0]
    return [
        setup.kernel(
            kernel, element=problem.dtypes[0], EXPERTS=experts, MASKED=torch.bool in problem.dtypes, SPLIT=split,
            SLICES=-(-experts // LANES.value), ROWS=warps, num_warps=warps, **constants,
        )
        for split in (False, True)
    ]  # fmt: skip


def _copies(setup: Setup, **others: tuple[torch.dtype, int]) -> Copies:
    experts, count, _ = setup.problem.sizes
    return Copies(setup, logits=(setup.problem.dtypes[0], count * experts), mask=(torch.uint8, count), **others)


def _mask_bytes(mask: Tensor | None, absent: Tensor, copies: Copies, memory: Memory | None) -> Tensor:
    """The mask as bytes, one after the other; or what stands for it where there is none."""
    return absent if mask is None else copies.contiguous("mask", mask.view(torch.uint8), memory)


def _sum_tree(setup: Setup, width: int, counts_width: int) -> Callable[[Memory], tuple[Any, Any]]:
    """Memory for `width` sums and `counts_width` counts of each run; gives what adds them, level by level."""
    sizes = levels(setup.problem.sizes[1])
    for level, size in enumerate(sizes):
        setup.scratch(**{f"sums_{level}": (torch.float32, size * width)})
        setup.scratch(**{f"counts_{level}": (torch.int32, size * counts_width)})
    block = setup.schedule["add_columns"]
    add_runs = setup.kernel(moe_add_runs, RUNS=RUNS, BLOCK=block, num_warps=setup.schedule["add_warps"])
    columns = -(-counts_width // block)

    def add(memory: Memory) -> tuple[Any, Any]:
        sums, counts = memory["sums_0"], memory["counts_0"]
        for level in range(1, len(sizes)):
            sums_above, counts_above = memory[f"sums_{level}"], memory[f"counts_{level}"]
            add_runs.launch(
                (sizes[level], columns), sums=sums, counts=counts, sums_above=sums_above, counts_above=counts_above,
                count=sizes[level - 1], width=width, counts_width=counts_width,
            )  # fmt: skip
            sums, counts = sums_above, counts_above
        return sums, counts

    return add


def balance(setup: Setup) -> Execute:
    """The load balancing loss."""
    experts, count, k = setup.problem.sizes
    index = setup.problem.dtypes[1]
    launches = _either_layout(setup, moe_balance_runs, index=index, K=k, RUN=RUN)
    add = _sum_tree(setup, experts, experts + 1)
    finish = setup.kernel(moe_balance_finish, EXPERTS=experts, SLICES=-(-experts // LANES.value), num_warps=1)
    return _mean(setup, launches, add, finish, _copies(setup, indices=(index, count * k)))


def z(setup: Setup) -> Execute:
    """The z loss."""
    launches = _either_layout(setup, moe_z_runs, RUN=RUN)
    add = _sum_tree(setup, 1, 1)
    return _mean(setup, launches, add, setup.kernel(moe_z_finish, num_warps=1), _copies(setup))


def _mean(
    setup: Setup, launches: list[Launch], add: Callable[[Memory], tuple[Any, Any]], finish: Launch, copies: Copies
) -> Execute:
    """A loss: the sums of runs, their sum, and what follows from it."""
    count, device = setup.problem.sizes[1], setup.device
    runs = levels(count)[0]
    programs = -(-runs // setup.schedule["warps"])

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        logits, *indices, mask = arguments
        loss, saved = outputs
        if count == 0:
            loss.zero_()
            saved.zero_()
            return
        memory = setup.memory(workspace)
        choices: dict[str, Any] = {}
        if indices:
            choices["indices"] = copies.contiguous("indices", indices[0], memory)
            choices |= {"status_word": status_word(device), "fault": INDEX_OUT_OF_RANGE.row}
        x = copies.rows("logits", logits, memory)
        launches[x.inner < count].launch(
            (programs,), logits=x.tensor, mask=_mask_bytes(mask, saved, copies, memory), sums=memory["sums_0"],
            counts=memory["counts_0"], rows=count, runs=runs, inner=x.inner, outer_stride=x.outer_stride,
            inner_stride=x.inner_stride, **choices,
        )  # fmt: skip
        sums, counts = add(memory)
        finish.launch((1,), sums=sums, counts=counts, loss=loss, saved=saved)
        if choices and device.type == "cpu":
            check()

    return execute


def backward(setup: Setup, kernel: Kernel) -> Execute:
    """The gradient of a loss, by its kernel."""
    count = setup.problem.sizes[1]
    launches, copies = _either_layout(setup, kernel), _copies(setup)
    programs = -(-count // setup.schedule["warps"])

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dloss, logits, mask, saved = arguments
        if count == 0:
            return
        memory = copies.memory(workspace)
        x = copies.rows("logits", logits, memory)
        launches[x.inner < count].launch(
            (programs,), dloss=dloss, logits=x.tensor, mask=_mask_bytes(mask, saved, copies, memory), saved=saved,
            dlogits=outputs[0], rows=count, inner=x.inner, outer_stride=x.outer_stride, inner_stride=x.inner_stride,
        )  # fmt: skip

    return execute
