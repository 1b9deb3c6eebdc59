"""Triton kernels of `normalize`, both directions, and what launches them.

Tensors are rows of adjacent elements, row n at (n // inner)·outer + (n % inner)·step. Sums are halved, the first half
plus the second, until one number is left: their order depends on how many terms there are, not on how threads lie.
"""

from dataclasses import replace
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64If16, Kernel, PointerIf16, kernel
from adjoint.core.launch import Execute, Launch, Setup
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.stages.gate.kernels import row_offsets
from adjoint.ops.gated_delta.stages.w_u.kernels import row_sums

_EPSILON = tl.constexpr(EPSILON)

_BUDGET = Budget(registers=255, shared_bytes=32_768)  # without wide loads, every element has an address


@kernel(budget=replace(_BUDGET, spilled_elsewhere=16), schedule=("ROWS",))
@triton.jit
def gated_delta_normalize(
    x: PointerIf16.element, y: PointerIf16.element, rows: Int32, x_inner: Int32, x_outer: Int64If16, x_step: Int64If16,
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


@kernel(budget=_BUDGET, schedule=("ROWS",))
@triton.jit
def gated_delta_normalize_backward(
    x: PointerIf16.element, dy: PointerIf16.element, dx: PointerIf16.element, rows: Int32, x_inner: Int32,
    x_outer: Int64If16, x_step: Int64If16, dy_inner: Int32, dy_outer: Int64If16, dy_step: Int64If16,
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


# ------------------------------------------------------------------------------------------------ launches


def _bind(setup: Setup, kernel: Kernel) -> tuple[dict[bool, Launch], tuple[int]]:
    """The kernel with wide loads, where vectors allow them, and without; and its grid."""
    (element,), (size, rows) = setup.problem.dtypes, setup.problem.sizes
    columns = 1 << max(0, size - 1).bit_length()
    each = max(1, setup.schedule["elements"] // columns)
    constants = {"SIZE": size, "COLUMNS": columns, "LEVELS": columns.bit_length() - 1, "ROWS": each}
    bound = {
        aligned: setup.kernel(kernel, element=element, aligned=aligned, num_warps=setup.schedule["warps"], **constants)
        for aligned in ((False,) if size % 16 else (True, False))
    }
    return bound, (-(-rows // each),)


def forward(setup: Setup) -> Execute:
    """y, of vectors of which one program has all elements."""
    (element,), (size, rows) = setup.problem.dtypes, setup.problem.sizes
    bound, grid = _bind(setup, gated_delta_normalize)
    setup.copies(x=(element, rows * size))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        if rows == 0:
            return
        x, (y,) = setup.memory(workspace).rows("x", arguments[0]), outputs
        aligned = size % 16 == 0 and x.is_aligned and y.data_ptr() % 16 == 0
        bound[aligned].launch(grid, x=x.tensor, y=y, rows=rows, x_inner=x.inner, x_outer=x.outer, x_step=x.step)

    return execute


def backward(setup: Setup) -> Execute:
    """dx, of the same vectors."""
    (element,), (size, rows) = setup.problem.dtypes, setup.problem.sizes
    bound, grid = _bind(setup, gated_delta_normalize_backward)
    setup.copies(x=(element, rows * size), dy=(element, rows * size))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        if rows == 0:
            return
        memory = setup.memory(workspace)
        dy, x, (dx,) = memory.rows("dy", arguments[0]), memory.rows("x", arguments[1]), outputs
        aligned = size % 16 == 0 and x.is_aligned and dy.is_aligned and dx.data_ptr() % 16 == 0
        bound[aligned].launch(
            grid, x=x.tensor, dy=dy.tensor, dx=dx, rows=rows, x_inner=x.inner, x_outer=x.outer, x_step=x.step,
            dy_inner=dy.inner, dy_outer=dy.outer, dy_step=dy.step,
        )  # fmt: skip

    return execute
