"""The gradient of the logits."""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Kernel, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.core.layout import Rows
from adjoint.ops.moe.kernels import LANES, exponential_sum, load_slices, row_maximum, row_start, warp_sum
from adjoint.ops.moe.route.triton.selection import SOFTMAX

# -------------------------------------------------------------------------------------- of chosen experts


@triton.jit
def chosen_gradient(
    weights, indices, dweights, row, inside, start, inner, outer, step,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    SLOT_GROUPS: tl.constexpr,
):  # fmt: skip
    """For each group of slots the gradients of chosen logits, their experts and which are there; and Σ w·dw.

    The gradient of a softmax over all experts has a further term, for every expert: −p·Σ w·dw.
    """
    slots = ()
    products = tl.zeros([row.shape[0], LANES], tl.float32)
    for g in tl.static_range(SLOT_GROUPS):
        slot = tl.arange(0, LANES)[None, :] + g * LANES
        used = inside[:, None] & (slot < K)
        weight = tl.load(weights + row[:, None] * K + slot, used, other=0.0)
        expert = tl.load(indices + row[:, None] * K + slot, used, other=0)
        place = row_start(row, inner, outer, step, SPLIT)[:, None] + slot
        upstream = tl.load(dweights + place, used, other=0.0)
        products += weight * upstream
        slots = slots + ((weight, expert, upstream, used & (expert >= 0) & (expert < EXPERTS)),)
    dot = warp_sum(products)
    slopes = ()
    for g in tl.static_range(SLOT_GROUPS):
        weight, expert, upstream, used = slots[g]
        if SCORE == SOFTMAX or RENORMALIZE:
            slope = weight * (upstream - dot)
        else:
            slope = weight * upstream
        if SCORE != SOFTMAX:
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


# ------------------------------------------------------------------------------------------------ kernels


@kernel(budget=Budget(registers=64, shared_bytes=4096), schedule=("ROWS",))
@triton.jit
def moe_route_backward(
    weights: Pointer.float32, indices: Pointer.int64, dweights: Pointer.float32, logits: Pointer.element,
    dlogits: PointerIf16.element, rows: Int32, inner: Int32, outer: Int64, step: Int64,
    logits_inner: Int32, logits_outer: Int64, logits_step: Int64,
    EXPERTS: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, RENORMALIZE: tl.constexpr, SPLIT: tl.constexpr,
    SLOT_GROUPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Zeros, and then, by the same program, the gradients of the chosen logits."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    column = tl.arange(0, BLOCK)[None, :]
    zero = tl.zeros([ROWS, BLOCK], dlogits.dtype.element_ty)
    tl.store(dlogits + row[:, None] * EXPERTS + column, zero, inside[:, None] & (column < EXPERTS))
    start = logits + row_start(row, logits_inner, logits_outer, logits_step, SPLIT)
    slopes, _ = chosen_gradient(
        weights, indices, dweights, row, inside, start, inner, outer, step, EXPERTS, K, SCORE, RENORMALIZE, SPLIT,
        SLOT_GROUPS,
    )  # fmt: skip
    store_chosen(dlogits, slopes, row, EXPERTS, SLOT_GROUPS)


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("ROWS",))
@triton.jit
def moe_route_backward_dense(
    weights: Pointer.float32, indices: Pointer.int64, dweights: Pointer.float32, logits: Pointer.element,
    dlogits: PointerIf16.element, rows: Int32, inner: Int32, outer: Int64, step: Int64,
    logits_inner: Int32, logits_outer: Int64, logits_step: Int64,
    EXPERTS: tl.constexpr, K: tl.constexpr, SPLIT: tl.constexpr,
    SLICES: tl.constexpr, SLOT_GROUPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of a softmax over all experts: −p·Σ w·dw, and the chosen ones over it."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    start = logits + row_start(row, logits_inner, logits_outer, logits_step, SPLIT)
    slopes, dot = chosen_gradient(
        weights, indices, dweights, row, inside, start, inner, outer, step, EXPERTS, K, SOFTMAX, False, SPLIT,
        SLOT_GROUPS,
    )  # fmt: skip
    slices = load_slices(start, inside, EXPERTS, SLICES)
    maximum = row_maximum(slices, SLICES)
    total = exponential_sum(slices, maximum, tl.float32, SLICES)
    for s in tl.static_range(SLICES):
        column = tl.arange(0, LANES)[None, :] + s * LANES
        value = slices[s].to(tl.float32)
        share = tl.exp(value - maximum[:, None]) / total
        share = tl.where(value == value, share, 0.0)
        value = (-share * dot).to(dlogits.dtype.element_ty)
        tl.store(dlogits + row[:, None] * EXPERTS + column, value, inside[:, None] & (column < EXPERTS))
    store_chosen(dlogits, slopes, row, EXPERTS, SLOT_GROUPS)


# ----------------------------------------------------------------------------------------------- launches


def chosen_alone(setup: Setup) -> Execute:
    """The gradient of a mode in which only chosen experts have one."""
    experts, _, _, score, renormalize = setup.problem.options
    return _backward(
        setup, moe_route_backward, SCORE=SOFTMAX.value if score == "softmax" else 1, RENORMALIZE=renormalize,
        BLOCK=max(16, triton.next_power_of_2(experts)),
    )  # fmt: skip


def every_expert(setup: Setup) -> Execute:
    """The gradient of a softmax over all experts."""
    return _backward(setup, moe_route_backward_dense, SLICES=-(-setup.problem.options[0] // LANES.value))


def _backward(setup: Setup, kernel: Kernel, **constants: Any) -> Execute:
    experts, k, element, *_ = setup.problem.options
    warps = setup.schedule["warps"]
    rows_per_program = setup.schedule["rows_per_warp"] * warps
    constants |= {"EXPERTS": experts, "K": k, "SLOT_GROUPS": -(-k // LANES.value), "ROWS": rows_per_program}
    launches = [
        setup.either(kernel, element=element, SPLIT=split, num_warps=warps, **constants) for split in (False, True)
    ]
    count = sum(setup.problem.sizes[1:])  # of rows: part of a problem where there is something to copy
    values = torch.float32, count * k
    setup.copies(dweights=values, weights=values, indices=(torch.int64, count * k), logits=(element, count * experts))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dweights, weights, indices, logits, *_ = arguments
        (dlogits,) = outputs
        count = dlogits.numel() // experts
        if count == 0:
            return
        memory = setup.memory(workspace)
        dw = memory.rows("dweights", dweights)
        x = Rows(dlogits) if logits is None else memory.rows("logits", logits)
        launches[bool(dw.outer or x.outer)][is_aligned(dlogits)].launch(
            (-(-count // rows_per_program),), weights=memory.contiguous("weights", weights),
            indices=memory.contiguous("indices", indices), dweights=dw.tensor, logits=x.tensor, dlogits=dlogits,
            rows=count, inner=dw.inner, outer=dw.outer, step=dw.step, logits_inner=x.inner, logits_outer=x.outer,
            logits_step=x.step,
        )  # fmt: skip

    return execute
