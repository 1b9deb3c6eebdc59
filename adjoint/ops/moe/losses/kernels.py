"""Triton kernels of the router's losses.

Both losses are means over tokens. Their sums have an order that the tokens' numbers alone decide: runs of RUN
tokens one after the other, a run a warp, then RUNS runs one after the other, and so on. Counts are integers.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

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
from adjoint.ops.moe.kernels import LANES, load_slices, row_maximum, row_start, warp_sum
from adjoint.ops.moe.losses.plans import INDEX_OUT_OF_RANGE, RUN, RUNS, levels


@triton.jit
def softmax_parts(slices, SLICES: tl.constexpr):
    """Each row's shift (its maximum, 0 where that is infinite) and Σ e^(logit − shift); NaN stays NaN."""
    shift = row_maximum(slices, SLICES)
    shift = tl.where(tl.abs(shift) == float("inf"), 0.0, shift)
    total = tl.zeros(slices[0].shape, tl.float32)
    for s in tl.static_range(SLICES):
        total += tl.exp(slices[s].to(tl.float32) - shift[:, None])
    return shift, warp_sum(total)


@triton.jit
def share_of(logits, shift, total):
    """The softmax of a slice."""
    return tl.exp(logits.to(tl.float32) - shift[:, None]) / total


@triton.jit
def load_tokens(
    logits, mask, row, rows, inner, outer, step,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr,
):  # fmt: skip
    """Which tokens count, and of those that do the logits and the parts of their softmax."""
    counted = row < rows
    if MASKED:
        counted = counted & (tl.load(mask + row, counted, other=0) != 0)
    slices = load_slices(logits + row_start(row, inner, outer, step, SPLIT), counted, EXPERTS, SLICES)
    shift, total = softmax_parts(slices, SLICES)
    return counted, slices, shift, total


# ------------------------------------------------------------------------------------- sums over tokens


@kernel(budget=Budget(registers=168, shared_bytes=4096), numeric=("RUN",), schedule=("ROWS",))
@triton.jit
def moe_balance_runs(
    logits: Pointer.element, indices: Pointer.index, mask: Pointer.uint8, sums: Pointer.float32, counts: Pointer.int32,
    status_word: Pointer.int64, fault: Int32, rows: Int32, runs: Int32,
    inner: Int32, outer: Int64, step: Int64,
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
        counted, slices, shift, total = load_tokens(
            logits, mask, row, rows, inner, outer, step, EXPERTS, MASKED, SPLIT, SLICES
        )
        new_shares = ()
        for s in tl.static_range(SLICES):
            share = share_of(slices[s], shift, total)
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
    runs: Int32, inner: Int32, outer: Int64, step: Int64,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """For each run of tokens, the sum of logsumexp² and the number of tokens that count."""
    run = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS], tl.float32)
    tokens = tl.zeros([ROWS], tl.int32)
    for n in range(0, tl.minimum(rows - tl.program_id(0) * ROWS * RUN, RUN)):  # its first run is the longest
        row = run * RUN + n
        counted, _, shift, exponentials = load_tokens(
            logits, mask, row, rows, inner, outer, step, EXPERTS, MASKED, SPLIT, SLICES
        )
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


@triton.jit
def store_slope(dlogits, slope, counted, row, rows, expert, EXPERTS: tl.constexpr):
    """The gradient of some experts; 0 for tokens that do not count."""
    slope = tl.where(counted[:, None], slope, 0.0).to(dlogits.dtype.element_ty)
    tl.store(dlogits + row[:, None] * EXPERTS + expert, slope, (row < rows)[:, None] & (expert < EXPERTS))


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("ROWS",))
@triton.jit
def moe_balance_backward(
    dloss: Pointer.float32, logits: Pointer.element, mask: Pointer.uint8, saved: Pointer.float32,
    dlogits: Pointer.element, rows: Int32, inner: Int32, outer: Int64, step: Int64,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = dloss·E/tokens·p·(f − Σ p·f), and 0 for tokens that do not count; `saved` are f and the number of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    counted, slices, shift, total = load_tokens(
        logits, mask, row, rows, inner, outer, step, EXPERTS, MASKED, SPLIT, SLICES
    )
    one = tl.arange(0, 1)
    tokens = tl.load(saved + EXPERTS + one)
    scale = tl.load(dloss + one) * (EXPERTS / tl.where(tokens == 0, 1.0, tokens))
    products = tl.zeros([ROWS, LANES], tl.float32)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        fraction = tl.load(saved + expert, expert < EXPERTS, other=0.0)
        products += fraction * share_of(slices[s], shift, total)
    mean = warp_sum(products)
    for s in tl.static_range(SLICES):
        expert = lane + s * LANES
        fraction = tl.load(saved + expert, expert < EXPERTS, other=0.0)
        share = share_of(slices[s], shift, total)
        slope = scale[:, None] * (share * (fraction - mean))
        store_slope(dlogits, slope, counted, row, rows, expert, EXPERTS)


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("ROWS",))
@triton.jit
def moe_z_backward(
    dloss: Pointer.float32, logits: Pointer.element, mask: Pointer.uint8, saved: Pointer.float32,
    dlogits: Pointer.element, rows: Int32, inner: Int32, outer: Int64, step: Int64,
    EXPERTS: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = 2·dloss/tokens·logsumexp·p, and 0 for tokens that do not count; `saved` is the number of tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, LANES)[None, :]
    counted, slices, shift, total = load_tokens(
        logits, mask, row, rows, inner, outer, step, EXPERTS, MASKED, SPLIT, SLICES
    )
    one = tl.arange(0, 1)
    number = tl.load(saved + one)
    scale = tl.load(dloss + one) * (2.0 / tl.where(number == 0, 1.0, number)) * (shift + tl.log(tl.max(total, 1)))
    for s in tl.static_range(SLICES):
        slope = scale[:, None] * share_of(slices[s], shift, total)
        store_slope(dlogits, slope, counted, row, rows, lane + s * LANES, EXPERTS)


