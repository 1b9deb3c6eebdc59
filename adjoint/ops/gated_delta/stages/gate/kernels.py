"""Triton kernels of `gate`, both directions, and what launches them.

Tensors are rows of adjacent elements, row n at (n // inner)·outer + (n % inner)·step. Sums are halved, the first half
plus the second, until one number is left: their order depends on how many terms there are, not on how threads lie.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.core.layout import Rows
from adjoint.device.row_tiles import halves
from adjoint.ops.gated_delta.stages.gate.plans import RUN, levels

_RUN = tl.constexpr(RUN)
_RUN_LEVELS = tl.constexpr(RUN.bit_length() - 1)

_BUDGET = Budget(registers=255, shared_bytes=32_768)  # without wide loads, every element has an address


@triton.jit
def row_offsets(row, inner, outer, step):
    """Where rows begin, as a column."""
    return ((row // inner) * outer + (row % inner) * step)[:, None]


@triton.jit
def sums_of_run(values, COLUMNS: tl.constexpr):
    """[RUN, COLUMNS] -> [COLUMNS], by halves."""
    return tl.reshape(halves(values, 1, _RUN_LEVELS, COLUMNS), (COLUMNS,))


@triton.jit
def sigmoid_of(t, small):
    """σ(t), from e^{−|t|}."""
    return tl.where(t >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def softplus_of(t, small):
    """log(1 + e^t) = max(t, 0) + log(1 + e^{−|t|}), from e^{−|t|}: log(1 + x) = 2·atanh(s), s = x / (2 + x) ≤ 1/3.

    Eight terms of the series leave 2⁻²⁹ of it; a logarithm of 1 + x would have lost x where it is small.
    """
    s = small / (2.0 + small)
    z = s * s
    series = 1.0 / 13.0 + z * (1.0 / 15.0)
    series = 1.0 / 11.0 + z * series
    series = 1.0 / 9.0 + z * series
    series = 1.0 / 7.0 + z * series
    series = 1.0 / 5.0 + z * series
    series = 1.0 / 3.0 + z * series
    return tl.maximum(t, 0.0) + 2.0 * (s + s * (z * series))


@triton.jit
def through_rate(dg, rate, slope):
    """−dg·e^{A_log}·slope, 0 where dg is: a g of −inf, which resets the state, has infinite factors."""
    return tl.where(dg == 0, dg * -1.0, dg * -rate * slope)


@kernel(budget=_BUDGET, schedule=("COLUMNS", "ROWS"))
@triton.jit
def gated_delta_gate(
    a: Pointer.element, b: Pointer.element, A_log: Pointer.rate, dt_bias: Pointer.bias, g: Pointer.float32,
    beta: Pointer.float32, rows: Int32, a_inner: Int32, a_outer: Int64, a_step: Int64, b_inner: Int32,
    b_outer: Int64, b_step: Int64, A_step: Int64, dt_step: Int64,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """g = −e^{A_log}·softplus(a + dt_bias), β = σ(b)"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = head < HEADS
    inside = (row < rows)[:, None] & in_head[None, :]
    rate = tl.exp(tl.load(A_log + head * A_step, in_head, other=0).to(tl.float32))[None, :]
    bias = tl.load(dt_bias + head * dt_step, in_head, other=0).to(tl.float32)[None, :]
    t = tl.load(a + row_offsets(row, a_inner, a_outer, a_step) + head[None, :], inside, other=0).to(tl.float32) + bias
    at = row.to(tl.int64)[:, None] * HEADS + head[None, :]
    tl.store(g + at, -rate * softplus_of(t, tl.exp(-tl.abs(t))), inside)
    t = tl.load(b + row_offsets(row, b_inner, b_outer, b_step) + head[None, :], inside, other=0).to(tl.float32)
    tl.store(beta + at, sigmoid_of(t, tl.exp(-tl.abs(t))), inside)


