"""Triton kernels of `linear_cross_entropy`: products of our own, and what follows products of either kind.

Every product runs over tiles of fixed sizes, and adds along its inner axis in steps of DEPTH, in order. So a row of
hidden meets the same numbers in the same order whatever other rows there are, and the sum over tokens has an order that
their number fixes. Logits stay in float32: `loss_tile_rows` leaves of each row and segment of classes the largest z
and Σ e^(z − largest), `loss_combine` adds segments in their order, and `loss_tile_slopes` computes logits again and
stores dx.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from adjoint.core.kernels import Budget, Float32, Int32, Int64, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.loss.kernels import cap, coefficients, results_of

PRODUCT = Budget(registers=255, shared_bytes=232_448, spilled_elsewhere=4096)
_SMALL = Budget(registers=64, shared_bytes=16_384)


@triton.jit
def tile_of_logits(
    hidden, weight, bias, row, column, rows, softcap, D: tl.constexpr, CLASSES: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """z and dz/dx of a tile of rows and classes; those past the ends repeat the last."""
    depth = tl.arange(0, DEPTH)
    inside_row = tl.minimum(row, rows - 1).to(tl.int64)
    inside_column = tl.minimum(column, CLASSES - 1).to(tl.int64)
    left = hidden + inside_row[:, None] * D + depth[None, :]
    right = weight + inside_column[None, :] * D + depth[:, None]
    x = tl.zeros([row.shape[0], column.shape[0]], tl.float32)
    for start in range(0, D, DEPTH):
        if D % DEPTH == 0:
            a = tl.load(left)
            b = tl.load(right)
        else:
            a = tl.load(left, (depth < D - start)[None, :], other=0)
            b = tl.load(right, (depth < D - start)[:, None], other=0)
        x = tl.dot(a, b, x, input_precision="ieee")
        left += DEPTH
        right += DEPTH
    if HAS_BIAS:
        x += tl.load(bias + inside_column).to(tl.float32)[None, :]
    return cap(x, softcap, SOFTCAP)


@kernel(budget=PRODUCT, numeric=("SEGMENT", "ROWS", "COLUMNS", "DEPTH"))
@triton.jit
def loss_tile_rows(
    hidden: Pointer16.element, weight: Pointer16.element, bias: Pointer.element, targets: Pointer.int32,
    largest: Pointer.float32, totals: Pointer.float32, sums_z: Pointer.float32, chosen: Pointer.float32,
    rows: Int32, softcap: Float32, D: tl.constexpr, CLASSES: tl.constexpr, HAS_BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, SEGMENT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows and one segment: the largest z, Σ e^(z − largest), (SMOOTHING) Σ z; and z of labels in it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    segment = tl.program_id(1)
    segments: tl.constexpr = (CLASSES + SEGMENT - 1) // SEGMENT
    target = tl.load(targets + row, row < rows, other=-1)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_z = tl.zeros([ROWS], tl.float32)
    label_z = tl.zeros([ROWS], tl.float32)
    for first in range(segment * SEGMENT, tl.minimum(segment * SEGMENT + SEGMENT, CLASSES), COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        z, _ = tile_of_logits(hidden, weight, bias, row, column, rows, softcap, D, CLASSES, HAS_BIAS, SOFTCAP, DEPTH)
        inside = (column < CLASSES)[None, :]
        label_z += tl.sum(tl.where((column[None, :] == target[:, None]) & inside, z, 0.0), 1)
        if SMOOTHING:
            sum_z += tl.sum(tl.where(inside, z, 0.0), 1)
        z = tl.where(inside, z, float("-inf"))
        new_top = tl.maximum(top, tl.max(z, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(z - shift[:, None]), 1)
        top = new_top
    place = row.to(tl.int64) * segments + segment
    tl.store(largest + place, top, row < rows)
    tl.store(totals + place, total, row < rows)
    if SMOOTHING:
        tl.store(sums_z + place, sum_z, row < rows)
    has_label = (target >= segment * SEGMENT) & (target < segment * SEGMENT + SEGMENT)
    tl.store(chosen + row, label_z, (row < rows) & has_label)


@kernel(budget=_SMALL, schedule=("ROWS",))
@triton.jit
def loss_combine(
    targets: Pointer.int32, largest: Pointer.float32, totals: Pointer.float32, sums_z: Pointer.float32,
    chosen: Pointer.float32, losses: Pointer.float32, log_probabilities: Pointer.float32, sizes: Pointer.float32,
    rows: Int32, segments: Int32, classes: Int32, smoothing: Float32, z_weight: Float32, SMOOTHING: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The loss, the label's log-probability and L of rows, from segments in order; 0 for rows without a label."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = row.to(tl.int64) * segments
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_z = tl.zeros([ROWS], tl.float32)
    for segment in range(0, segments):
        other = tl.load(largest + place + segment, inside, other=0.0)
        new_top = tl.maximum(top, other)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        amount = tl.load(totals + place + segment, inside, other=1.0)
        total = total * tl.exp(top - shift) + amount * tl.exp(other - shift)
        if SMOOTHING:
            sum_z += tl.load(sums_z + place + segment, inside, other=0.0)
        top = new_top
    counted = tl.load(targets + row, inside, other=-1) >= 0
    shift = tl.where(top == float("-inf"), 0.0, top)
    label_z = tl.load(chosen + row, inside & counted, other=0.0)
    loss, log_probability, size = results_of(
        shift, tl.log(total), label_z, sum_z, smoothing, z_weight, classes, SMOOTHING
    )
    tl.store(losses + row, tl.where(counted, loss, 0.0), inside)
    tl.store(log_probabilities + row, tl.where(counted, log_probability, 0.0), inside)
    tl.store(sizes + row, tl.where(counted, size, 0.0), inside)


@kernel(budget=PRODUCT, numeric={"rows": "ROWS", "slope_columns": "COLUMNS", "depth": "DEPTH"}, schedule=("GROUP",))
@triton.jit
def loss_tile_slopes(
    hidden: Pointer16.element, weight: Pointer16.element, bias: Pointer.element, targets: Pointer.int32,
    dloss: Pointer.float32, dlog_probabilities: Pointer.float32, count: Pointer.float32, sizes: Pointer.float32,
    scale: Pointer.float32, slopes: Pointer16.element, rows: Int32, softcap: Float32, smoothing: Float32,
    z_weight: Float32,
    D: tl.constexpr, CLASSES: tl.constexpr, STEP: tl.constexpr, HAS_BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    LOSS: tl.constexpr, HAS_LOG: tl.constexpr, MEAN: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """dx of a tile, rows STEP elements apart, from logits that are computed again; 0 for rows without a label."""
    row_tile, column_tile = tile_numbers(tl.cdiv(rows, ROWS), (CLASSES + COLUMNS - 1) // COLUMNS, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    z, slope = tile_of_logits(hidden, weight, bias, row, column, rows, softcap, D, CLASSES, HAS_BIAS, SOFTCAP, DEPTH)
    token = tl.minimum(row, rows - 1)
    target = tl.load(targets + token)
    size, of_p, of_label, of_all = coefficients(
        token, dloss, dlog_probabilities, count, sizes, scale, smoothing, z_weight, CLASSES, LOSS, HAS_LOG, MEAN, SCALED
    )
    fixed = tl.where(column[None, :] == target[:, None], of_label[:, None], 0.0) + of_all[:, None]
    value = (of_p[:, None] * tl.exp(z - size[:, None]) + fixed) * slope
    value = tl.where((target >= 0)[:, None], value, 0.0).to(slopes.dtype.element_ty)
    inside = (row < rows)[:, None] & (column < CLASSES)[None, :]
    tl.store(slopes + row.to(tl.int64)[:, None] * STEP + column[None, :], value, inside)


@triton.jit
def tile_numbers(row_tiles, column_tiles, GROUP: tl.constexpr):
    """The tile of rows and of columns of this program: GROUP tiles of rows share columns that are in cache."""
    program = tl.program_id(0)
    group = program // (GROUP * column_tiles)
    within = program % (GROUP * column_tiles)
    height = tl.minimum(row_tiles - group * GROUP, GROUP)
    return group * GROUP + within % height, within // height


@kernel(budget=PRODUCT, numeric=("ROWS", "COLUMNS", "DEPTH"), schedule=("GROUP",))
@triton.jit
def loss_hidden_product(
    slopes: Pointer16.element, weight: Pointer16.element, out: PointerIf16.out, rows: Int32,
    D: tl.constexpr, CLASSES: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out = dx·weight, a sum over the classes in order."""
    row_tile, column_tile = tile_numbers(tl.cdiv(rows, ROWS), (D + COLUMNS - 1) // COLUMNS, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left = slopes + tl.minimum(row, rows - 1).to(tl.int64)[:, None] * STEP + depth[None, :]
    right = weight + depth[:, None] * D + column[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, CLASSES, DEPTH):
        if CLASSES % DEPTH == 0:
            a = tl.load(left)
        else:
            a = tl.load(left, (depth < CLASSES - start)[None, :], other=0)
        if CLASSES % DEPTH == 0 and D % COLUMNS == 0:
            b = tl.load(right)
        else:
            b = tl.load(right, (depth < CLASSES - start)[:, None] & (column < D)[None, :], other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH
        right += DEPTH * D
    place = out + row.to(tl.int64)[:, None] * D + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), (row < rows)[:, None] & (column < D)[None, :])