# ----------------------------------------------------------------------------------------------- launches


def _bind(setup: Setup, kernel: Kernel, **settings: Any) -> list[Launch]:
    """A kernel for logits along one axis, and for logits along two; and room for what is copied before it reads."""
    problem, warps = setup.problem, setup.schedule["warps"]
    experts, count, k = problem.sizes
    indices = settings.get("index", torch.int64), count * k
    setup.copies(logits=(problem.dtypes[0], count * experts), mask=(torch.uint8, count), indices=indices)
    return [
        setup.kernel(
            kernel, element=problem.dtypes[0], EXPERTS=experts, MASKED=torch.bool in problem.dtypes, SPLIT=split,
            SLICES=-(-experts // LANES.value), ROWS=warps, num_warps=warps, **settings,
        )
        for split in (False, True)
    ]  # fmt: skip


def _mask_bytes(memory: Memory, mask: Tensor | None, absent: Tensor) -> Tensor:
    """The mask as bytes, one after the other; or what stands for it where there is none."""
    return absent if mask is None else memory.contiguous("mask", mask.view(torch.uint8))


def balance(setup: Setup) -> Execute:
    """The load balancing loss."""
    experts, _, k = setup.problem.sizes
    launches = _bind(setup, moe_balance_runs, index=setup.problem.dtypes[1], K=k, RUN=RUN)
    finish = setup.kernel(moe_balance_finish, EXPERTS=experts, SLICES=-(-experts // LANES.value), num_warps=1)
    return _mean(setup, launches, finish, experts, experts + 1)


def z(setup: Setup) -> Execute:
    """The z loss."""
    return _mean(setup, _bind(setup, moe_z_runs, RUN=RUN), setup.kernel(moe_z_finish, num_warps=1), 1, 1)


def _mean(setup: Setup, launches: list[Launch], finish: Launch, width: int, counts_width: int) -> Execute:
    """A loss: `width` sums and `counts_width` counts of each run, their sums level by level, and what follows."""
    count, device = setup.problem.sizes[1], setup.device
    sizes = levels(count)
    programs = -(-sizes[0] // setup.schedule["warps"])
    for level, size in enumerate(sizes):
        setup.scratch(**{f"sums_{level}": (torch.float32, size * width)})
        setup.scratch(**{f"counts_{level}": (torch.int32, size * counts_width)})
    block = setup.schedule["add_columns"]
    add_runs = setup.kernel(moe_add_runs, RUNS=RUNS, BLOCK=block, num_warps=setup.schedule["add_warps"])
    columns = -(-counts_width // block)

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
            choices["indices"] = memory.contiguous("indices", indices[0])
            choices |= {"status_word": status_word(device), "fault": INDEX_OUT_OF_RANGE.row}
        x, sums, counts = memory.rows("logits", logits), memory["sums_0"], memory["counts_0"]
        launches[x.outer != 0].launch(
            (programs,), logits=x.tensor, mask=_mask_bytes(memory, mask, saved), sums=sums, counts=counts, rows=count,
            runs=sizes[0], inner=x.inner, outer=x.outer, step=x.step, **choices,
        )  # fmt: skip
        for level in range(1, len(sizes)):
            sums_above, counts_above = memory[f"sums_{level}"], memory[f"counts_{level}"]
            add_runs.launch(
                (sizes[level], columns), sums=sums, counts=counts, sums_above=sums_above, counts_above=counts_above,
                count=sizes[level - 1], width=width, counts_width=counts_width,
            )  # fmt: skip
            sums, counts = sums_above, counts_above
        finish.launch((1,), sums=sums, counts=counts, loss=loss, saved=saved)
        if indices and device.type == "cpu":
            check()

    return execute


def backward(setup: Setup) -> Execute:
    """The gradient of either loss."""
    count = setup.problem.sizes[1]
    launches = _bind(setup, moe_z_backward if setup.problem.op == "moe_z_loss_backward" else moe_balance_backward)
    programs = -(-count // setup.schedule["warps"])

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dloss, logits, mask, saved = arguments
        if count == 0:
            return
        memory = setup.memory(workspace)
        x = memory.rows("logits", logits)
        launches[x.outer != 0].launch(
            (programs,), dloss=dloss, logits=x.tensor, mask=_mask_bytes(memory, mask, saved), saved=saved,
            dlogits=outputs[0], rows=count, inner=x.inner, outer=x.outer, step=x.step,
        )  # fmt: skip

    return execute