@kernel(budget=_BUDGET, schedule=("COLUMNS",))
@triton.jit
def gated_delta_gate_backward(
    a: Pointer.element, b: Pointer.element, A_log: Pointer.rate, dt_bias: Pointer.bias, dg: Pointer.float32,
    dbeta: Pointer.float32, da: Pointer.element, db: Pointer.element, sums: Pointer.float32, rows: Int32,
    runs: Int64, has_dg: Int32, has_dbeta: Int32, a_inner: Int32, a_outer: Int64, a_step: Int64, b_inner: Int32,
    b_outer: Int64, b_step: Int64, dg_inner: Int32, dg_outer: Int64, dg_step: Int64, dbeta_inner: Int32,
    dbeta_outer: Int64, dbeta_step: Int64, A_step: Int64, dt_step: Int64,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, NEED_A: tl.constexpr, NEED_B: tl.constexpr, NEED_SUMS: tl.constexpr,
):  # fmt: skip
    """da = −dg·e^{A_log}·σ(a + dt_bias), db = dβ·β·σ(−b); and of each run of tokens Σ dg·g and Σ da, in two planes."""
    run = tl.program_id(0)
    row = run * _RUN + tl.arange(0, _RUN)
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = head < HEADS
    inside = (row < rows)[:, None] & in_head[None, :]
    at = row.to(tl.int64)[:, None] * HEADS + head[None, :]
    if NEED_A or NEED_SUMS:
        rate = tl.exp(tl.load(A_log + head * A_step, in_head, other=0).to(tl.float32))[None, :]
        bias = tl.load(dt_bias + head * dt_step, in_head, other=0).to(tl.float32)[None, :]
        t = tl.load(a + row_offsets(row, a_inner, a_outer, a_step) + head[None, :], inside, other=0).to(tl.float32)
        t += bias
        place = dg + row_offsets(row, dg_inner, dg_outer, dg_step) + head[None, :]
        upstream = tl.load(place, inside & (has_dg != 0), other=0).to(tl.float32)
        small = tl.exp(-tl.abs(t))
        of_a = through_rate(upstream, rate, sigmoid_of(t, small))
        if NEED_A:
            tl.store(da + at, of_a.to(da.dtype.element_ty), inside)
        if NEED_SUMS:
            through = tl.where(inside, through_rate(upstream, rate, softplus_of(t, small)), 0.0)
            plane = runs * HEADS
            target = sums + run.to(tl.int64) * HEADS + head
            tl.store(target, sums_of_run(through, COLUMNS), in_head)
            tl.store(target + plane, sums_of_run(tl.where(inside, of_a, 0.0), COLUMNS), in_head)
    if NEED_B:
        t = tl.load(b + row_offsets(row, b_inner, b_outer, b_step) + head[None, :], inside, other=0).to(tl.float32)
        place = dbeta + row_offsets(row, dbeta_inner, dbeta_outer, dbeta_step) + head[None, :]
        upstream = tl.load(place, inside & (has_dbeta != 0), other=0).to(tl.float32)
        small = tl.exp(-tl.abs(t))
        of_b = upstream * sigmoid_of(t, small) * sigmoid_of(-t, small)
        tl.store(db + at, of_b.to(db.dtype.element_ty), inside)


@kernel(budget=_BUDGET, schedule=("COLUMNS",))
@triton.jit
def gated_delta_add_runs(
    sums: Pointer.float32, first: Pointer.first, second: Pointer.second, count: Int64,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, NEED_FIRST: tl.constexpr, NEED_SECOND: tl.constexpr,
):  # fmt: skip
    """Rows of the level above: the sums of RUN rows of each of two planes [count, HEADS]."""
    target = tl.program_id(0)
    source = target * _RUN + tl.arange(0, _RUN)
    head = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = head < HEADS
    inside = (source < count)[:, None] & in_head[None, :]
    at = source.to(tl.int64)[:, None] * HEADS + head[None, :]
    to = target.to(tl.int64) * HEADS + head
    if NEED_FIRST:
        total = sums_of_run(tl.load(sums + at, inside, other=0), COLUMNS)
        tl.store(first + to, total.to(first.dtype.element_ty), in_head)
    if NEED_SECOND:
        plane = count * HEADS
        total = sums_of_run(tl.load(sums + plane + at, inside, other=0), COLUMNS)
        tl.store(second + to, total.to(second.dtype.element_ty), in_head)


# ------------------------------------------------------------------------------------------------ launches

NEED_A, NEED_B, NEED_A_LOG, NEED_DT_BIAS = (1 << bit for bit in range(4))
"""Bits of the gradients a backward computes."""


def _columns(setup: Setup, size: int) -> int:
    """Heads of a program: they are independent of each other."""
    return min(1 << max(0, size - 1).bit_length(), setup.schedule["columns"])


