"""Triton kernels of what comes before the rule: `gate` and `normalize`, both directions.

Tensors are rows of adjacent elements, row n at (n // inner)·outer + (n % inner)·step. Sums are halved, the first half
plus the second, until one number is left: their order depends on how many terms there are, not on how threads lie.
"""

from dataclasses import replace

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.ops.gated_delta.stages.gate_plans import EPSILON, RUN
from adjoint.ops.gated_delta.stages.w_u_kernels import row_sums

_EPSILON = tl.constexpr(EPSILON)
_RUN = tl.constexpr(RUN)
_RUN_LEVELS = tl.constexpr(RUN.bit_length() - 1)


@triton.jit
def row_offsets(row, inner, outer, step):
    return ((row // inner) * outer + (row % inner) * step)[:, None]


@triton.jit
def column_sums(values, LEVELS: tl.constexpr):
    """[2^LEVELS, columns] -> [columns], by halves."""
    columns: tl.constexpr = values.shape[1]
    for _ in tl.static_range(LEVELS):
        values = tl.sum(tl.reshape(values, (2, values.shape[0] // 2, columns)), 0)
    return tl.reshape(values, (columns,))


# ------------------------------------------------------------------------------------------------- gate


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
def gated_delta_gate(
    a, b, A_log, dt_bias, g, beta, rows,
    a_inner, a_outer, a_step, b_inner, b_outer, b_step, A_step, dt_step,
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


@triton.jit
def gated_delta_gate_backward(
    a, b, A_log, dt_bias, dg, dbeta, da, db, sums, rows, runs, has_dg, has_dbeta,
    a_inner, a_outer, a_step, b_inner, b_outer, b_step, dg_inner, dg_outer, dg_step,
    dbeta_inner, dbeta_outer, dbeta_step, A_step, dt_step,
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
        upstream = tl.load(place, inside & (has_dg != 0), other=0).to(tl.float32) * -rate
        small = tl.exp(-tl.abs(t))
        of_a = upstream * sigmoid_of(t, small)
        if NEED_A:
            tl.store(da + at, of_a.to(da.dtype.element_ty), inside)
        if NEED_SUMS:
            through = tl.where(inside, upstream * softplus_of(t, small), 0.0)
            plane = runs * HEADS
            target = sums + run.to(tl.int64) * HEADS + head
            tl.store(target, column_sums(through, _RUN_LEVELS), in_head)
            tl.store(target + plane, column_sums(tl.where(inside, of_a, 0.0), _RUN_LEVELS), in_head)
    if NEED_B:
        t = tl.load(b + row_offsets(row, b_inner, b_outer, b_step) + head[None, :], inside, other=0).to(tl.float32)
        place = dbeta + row_offsets(row, dbeta_inner, dbeta_outer, dbeta_step) + head[None, :]
        upstream = tl.load(place, inside & (has_dbeta != 0), other=0).to(tl.float32)
        small = tl.exp(-tl.abs(t))
        of_b = upstream * sigmoid_of(t, small) * sigmoid_of(-t, small)
        tl.store(db + at, of_b.to(db.dtype.element_ty), inside)


@triton.jit
def gated_delta_add_runs(
    sums, first, second, count,
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
        total = column_sums(tl.load(sums + at, inside, other=0), _RUN_LEVELS)
        tl.store(first + to, total.to(first.dtype.element_ty), in_head)
    if NEED_SECOND:
        plane = count * HEADS
        total = column_sums(tl.load(sums + plane + at, inside, other=0), _RUN_LEVELS)
        tl.store(second + to, total.to(second.dtype.element_ty), in_head)


# -------------------------------------------------------------------------------------------- normalize


@triton.jit
def gated_delta_normalize(
    x, y, rows, x_inner, x_outer, x_step,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = x / sqrt(Σx² + ε)"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < SIZE)
    values = tl.load(x + row_offsets(row, x_inner, x_outer, x_step) + column, inside, other=0).to(tl.float32)
    scale = 1.0 / tl.sqrt(row_sums(values * values, LEVELS) + _EPSILON)
    at = y + row.to(tl.int64)[:, None] * SIZE + column
    tl.store(at, (values * scale[:, None]).to(y.dtype.element_ty), inside)


@triton.jit
def gated_delta_normalize_backward(
    x, dy, dx, rows, x_inner, x_outer, x_step, dy_inner, dy_outer, dy_step,
    SIZE: tl.constexpr, COLUMNS: tl.constexpr, LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = r·(dy − y·(y·dy)), y = r·x, r = 1 / sqrt(Σx² + ε)"""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows)[:, None] & (column < SIZE)
    values = tl.load(x + row_offsets(row, x_inner, x_outer, x_step) + column, inside, other=0).to(tl.float32)
    upstream = tl.load(dy + row_offsets(row, dy_inner, dy_outer, dy_step) + column, inside, other=0).to(tl.float32)
    scale = (1.0 / tl.sqrt(row_sums(values * values, LEVELS) + _EPSILON))[:, None]
    values = values * scale
    along = row_sums(values * upstream, LEVELS)[:, None]
    at = dx + row.to(tl.int64)[:, None] * SIZE + column
    tl.store(at, (scale * (upstream - values * along)).to(dx.dtype.element_ty), inside)


_SMALL = Budget(registers=255, shared_bytes=32_768)  # without wide loads, every element has an address

KERNELS = (
    kernels.register(gated_delta_gate, budget=_SMALL),
    kernels.register(gated_delta_gate_backward, budget=_SMALL),
    kernels.register(gated_delta_add_runs, budget=_SMALL),
    kernels.register(gated_delta_normalize, budget=replace(_SMALL, spilled_elsewhere=16)),
    kernels.register(gated_delta_normalize_backward, budget=_SMALL),
)