@kernel(budget=PRODUCT, numeric=("ROWS", "COLUMNS", "DEPTH"), schedule=("GROUP",))
@triton.jit
def loss_weight_product(
    slopes: Pointer16.element, hidden: Pointer16.element, sums: PointerIf16.float32, rows: Int32, is_first: Int32,
    D: tl.constexpr, CLASSES: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """sums = dxᵀ·hidden, a sum over the rows of a block in order, on top of the blocks before."""
    class_tile, column_tile = tile_numbers((CLASSES + ROWS - 1) // ROWS, (D + COLUMNS - 1) // COLUMNS, GROUP)
    number = class_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left = slopes + depth.to(tl.int64)[None, :] * STEP + number[:, None]
    right = hidden + depth[:, None] * D + column[None, :]
    place = sums + number.to(tl.int64)[:, None] * D + column[None, :]
    mask = (number < CLASSES)[:, None] & (column < D)[None, :]
    total = tl.load(place, mask & (is_first == 0), other=0.0)
    whole = rows // DEPTH * DEPTH
    for _ in range(0, whole, DEPTH):
        if CLASSES % ROWS == 0:
            a = tl.load(left)
        else:
            a = tl.load(left, (number < CLASSES)[:, None], other=0)
        if D % COLUMNS == 0:
            b = tl.load(right)
        else:
            b = tl.load(right, (column < D)[None, :], other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += DEPTH * STEP
        right += DEPTH * D
    if whole < rows:
        inside = depth < rows - whole
        a = tl.load(left, inside[None, :] & (number < CLASSES)[:, None], other=0)
        b = tl.load(right, inside[:, None] & (column < D)[None, :], other=0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(place, total, mask)


# ------------------------------------------------------------------------- what follows products of either kind


@kernel(budget=_SMALL, schedule=("BLOCK",))
@triton.jit
def loss_column_sums(
    slopes: Pointer16.element, sums: Pointer.float32, rows: Int32, is_first: Int32, classes: Int32, step: Int64,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """sums = Σ dx over the rows of a block, in order, on top of the blocks before."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < classes
    total = tl.zeros([BLOCK], tl.float32)
    place = slopes + column
    for _ in range(0, rows):
        total += tl.load(place, inside, other=0).to(tl.float32)
        place += step
    if is_first == 0:
        total += tl.load(sums + column, inside, other=0.0)
    tl.store(sums + column, total, inside)


@kernel(budget=_SMALL, schedule=("BLOCK",))
@triton.jit
def loss_scale(
    dloss: Pointer.float32, dlog_probabilities: Pointer.float32, targets: Pointer.int32, count: Pointer.float32,
    scale: Pointer.float32, tokens: Int64,
    LOSS: tl.constexpr, HAS_LOG: tl.constexpr, MEAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The largest |g| + |h| of the tokens that count: a power of two would do, and this is as good. 1 where all are 0,
    and where one is infinite, so that what does not count is still 0."""
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        inside = token < tokens
        amount = tl.zeros([BLOCK], tl.float32)
        if LOSS == "total":
            amount += tl.abs(tl.load(dloss))
        elif LOSS == "token":
            amount += tl.abs(tl.load(dloss + token, inside, other=0.0))
        if MEAN:
            amount = amount / tl.load(count)
        if HAS_LOG:
            amount += tl.abs(tl.load(dlog_probabilities + token, inside, other=0.0))
        counts = tl.load(targets + token, inside, other=-1) >= 0
        largest = tl.maximum(largest, tl.where(counts, amount, 0.0))
    most = tl.max(largest, 0)
    tl.store(scale, tl.where((most == 0) | (most == float("inf")), 1.0, most))


@kernel(budget=Budget(registers=200), schedule=("BLOCK",))
@triton.jit
def loss_round(
    sums: PointerIf16.sum, factor: Pointer.float32, count: Pointer.float32, out: PointerIf16.out, elements: Int64,
    DIVIDES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = sums · factor, divided by `count` where DIVIDES, rounded."""
    amount = tl.load(factor)
    if DIVIDES:
        amount = amount / tl.load(count)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    place = start + tl.arange(0, BLOCK)
    if start + BLOCK <= elements:
        value = tl.load(sums + place, eviction_policy="evict_first").to(tl.float32)
        tl.store(out + place, (value * amount).to(out.dtype.element_ty))
    else:
        value = tl.load(sums + place, place < elements, other=0).to(tl.float32)
        tl.store(out + place, (value * amount).to(out.dtype.element_ty), place < elements)


# ----------------------------------------------------------------------------------------------- tiles


class Tile(NamedTuple):
    """How a program cuts a product: rows and columns of its result, terms of a step, and its launch shape."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


SHARED_BYTES = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376}
"""Shared memory a program may have, by target."""


def tile_of(setup: Setup) -> Tile:
    """The tile of every product of our own: 128 × 256, or 64 × 64 for float32, which has no matrix instructions."""
    if setup.problem.dtypes[0] == torch.float32:
        return Tile(64, 64, 32, 4, 2)
    rows, columns, depth = 128, 256, 64
    stage = (rows + columns) * depth * 2
    most = SHARED_BYTES.get(setup.target, 65_536) // stage
    return Tile(rows, columns, depth, 8, max(1, min(setup.schedule["tile_stages"], most)))


def tile_of_slopes(tile: Tile, is_capped: bool) -> Tile:
    """That of dx: 64 columns where each logit has the slope of a cap beside it, so that both stay in registers."""
    return tile._replace(columns=64) if is_capped else tile


def settings(setup: Setup, tile: Tile, **others: Any) -> dict[str, Any]:
    """What binds a product of our own."""
    return {
        "element": setup.problem.dtypes[0], "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth,
        "num_warps": tile.warps, "num_stages": tile.stages, **others,
    }  # fmt: skip