def forward(setup: Setup) -> Execute:
    """g and β."""
    element, _, rate, bias = setup.problem.dtypes
    size, rows = setup.problem.sizes
    columns = _columns(setup, size)
    each = max(1, setup.schedule["elements"] // columns)
    gates = setup.kernel(
        gated_delta_gate, element=element, rate=rate, bias=bias, HEADS=size, COLUMNS=columns, ROWS=each,
        num_warps=setup.schedule["warps"],
    )  # fmt: skip
    setup.copies(a=(element, rows * size), b=(element, rows * size))
    grid = (-(-rows // each), -(-size // columns))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        if rows == 0:
            return
        memory = setup.memory(workspace)
        a, b = memory.rows("a", arguments[0]), memory.rows("b", arguments[1])
        (A_log, dt_bias), (g, beta) = arguments[2:], outputs
        gates.launch(
            grid, a=a.tensor, b=b.tensor, A_log=A_log, dt_bias=dt_bias, g=g, beta=beta, rows=rows, a_inner=a.inner,
            a_outer=a.outer, a_step=a.step, b_inner=b.inner, b_outer=b.outer, b_step=b.step,
            A_step=A_log.stride(0), dt_step=dt_bias.stride(0),
        )  # fmt: skip

    return execute


def backward(setup: Setup) -> Execute:
    """da and db; dA_log and ddt_bias from sums of runs of tokens, level by level down to one."""
    element, _, rate, bias = setup.problem.dtypes
    (size, rows), (need,) = setup.problem.sizes, setup.problem.options
    columns, counts = _columns(setup, size), levels(rows)
    needs_sums = bool(need & (NEED_A_LOG | NEED_DT_BIAS))
    setup.add_numeric(run=RUN)
    gradients = setup.kernel(
        gated_delta_gate_backward, element=element, rate=rate, bias=bias, HEADS=size, COLUMNS=columns,
        NEED_A=bool(need & NEED_A), NEED_B=bool(need & NEED_B), NEED_SUMS=needs_sums,
        num_warps=setup.schedule["warps"],
    )  # fmt: skip
    add_runs = {
        last: setup.kernel(
            gated_delta_add_runs, first=rate if last else torch.float32, second=bias if last else torch.float32,
            HEADS=size, COLUMNS=columns, NEED_FIRST=bool(need & NEED_A_LOG), NEED_SECOND=bool(need & NEED_DT_BIAS),
            num_warps=setup.schedule["sum_warps"],
        )
        for last in (True, False)
    }  # fmt: skip
    wide = (torch.float32, rows * size)
    setup.copies(a=(element, rows * size), b=(element, rows * size), dg=wide, dbeta=wide)
    if needs_sums and rows:
        setup.scratch(**{f"sums_{n}": (torch.float32, 2 * count * size) for n, count in enumerate(counts[:-1])})
    programs = -(-size // columns)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dg, dbeta, a, b, A_log, dt_bias, _ = arguments
        da, db, dA_log, ddt_bias = outputs
        if rows == 0:
            dA_log.zero_()
            ddt_bias.zero_()
        if rows == 0 or need == 0:
            return
        memory = setup.memory(workspace)
        absent = Rows(a)  # is not read: any memory stands for it
        of_a, of_b = memory.rows("a", a), memory.rows("b", b)
        of_dg = absent if dg is None else memory.rows("dg", dg)
        of_dbeta = absent if dbeta is None else memory.rows("dbeta", dbeta)
        gradients.launch(
            (counts[0], programs), a=of_a.tensor, b=of_b.tensor, A_log=A_log, dt_bias=dt_bias, dg=of_dg.tensor,
            dbeta=of_dbeta.tensor, da=da, db=db, sums=memory["sums_0"] if needs_sums else a, rows=rows,
            runs=counts[0], has_dg=int(dg is not None), has_dbeta=int(dbeta is not None), a_inner=of_a.inner,
            a_outer=of_a.outer, a_step=of_a.step, b_inner=of_b.inner, b_outer=of_b.outer, b_step=of_b.step,
            dg_inner=of_dg.inner, dg_outer=of_dg.outer, dg_step=of_dg.step, dbeta_inner=of_dbeta.inner,
            dbeta_outer=of_dbeta.outer, dbeta_step=of_dbeta.step, A_step=A_log.stride(0), dt_step=dt_bias.stride(0),
        )  # fmt: skip
        if not needs_sums:
            return
        for level in range(1, len(counts)):
            last, plane = level == len(counts) - 1, counts[level] * size
            first = dA_log if last else memory[f"sums_{level}"]  # an address on a GPU, a tensor elsewhere
            second = ddt_bias if last else first + 4 * plane if isinstance(first, int) else first[plane:]
            add_runs[last].launch(
                (counts[level], programs), sums=memory[f"sums_{level - 1}"], first=first, second=second,
                count=counts[level - 1],
            )  # fmt: skip

    return execute
