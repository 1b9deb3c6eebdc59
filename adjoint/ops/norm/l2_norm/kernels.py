"""Triton kernels of `l2_norm`, both directions, and what launches them: for this op, and for others that need its rows.

Sums of up to 1024 columns are halved from the first level on; the quotient and the root are Triton's own.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Float, Int32, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.core.layout import Rows
from adjoint.core.problem import wide_dtype
from adjoint.device.row_tiles import LEVELS, level, order, row_offsets, row_sums, tile_columns, tile_mask
from adjoint.device.rows import RowReader
from adjoint.ops.activation.kernels import widen

HALVED = 1024
"""The widest row whose sums are halved from the first level on."""

_BUDGET = Budget(registers=232, shared_bytes=16_384)


@kernel(budget=_BUDGET, numeric=LEVELS, schedule=("ROWS",))
@triton.jit
def l2_norm_forward(
    x: PointerIf16.element, y: PointerIf16.element, reciprocals: Pointer.computed, rows: Int32, epsilon: Float.computed,
    x_inner: Int32, x_outer: Int64If16, x_step: Int64If16,
    SIZE: tl.constexpr, Y_STEP: tl.constexpr, SAVE: tl.constexpr, LAYOUT: tl.constexpr, REPEAT_LEVELS: tl.constexpr,
    GROUP_LEVELS: tl.constexpr, LANE_LEVELS: tl.constexpr, VECTOR_LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y = x·r, r = 1 / sqrt(Σx² + ε), rows of y Y_STEP apart. SAVE: r of each row goes to `reciprocals`."""
    PIECES: tl.constexpr = 2 ** (REPEAT_LEVELS + GROUP_LEVELS)
    PIECE: tl.constexpr = 2 ** (LANE_LEVELS + VECTOR_LEVELS)
    column = tile_columns(PIECES, PIECE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tile_mask(row, rows, column, SIZE, PIECES * PIECE)
    place = x + row_offsets(row, x_inner, x_outer, x_step, SIZE, LAYOUT) + column
    value = widen(tl.load(place, inside, other=0))
    squares = row_sums(value * value, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    r = 1.0 / tl.sqrt(squares + epsilon)
    if SAVE:
        tl.store(reciprocals + row, r, row < rows)
    at = row_offsets(row, 0, 0, 0, Y_STEP, "contiguous") + column
    tl.store(y + at, (value * r[None, :, None]).to(y.dtype.element_ty), inside)


@kernel(budget=_BUDGET, numeric=LEVELS, schedule=("ROWS",))
@triton.jit
def l2_norm_backward(
    x: PointerIf16.element, dy: PointerIf16.element, dx: PointerIf16.element, rows: Int32, epsilon: Float.computed,
    x_inner: Int32, x_outer: Int64If16, x_step: Int64If16, dy_inner: Int32, dy_outer: Int64If16, dy_step: Int64If16,
    SIZE: tl.constexpr, LAYOUT: tl.constexpr, REPEAT_LEVELS: tl.constexpr, GROUP_LEVELS: tl.constexpr,
    LANE_LEVELS: tl.constexpr, VECTOR_LEVELS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx = r·(dy − y·(y·dy)), y = x·r"""
    PIECES: tl.constexpr = 2 ** (REPEAT_LEVELS + GROUP_LEVELS)
    PIECE: tl.constexpr = 2 ** (LANE_LEVELS + VECTOR_LEVELS)
    column = tile_columns(PIECES, PIECE)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tile_mask(row, rows, column, SIZE, PIECES * PIECE)
    place = x + row_offsets(row, x_inner, x_outer, x_step, SIZE, LAYOUT) + column
    value = widen(tl.load(place, inside, other=0))
    place = dy + row_offsets(row, dy_inner, dy_outer, dy_step, SIZE, LAYOUT) + column
    upstream = widen(tl.load(place, inside, other=0))
    squares = row_sums(value * value, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    r = (1.0 / tl.sqrt(squares + epsilon))[None, :, None]
    value = value * r
    along = row_sums(value * upstream, ROWS, REPEAT_LEVELS, GROUP_LEVELS, LANE_LEVELS, VECTOR_LEVELS)
    at = row_offsets(row, 0, 0, 0, SIZE, "contiguous") + column
    tl.store(dx + at, (r * (upstream - value * along[None, :, None])).to(dx.dtype.element_ty), inside)


def _order(size: int, element: torch.dtype) -> dict[str, int]:
    return order(size, element) if size > HALVED else dict(zip(LEVELS, (0, 0, level(size), 0), strict=True))


def bind_l2(
    setup: Setup, element: torch.dtype, size: int, layout: str, *, tile: int, num_warps: int, y_step: int | None = None,
    save: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Binds the forward kernel in any op's setup; gives `launch(x, y, count, eps, reciprocals=None)`.

    Args:
        setup: of the plan that launches it.
        element: the dtype of x and y.
        size: the columns of a row.
        layout: how rows of x follow each other, one of `adjoint.device.rows.KINDS`.
        tile: rows of a program.
        num_warps: warps of a program.
        y_step: elements from one row of y to the next; by default y is contiguous.
        save: whether 1 / sqrt(Σx² + ε) of each row is written too.
    """
    y_step = y_step or size
    bound = setup.either(
        l2_norm_forward, element=element, computed=wide_dtype(element), SIZE=size, Y_STEP=y_step, SAVE=save,
        LAYOUT=layout, ROWS=tile, num_warps=num_warps, **_order(size, element),
    )  # fmt: skip

    def launch(x: Rows, y: Any, count: int, eps: float, reciprocals: Any = None) -> None:
        bound[x.is_aligned and (isinstance(y, int) or is_aligned(y))].launch(  # memory of a workspace is aligned
            (-(-count // tile),), x=x.tensor, y=y, reciprocals=y if reciprocals is None else reciprocals, rows=count,
            epsilon=eps, x_inner=x.inner, x_outer=x.outer, x_step=x.step,
        )  # fmt: skip

    return launch


def bind_l2_backward(
    setup: Setup, element: torch.dtype, size: int, layout: str, *, tile: int, num_warps: int
) -> Callable[..., None]:
    """As `bind_l2`; gives `launch(dy, x, dx, count, eps)`."""
    bound = setup.either(
        l2_norm_backward, element=element, computed=wide_dtype(element), SIZE=size, LAYOUT=layout, ROWS=tile,
        num_warps=num_warps, **_order(size, element),
    )  # fmt: skip

    def launch(dy: Rows, x: Rows, dx: Tensor, count: int, eps: float) -> None:
        bound[x.is_aligned and dy.is_aligned and is_aligned(dx)].launch(
            (-(-count // tile),), x=x.tensor, dy=dy.tensor, dx=dx, rows=count, epsilon=eps, x_inner=x.inner,
            x_outer=x.outer, x_step=x.step, dy_inner=dy.inner, dy_outer=dy.outer, dy_step=dy.step,
        )  # fmt: skip

    return launch


def forward(setup: Setup) -> Execute:
    """y, of rows of which one program has all elements."""
    reader, launch = _bind(setup, bind_l2)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        (x, eps), (y,) = arguments, outputs
        launch(reader.rows("x", x, setup.memory(workspace), y), y, setup.problem.sizes[1], eps)

    return execute


def backward(setup: Setup) -> Execute:
    """dx, of the same rows."""
    reader, launch = _bind(setup, bind_l2_backward)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        (dy, x, eps), (dx,), memory = arguments, outputs, setup.memory(workspace)
        rows = reader.rows("dy", dy, memory, dx), reader.rows("x", x, memory, dx)
        launch(*rows, dx, setup.problem.sizes[1], eps)

    return execute


def _bind(setup: Setup, bind: Callable[..., Callable[..., None]]) -> tuple[RowReader, Callable[..., None]]:
    """What reads the rows of a problem of this op, and what launches its kernel."""
    reader, (element,), schedule = RowReader(setup), setup.problem.dtypes, setup.schedule
    size, _ = setup.problem.sizes
    return reader, bind(setup, element, size, reader.kind, tile=schedule["rows"], num_warps=schedule["warps"])
