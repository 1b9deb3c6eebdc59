"""Triton kernels of the activations, and their launchers.

Everything runs on half exponentials: with h = e^−|x|/2 and r = 1 / (1 + h²),

    silu(x)  = x·r                    x ≥ 0        silu'(x) = r·(1 + x·h²·r)          x ≥ 0
             = (x·h)·r·h              x < 0                 = r·h·(1 + x·r)·h         x < 0

so nothing overflows, and for x far below 0 every factor stays normal until the last product: a
naive x / (1 + e^−x) gives 0 from x = −88.8 on, where the result is still normal in float32 and
bfloat16. Incoming factors (up, the upstream gradient) are multiplied by one h each before they meet.

Kernels come in three layouts. `rows`: every tensor is rows of adjacent elements, any distance apart
(one single row when all are contiguous). `pairs`: the same, gate and up interleaved in one tensor.
`strided`: anything, up to four axes. Addresses are int64, one element has one writer, and no sum is
formed: neither the tile, nor alignment, nor layout can change a bit.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.kernels import TRITON_TYPES, Budget, Variant
from adjoint.core.layout import coalesce
from adjoint.core.plan import Plan
from adjoint.ops.activation.plans import NEED_GATE

MAX_AXES = 4
"""Axes a strided kernel walks; the launcher loops over the ones outside."""

MAX_ELEMENTS = 2**30
"""Elements a strided launch visits: its linear index is an int32, blocks past the end included."""

MAX_GRID_X, MAX_GRID_Y = 2**31 - 1, 65_535
"""Programs along a grid's axes, on every GPU."""


KEEP = tl.constexpr("evict_last")
"""Inputs outlive outputs in the L2 cache: measured 1.5% faster on an H200 than any other hint, or none."""


@triton.jit
def widen(value):
    """float32 for the narrower types, float64 for float64."""
    if value.dtype == tl.float64:
        return value
    else:
        return value.to(tl.float32)


@triton.jit
def exponential_2(x, NATIVE: tl.constexpr):
    """2^x. NVIDIA's instruction; portable code spends three more on subnormal results, which no use here has."""
    if NATIVE and x.dtype == tl.float32:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.exp2(x)


@triton.jit
def reciprocal(x, NATIVE: tl.constexpr):
    """1/x for x in [1, 2]. NVIDIA's instruction; portable code spends five more on scaling."""
    if NATIVE and x.dtype == tl.float32:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1.0 / x


@triton.jit
def half_exponential(x, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """e^−|x|/2 for |x| ≤ 2048.

    Rounding x·log₂e costs an error that grows with |x|: harmless when the result is rounded to 16
    bits (NARROW); otherwise n = round(x·log₂e) is taken out exactly.
    """
    if x.dtype == tl.float64:
        return tl.exp(-0.5 * tl.abs(x))
    elif NARROW:
        return exponential_2(tl.abs(x) * -0.7213475204444817, NATIVE)
    else:
        exponent = -0.5 * tl.abs(x)
        n = tl.floor(exponent * 1.4426950408889634 + 0.5)
        rest = (exponent - n * 0.693145751953125) - n * 1.428606765330187e-06
        return exponential_2(rest * 1.4426950408889634, NATIVE) * exponential_2(n, NATIVE)


@triton.jit
def silu_parts(x, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """silu(x)/d, silu'(x)/d² and d, where d = e^(min(x, 0)/2).

    Bounding x keeps infinities from meeting zeros; it drops a NaN, which h brings back.
    """
    bounded = tl.minimum(tl.maximum(x, -2048.0), 2048.0)
    h = half_exponential(tl.where(x == x, bounded, x), NARROW, NATIVE)
    z = h * h
    r = reciprocal(1.0 + z, NATIVE)
    positive = x >= 0
    value = tl.where(positive, x, bounded * h) * r
    slope = tl.fma(bounded * tl.where(positive, z, 1.0), r, 1.0) * r
    return value, slope, tl.where(positive, 1.0, h)


@triton.jit
def forward_value(gate, up, HAS_UP: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """silu(gate)·up."""
    x = widen(gate)
    if HAS_UP and NARROW:
        # The product comes first, so that both loads are issued before the arithmetic: the compiler
        # otherwise sinks the second load below it. Scaled by 2^−8 and with x ≥ −256, where d is 0
        # already, it overflows only where the result does.
        product = tl.maximum(x, -256.0) * (widen(up) * 0.00390625)
        h = half_exponential(x, NARROW, NATIVE)
        d = tl.where(x >= 0, 1.0, h)
        return product * d * reciprocal(1.0 + h * h, NATIVE) * (d * 256.0)
    value, _, d = silu_parts(x, NARROW, NATIVE)
    if HAS_UP:
        return value * (widen(up) * d)
    else:
        return value * d


@triton.jit
def backward_values(dy, gate, up, HAS_UP: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """dgate = dy·up·silu'(gate) and dup = dy·silu(gate).

    The slope, at most 1.1, enters halved: the product overflows only where its value does.
    """
    value, slope, d = silu_parts(widen(gate), NARROW, NATIVE)
    dy = widen(dy) * d
    if HAS_UP:
        dgate = dy * (widen(up) * (d * (0.5 * slope))) * 2.0
    else:
        dgate = dy * (d * slope)
    return dgate, dy * value


@triton.jit
def row_and_column(ONE_ROW: tl.constexpr, BLOCK: tl.constexpr):
    """The row of this program and the first column of its tile, as int64.

    One row may have any number of tiles; of several rows, the grid's second axis counts the tiles.
    """
    if ONE_ROW:
        return tl.zeros((), tl.int64), tl.program_id(0).to(tl.int64) * BLOCK
    else:
        return tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64) * BLOCK


@triton.jit
def silu_forward_rows(
    gate, up, y, gate_stride, up_stride, y_stride, columns,
    HAS_UP: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = row_and_column(ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    gate += row * gate_stride + start
    up += row * up_stride + start
    y += row * y_stride + start
    if columns - start >= BLOCK:  # no mask: wide accesses whatever the number of columns
        g = tl.load(gate + lane, eviction_policy=KEEP)
        u = tl.load(up + lane, eviction_policy=KEEP) if HAS_UP else g
        tl.store(y + lane, forward_value(g, u, HAS_UP, NARROW, NATIVE).to(g.dtype))
    else:
        inside = lane < columns - start
        g = tl.load(gate + lane, inside)
        u = tl.load(up + lane, inside) if HAS_UP else g
        tl.store(y + lane, forward_value(g, u, HAS_UP, NARROW, NATIVE).to(g.dtype), inside)


@triton.jit
def silu_backward_rows(
    dy, gate, up, dgate, dup, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    columns, need,
    HAS_UP: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = row_and_column(ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    dy += row * dy_stride + start
    gate += row * gate_stride + start
    up += row * up_stride + start
    dgate += row * dgate_stride + start
    dup += row * dup_stride + start
    need_gate = (need & 1) != 0
    need_up = (need & 2) != 0
    if columns - start >= BLOCK:
        g = tl.load(gate + lane, eviction_policy=KEEP)
        u = tl.load(up + lane, need_gate, eviction_policy=KEEP) if HAS_UP else g
        upstream = tl.load(dy + lane, eviction_policy=KEEP)
        dg, du = backward_values(upstream, g, u, HAS_UP, NARROW, NATIVE)
        tl.store(dgate + lane, dg.to(g.dtype), need_gate)
        if HAS_UP:
            tl.store(dup + lane, du.to(g.dtype), need_up)
    else:
        inside = lane < columns - start
        g = tl.load(gate + lane, inside)
        u = tl.load(up + lane, inside & need_gate) if HAS_UP else g
        dg, du = backward_values(tl.load(dy + lane, inside), g, u, HAS_UP, NARROW, NATIVE)
        tl.store(dgate + lane, dg.to(g.dtype), inside & need_gate)
        if HAS_UP:
            tl.store(dup + lane, du.to(g.dtype), inside & need_up)


@triton.jit
def swiglu_forward_pairs(
    packed, y, packed_stride, y_stride, columns,
    NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = row_and_column(ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    both = tl.arange(0, 2 * BLOCK)
    packed += row * packed_stride + 2 * start
    y += row * y_stride + start
    if columns - start >= BLOCK:
        g, u = tl.split(tl.reshape(tl.load(packed + both), (BLOCK, 2)))
        tl.store(y + lane, forward_value(g, u, True, NARROW, NATIVE).to(g.dtype))
    else:
        left = columns - start
        g, u = tl.split(tl.reshape(tl.load(packed + both, both < 2 * left), (BLOCK, 2)))
        tl.store(y + lane, forward_value(g, u, True, NARROW, NATIVE).to(g.dtype), lane < left)


@triton.jit
def swiglu_backward_pairs(
    dy, packed, dpacked, dy_stride, packed_stride, dpacked_stride, columns,
    NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = row_and_column(ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    both = tl.arange(0, 2 * BLOCK)
    dy += row * dy_stride + start
    packed += row * packed_stride + 2 * start
    dpacked += row * dpacked_stride + 2 * start
    if columns - start >= BLOCK:
        g, u = tl.split(tl.reshape(tl.load(packed + both), (BLOCK, 2)))
        dg, du = backward_values(tl.load(dy + lane), g, u, True, NARROW, NATIVE)
        tl.store(dpacked + both, tl.interleave(dg, du).to(g.dtype))
    else:
        left = columns - start
        g, u = tl.split(tl.reshape(tl.load(packed + both, both < 2 * left), (BLOCK, 2)))
        dg, du = backward_values(tl.load(dy + lane, lane < left), g, u, True, NARROW, NATIVE)
        tl.store(dpacked + both, tl.interleave(dg, du).to(g.dtype), both < 2 * left)


@triton.jit
def split_index(index, size_1, size_2, size_3):
    """The four coordinates of a linear index, as int64; the last runs fastest."""
    i3 = index % size_3
    index = index // size_3
    i2 = index % size_2
    index = index // size_2
    return (index // size_1).to(tl.int64), (index % size_1).to(tl.int64), i2.to(tl.int64), i3.to(tl.int64)


@triton.jit
def silu_forward_strided(
    gate, up, y, total, size_1, size_2, size_3,
    gate_0, gate_1, gate_2, gate_3, up_0, up_1, up_2, up_3, y_0, y_1, y_2, y_3,
    HAS_UP: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    i0, i1, i2, i3 = split_index(index, size_1, size_2, size_3)
    g = tl.load(gate + i0 * gate_0 + i1 * gate_1 + i2 * gate_2 + i3 * gate_3, inside)
    u = tl.load(up + i0 * up_0 + i1 * up_1 + i2 * up_2 + i3 * up_3, inside) if HAS_UP else g
    value = forward_value(g, u, HAS_UP, NARROW, NATIVE).to(g.dtype)
    tl.store(y + i0 * y_0 + i1 * y_1 + i2 * y_2 + i3 * y_3, value, inside)


@triton.jit
def silu_backward_strided(
    dy, gate, up, dgate, dup, total, size_1, size_2, size_3,
    dy_0, dy_1, dy_2, dy_3, gate_0, gate_1, gate_2, gate_3, up_0, up_1, up_2, up_3,
    dgate_0, dgate_1, dgate_2, dgate_3, dup_0, dup_1, dup_2, dup_3, need,
    HAS_UP: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    need_gate = inside & ((need & 1) != 0)
    i0, i1, i2, i3 = split_index(index, size_1, size_2, size_3)
    g = tl.load(gate + i0 * gate_0 + i1 * gate_1 + i2 * gate_2 + i3 * gate_3, inside)
    u = tl.load(up + i0 * up_0 + i1 * up_1 + i2 * up_2 + i3 * up_3, need_gate) if HAS_UP else g
    upstream = tl.load(dy + i0 * dy_0 + i1 * dy_1 + i2 * dy_2 + i3 * dy_3, inside)
    dg, du = backward_values(upstream, g, u, HAS_UP, NARROW, NATIVE)
    tl.store(dgate + i0 * dgate_0 + i1 * dgate_1 + i2 * dgate_2 + i3 * dgate_3, dg.to(g.dtype), need_gate)
    if HAS_UP:
        need_up = inside & ((need & 2) != 0)
        tl.store(dup + i0 * dup_0 + i1 * dup_1 + i2 * dup_2 + i3 * dup_3, du.to(g.dtype), need_up)


_ROWS = Budget(registers=168)
_PAIRS = Budget(registers=168, shared_bytes=16384)  # gate and up change lanes through shared memory

KERNELS = (
    kernels.register(silu_forward_rows, budget=_ROWS),
    kernels.register(silu_backward_rows, budget=_ROWS),
    kernels.register(swiglu_forward_pairs, budget=_PAIRS),
    kernels.register(swiglu_backward_pairs, budget=_PAIRS),
    kernels.register(silu_forward_strided, budget=_ROWS),
    kernels.register(silu_backward_strided, budget=_ROWS),
)

_NARROW = (torch.bfloat16, torch.float16)


def variants(
    kernel: str, dtype: torch.dtype, has_up: bool, native: bool, schedule: dict[str, int]
) -> dict[Any, Variant]:
    """What a kernel compiles for a dtype, by the key its launcher looks up.

    All of it is compiled together, so that no later size, address or number of rows compiles more.
    `native` is for NVIDIA GPUs: their own instructions for 2^x and 1/x.
    """
    described = kernels.registered()[kernel]
    runtime = [name for name in described.parameters if not name.isupper()]
    pointers = [name for name in runtime if name in _POINTERS]
    strides = [name for name in runtime if name.endswith("_stride")]
    element = f"*{TRITON_TYPES[dtype]}"
    types = {name: element if name in _POINTERS else _SCALARS.get(name, "i64") for name in runtime}

    def variant(block: int, num_warps: int, one_row: bool, aligned: bool) -> Variant:
        values = {
            "HAS_UP": has_up,
            "NARROW": dtype in _NARROW,
            "NATIVE": native,
            "ONE_ROW": one_row,
            "BLOCK": block,
        }
        constants = {name: values[name] for name in described.parameters if name.isupper()}
        return described.variant(
            types, constants, [*pointers, *strides] if aligned else [], num_warps=num_warps, num_stages=1
        )

    if kernel.endswith("strided"):
        return {"strided": variant(schedule["block"], schedule["num_warps"], False, False)}
    shapes = {
        "one row": (schedule["block"], schedule["num_warps"], True),
        "long rows": (schedule["block"], schedule["num_warps"], False),
        "short rows": (schedule["short_block"], schedule["short_num_warps"], False),
    }
    return {(name, aligned): variant(*shape, aligned) for name, shape in shapes.items() for aligned in (True, False)}


_POINTERS = frozenset(("dy", "gate", "up", "y", "dgate", "dup", "packed", "dpacked"))
_SCALARS = {name: "i32" for name in ("need", "total", "size_1", "size_2", "size_3")}


def prepare(plan: Plan) -> None:
    """Compiles all variants of a plan's kernel, so that no later size, address or stride compiles more."""
    for key in _variants_of(plan):
        launcher(plan, key)


def launcher(plan: Plan, key: Any) -> Callable[..., None]:
    """The compiled variant of a plan's kernel under a key; the first one brings the others along.

    A plan with a schedule of its own, as `verify` and tuning make them, compiles what it launches.
    """
    compiled = plan.memo.get(key)
    if compiled is None:
        described = _variants_of(plan)
        for other in (key,) if plan.overrides else described:
            plan.memo[other] = described[other].prepare(plan.problem.device)
        compiled = plan.memo[key]
    return compiled


def _variants_of(plan: Plan) -> dict[Any, Variant]:
    device = plan.problem.device
    has_up = not plan.operator.name.startswith("silu")
    native = device.type == "cuda" and torch.version.hip is None
    return variants(plan.candidate.kernel, plan.problem.dtypes[0], has_up, native, plan.schedule)


def _launch_rows(plan: Plan, pointers: list[Tensor], walked: list[Tensor], *last: int) -> None:
    """Launches a rows or pairs kernel.

    Args:
        pointers: the kernel's tensors, in its order; absent ones are empty.
        walked: tensors of the output's shape that stand for those present, and the output last.
        last: the kernel's remaining scalar arguments.
    """
    columns = walked[-1].numel()
    if columns == 0:
        return
    rows, strides = 1, [0] * len(pointers)
    if not all(tensor.is_contiguous() for tensor in pointers):
        axes = coalesce(walked)
        columns = axes.sizes[-1]
        if len(axes.sizes) == 2:
            rows = axes.sizes[0]
            steps = iter(axes.strides)
            strides = [next(steps)[0] if tensor.numel() else 0 for tensor in pointers]
    block, short_block = plan.schedule["block"], plan.schedule["short_block"]
    aligned = all(tensor.data_ptr() % 16 == 0 for tensor in pointers) and all(s % 16 == 0 for s in strides)
    if rows == 1:
        launcher(plan, ("one row", aligned))((-(-columns // block), 1, 1), *pointers, *strides, columns, *last)
    elif rows > MAX_GRID_X:
        for begin in range(0, rows, MAX_GRID_X):
            starts = [_shift(t, begin * s) if t.numel() else t for t, s in zip(pointers, strides, strict=True)]
            grid = (min(MAX_GRID_X, rows - begin), -(-columns // short_block), 1)
            launcher(plan, ("short rows", aligned))(grid, *starts, *strides, columns, *last)
    elif columns <= short_block:
        launcher(plan, ("short rows", aligned))((rows, 1, 1), *pointers, *strides, columns, *last)
    elif columns <= block * MAX_GRID_Y:
        launcher(plan, ("long rows", aligned))((rows, -(-columns // block), 1), *pointers, *strides, columns, *last)
    else:
        for row in range(rows):
            starts = [_shift(t, row * s) if t.numel() else t for t, s in zip(pointers, strides, strict=True)]
            grid = (-(-columns // block), 1, 1)
            launcher(plan, ("one row", aligned))(grid, *starts, *strides, columns, *last)


def _launch_strided(plan: Plan, pointers: list[Tensor], *last: int) -> None:
    """Launches a strided kernel, once for each index of the axes past what it walks."""
    present = [tensor for tensor in pointers if tensor.numel()]
    if not present:
        return
    axes = coalesce(present)
    block = plan.schedule["block"]
    for offsets, sizes, inner in _windows(axes.sizes, axes.strides):
        starts: list[Tensor] = []
        steps: list[int] = []
        position = iter(range(len(present)))
        for tensor in pointers:
            which = next(position) if tensor.numel() else None
            starts.append(tensor if which is None or not offsets[which] else _shift(tensor, offsets[which]))
            steps += [0] * MAX_AXES if which is None else inner[which]
        total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
        launcher(plan, "strided")((-(-total // block), 1, 1), *starts, total, *sizes[1:], *steps, *last)


def _shift(tensor: Tensor, elements: int) -> Tensor:
    """A tensor whose first element lies further on in the same storage."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + elements)


def _windows(sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...]):
    """Cuts axes into pieces a strided kernel can walk.

    Yields, for each piece, each tensor's offset, four sizes, and each tensor's four strides.
    """
    outer = len(sizes) - MAX_AXES
    if outer > 0:
        for index in range(sizes[0]):
            for offsets, inner_sizes, inner in _windows(sizes[1:], tuple(row[1:] for row in strides)):
                yield [o + index * row[0] for o, row in zip(offsets, strides, strict=True)], inner_sizes, inner
        return
    padding = MAX_AXES - len(sizes)
    sizes = (1,) * padding + sizes
    strides = tuple((0,) * padding + row for row in strides)
    longest = max(range(MAX_AXES), key=lambda axis: sizes[axis])
    rest = sizes[0] * sizes[1] * sizes[2] * sizes[3] // sizes[longest]
    step = max(1, MAX_ELEMENTS // rest)
    for begin in range(0, sizes[longest], step):
        piece = list(sizes)
        piece[longest] = min(step, sizes[longest] - begin)
        yield [begin * row[longest] for row in strides], piece, [list(row) for row in strides]


def forward(plan: Plan, gate: Tensor, up: Tensor | None, y: Tensor) -> None:
    """y = silu(gate)·up, or silu(gate) without an up."""
    pointers = [gate, y if up is None else up, y]
    if plan.candidate.kernel.endswith("rows"):
        _launch_rows(plan, pointers, pointers)
    else:
        _launch_strided(plan, pointers)


def backward(
    plan: Plan, dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor, dup: Tensor | None, need: int
) -> None:
    """dgate and dup, as far as needed; one that is not needed is empty."""
    stand_in = dgate if need & NEED_GATE else dup
    assert stand_in is not None
    pointers = [dy, gate, gate if up is None else up, dgate, dgate if dup is None else dup]
    if plan.candidate.kernel.endswith("rows"):
        _launch_rows(plan, pointers, [t for t in pointers if t.numel()] + [stand_in], need)
    else:
        _launch_strided(plan, pointers, need)


def forward_pairs(plan: Plan, packed: Tensor, y: Tensor) -> None:
    """y = silu(gate)·up, gate and up interleaved in packed."""
    _launch_rows(plan, [packed, y], [packed[..., 0::2], y])


def backward_pairs(plan: Plan, dy: Tensor, packed: Tensor, dpacked: Tensor) -> None:
    """dpacked, laid out like packed."""
    _launch_rows(plan, [dy, packed, dpacked], [dy, packed[..., 0::2], dpacked[..., 0::2]])
