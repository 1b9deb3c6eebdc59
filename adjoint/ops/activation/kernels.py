"""Triton kernels of the activations, and what launches them.

Everything runs on half exponentials: with h = e^−|x|/2 and r = 1 / (1 + h²),

    silu(x)  = x·r                    x ≥ 0        silu'(x) = r·(1 + x·h²·r)          x ≥ 0
             = (x·h)·r·h              x < 0                 = r·h·(1 + x·r)·h         x < 0

so nothing overflows, and for x far below 0 every factor stays normal until the last product: a
naive x / (1 + e^−x) gives 0 from x = −88.8 on, where the result is still normal in float32 and
bfloat16. Incoming factors (up, the upstream gradient) are multiplied by one h each before they meet.

`sigmoid_gate` runs on the kernels of swiglu, with its x in the place of up and σ in the place of silu (SIGMOID):

    σ(x) = r              x ≥ 0        σ'(x) = r²·h²
         = h·r·h          x < 0

Kernels come in three layouts. `rows`: every tensor is rows of adjacent elements, any distance apart
(one single row when all are contiguous). `pairs`: the same, gate and up interleaved in one tensor.
`strided`: anything, up to four axes. Addresses are int64, one element has one writer, and no sum is
formed: neither the tile, nor alignment, nor layout can change a bit.
"""

from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import Budget, Int32, Int64, Int64If16, Kernel, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup, is_aligned
from adjoint.core.layout import coalesce
from adjoint.ops.activation.plans import NEED_GATE, Activation

MAX_AXES = 4
"""Axes that a strided kernel visits; the launcher loops over the ones outside."""

MAX_ELEMENTS = 2**30
"""Elements a strided launch visits: its linear index is an int32, blocks past the end included."""

MAX_GRID_X, MAX_GRID_Y = 2**31 - 1, 65_535
"""Programs along a grid's axes, on every GPU."""

_ROWS = Budget(registers=168)
_PAIRS = Budget(registers=168, shared_bytes=16384)  # gate and up change lanes through shared memory

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
def sigmoid_parts(x, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """r, d and h: σ(x) is r·d² and its slope r²·h², where d = e^(min(x, 0)/2). Bounds |x| as above."""
    h = half_exponential(tl.where(x == x, tl.minimum(tl.abs(x), 2048.0), x), NARROW, NATIVE)
    return reciprocal(1.0 + h * h, NATIVE), tl.where(x >= 0, 1.0, h), h


@triton.jit
def forward_value(gate, up, HAS_UP: tl.constexpr, SIGMOID: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr):
    """silu(gate)·up, or σ(gate)·up."""
    x = widen(gate)
    if SIGMOID:
        r, d, _ = sigmoid_parts(x, NARROW, NATIVE)
        return (widen(up) * d) * (r * d)
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
def backward_values(
    dy, gate, up, HAS_UP: tl.constexpr, SIGMOID: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr
):
    """dgate = dy·up·silu'(gate) and dup = dy·silu(gate), or the same of σ.

    The slope of silu, at most 1.1, enters halved: the product overflows only where its value does.
    """
    if SIGMOID:
        r, d, h = sigmoid_parts(widen(gate), NARROW, NATIVE)
        dy = widen(dy)
        return (dy * h) * (widen(up) * (h * r * r)), (dy * d) * (r * d)
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


@kernel(budget=_ROWS, schedule=("BLOCK",))
@triton.jit
def silu_forward_rows(
    gate: PointerIf16.element, up: PointerIf16.element, y: PointerIf16.element, gate_stride: Int64If16,
    up_stride: Int64If16, y_stride: Int64If16, columns: Int64,
    HAS_UP: tl.constexpr, SIGMOID: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = row_and_column(ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    gate += row * gate_stride + start
    up += row * up_stride + start
    y += row * y_stride + start
    if columns - start >= BLOCK:  # no mask: wide accesses whatever the number of columns
        g = tl.load(gate + lane, eviction_policy=KEEP)
        u = tl.load(up + lane, eviction_policy=KEEP) if HAS_UP else g
        tl.store(y + lane, forward_value(g, u, HAS_UP, SIGMOID, NARROW, NATIVE).to(g.dtype))
    else:
        inside = lane < columns - start
        g = tl.load(gate + lane, inside)
        u = tl.load(up + lane, inside) if HAS_UP else g
        tl.store(y + lane, forward_value(g, u, HAS_UP, SIGMOID, NARROW, NATIVE).to(g.dtype), inside)


@kernel(budget=_ROWS, schedule=("BLOCK",))
@triton.jit
def silu_backward_rows(
    dy: PointerIf16.element, gate: PointerIf16.element, up: PointerIf16.element, dgate: PointerIf16.element,
    dup: PointerIf16.element, dy_stride: Int64If16, gate_stride: Int64If16, up_stride: Int64If16,
    dgate_stride: Int64If16, dup_stride: Int64If16,
    columns: Int64, need: Int32,
    HAS_UP: tl.constexpr, SIGMOID: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
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
        dg, du = backward_values(upstream, g, u, HAS_UP, SIGMOID, NARROW, NATIVE)
        tl.store(dgate + lane, dg.to(g.dtype), need_gate)
        if HAS_UP:
            tl.store(dup + lane, du.to(g.dtype), need_up)
    else:
        inside = lane < columns - start
        g = tl.load(gate + lane, inside)
        u = tl.load(up + lane, inside & need_gate) if HAS_UP else g
        dg, du = backward_values(tl.load(dy + lane, inside), g, u, HAS_UP, SIGMOID, NARROW, NATIVE)
        tl.store(dgate + lane, dg.to(g.dtype), inside & need_gate)
        if HAS_UP:
            tl.store(dup + lane, du.to(g.dtype), inside & need_up)


@kernel(budget=_PAIRS, schedule=("BLOCK",))
@triton.jit
def swiglu_forward_pairs(
    packed: PointerIf16.element, y: PointerIf16.element, packed_stride: Int64If16, y_stride: Int64If16,
    columns: Int64,
    NARROW: tl.constexpr, NATIVE: tl.constexpr, ONE_ROW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, start = row_and_column(ONE_ROW, BLOCK)
    lane = tl.arange(0, BLOCK)
    both = tl.arange(0, 2 * BLOCK)
    packed += row * packed_stride + 2 * start
    y += row * y_stride + start
    if columns - start >= BLOCK:
        g, u = tl.split(tl.reshape(tl.load(packed + both), (BLOCK, 2)))
        tl.store(y + lane, forward_value(g, u, True, False, NARROW, NATIVE).to(g.dtype))
    else:
        left = columns - start
        g, u = tl.split(tl.reshape(tl.load(packed + both, both < 2 * left), (BLOCK, 2)))
        tl.store(y + lane, forward_value(g, u, True, False, NARROW, NATIVE).to(g.dtype), lane < left)


@kernel(budget=_PAIRS, schedule=("BLOCK",))
@triton.jit
def swiglu_backward_pairs(
    dy: PointerIf16.element, packed: PointerIf16.element, dpacked: PointerIf16.element, dy_stride: Int64If16,
    packed_stride: Int64If16, dpacked_stride: Int64If16, columns: Int64,
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
        dg, du = backward_values(tl.load(dy + lane), g, u, True, False, NARROW, NATIVE)
        tl.store(dpacked + both, tl.interleave(dg, du).to(g.dtype))
    else:
        left = columns - start
        g, u = tl.split(tl.reshape(tl.load(packed + both, both < 2 * left), (BLOCK, 2)))
        dg, du = backward_values(tl.load(dy + lane, lane < left), g, u, True, False, NARROW, NATIVE)
        tl.store(dpacked + both, tl.interleave(dg, du).to(g.dtype), both < 2 * left)


@triton.jit
def split_index(index, size_1, size_2, size_3):
    """The four coordinates of a linear index, as int64; the last runs fastest."""
    i3 = index % size_3
    index = index // size_3
    i2 = index % size_2
    index = index // size_2
    return (index // size_1).to(tl.int64), (index % size_1).to(tl.int64), i2.to(tl.int64), i3.to(tl.int64)


@kernel(budget=_ROWS, schedule=("BLOCK",))
@triton.jit
def silu_forward_strided(
    gate: Pointer.element, up: Pointer.element, y: Pointer.element, total: Int32, size_1: Int32, size_2: Int32,
    size_3: Int32,
    gate_0: Int64, gate_1: Int64, gate_2: Int64, gate_3: Int64, up_0: Int64, up_1: Int64, up_2: Int64, up_3: Int64,
    y_0: Int64, y_1: Int64, y_2: Int64, y_3: Int64,
    HAS_UP: tl.constexpr, SIGMOID: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    i0, i1, i2, i3 = split_index(index, size_1, size_2, size_3)
    g = tl.load(gate + i0 * gate_0 + i1 * gate_1 + i2 * gate_2 + i3 * gate_3, inside)
    u = tl.load(up + i0 * up_0 + i1 * up_1 + i2 * up_2 + i3 * up_3, inside) if HAS_UP else g
    value = forward_value(g, u, HAS_UP, SIGMOID, NARROW, NATIVE).to(g.dtype)
    tl.store(y + i0 * y_0 + i1 * y_1 + i2 * y_2 + i3 * y_3, value, inside)


@kernel(budget=_ROWS, schedule=("BLOCK",))
@triton.jit
def silu_backward_strided(
    dy: Pointer.element, gate: Pointer.element, up: Pointer.element, dgate: Pointer.element, dup: Pointer.element,
    total: Int32, size_1: Int32, size_2: Int32, size_3: Int32,
    dy_0: Int64, dy_1: Int64, dy_2: Int64, dy_3: Int64, gate_0: Int64, gate_1: Int64, gate_2: Int64, gate_3: Int64,
    up_0: Int64, up_1: Int64, up_2: Int64, up_3: Int64,
    dgate_0: Int64, dgate_1: Int64, dgate_2: Int64, dgate_3: Int64, dup_0: Int64, dup_1: Int64, dup_2: Int64,
    dup_3: Int64, need: Int32,
    HAS_UP: tl.constexpr, SIGMOID: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < total
    need_gate = inside & ((need & 1) != 0)
    i0, i1, i2, i3 = split_index(index, size_1, size_2, size_3)
    g = tl.load(gate + i0 * gate_0 + i1 * gate_1 + i2 * gate_2 + i3 * gate_3, inside)
    u = tl.load(up + i0 * up_0 + i1 * up_1 + i2 * up_2 + i3 * up_3, need_gate) if HAS_UP else g
    upstream = tl.load(dy + i0 * dy_0 + i1 * dy_1 + i2 * dy_2 + i3 * dy_3, inside)
    dg, du = backward_values(upstream, g, u, HAS_UP, SIGMOID, NARROW, NATIVE)
    tl.store(dgate + i0 * dgate_0 + i1 * dgate_1 + i2 * dgate_2 + i3 * dgate_3, dg.to(g.dtype), need_gate)
    if HAS_UP:
        need_up = inside & ((need & 2) != 0)
        tl.store(dup + i0 * dup_0 + i1 * dup_1 + i2 * dup_2 + i3 * dup_3, du.to(g.dtype), need_up)


def _constants(setup: Setup, **more: Any) -> dict[str, Any]:
    """What all kernels are compiled for. NVIDIA's GPUs have instructions of their own for 2^x and 1/x (NATIVE)."""
    (dtype,) = setup.problem.dtypes
    return {"element": dtype, "NARROW": dtype.itemsize == 2, "NATIVE": setup.nvidia, **more}


def _by_parameter(views: tuple[Any, ...]) -> dict[str, Tensor]:
    """The tensors of views by a kernel's parameters; without an up, others stand in its place."""
    if len(views) == 3:
        gate, up, y = views
        return {"gate": gate, "up": y if up is None else up, "y": y}
    dy, gate, up, dgate, dup, _ = views
    up, dup = gate if up is None else up, dgate if dup is None else dup
    return {"dy": dy, "gate": gate, "up": up, "dgate": dgate, "dup": dup}


class _Rows:
    """The variants of a rows or pairs kernel: for one row, for several long ones and for several short ones."""

    def __init__(self, setup: Setup, kernel: Kernel, **constants: Any) -> None:
        schedule, constants = setup.schedule, _constants(setup, **constants)
        self.block, self.short_block = schedule["block"], schedule["short_block"]
        wide = {"BLOCK": self.block, "num_warps": schedule["num_warps"], **constants}
        narrow = {"BLOCK": self.short_block, "num_warps": schedule["short_num_warps"], **constants}
        self.one_row = setup.either(kernel, ONE_ROW=True, **wide)
        self.long_rows = setup.either(kernel, ONE_ROW=False, **wide)
        self.short_rows = setup.either(kernel, ONE_ROW=False, **narrow)

    def launch(self, tensors: dict[str, Tensor], like: list[Tensor], **numbers: int) -> None:
        """Launches the variant for the tensors' layout.

        Args:
            tensors: the kernel's tensors, by parameter; absent ones are empty.
            like: tensors of the output's shape that lie as those present, and the output last.
            numbers: the kernel's remaining arguments.
        """
        columns = like[-1].numel()
        if columns == 0:
            return
        rows, strides = 1, dict.fromkeys((f"{name}_stride" for name in tensors), 0)
        if not all([tensor.is_contiguous() for tensor in tensors.values()]):
            axes = coalesce(like)
            columns = axes.sizes[-1]
            if len(axes.sizes) == 2:
                rows = axes.sizes[0]
                steps = iter(axes.strides)
                strides = {f"{name}_stride": next(steps)[0] if x.numel() else 0 for name, x in tensors.items()}
        aligned = is_aligned(*tensors.values()) and not any([step % 16 for step in strides.values()])
        numbers |= strides | {"columns": columns}
        tiles = -(-columns // self.block)

        def from_row(row: int) -> dict[str, Tensor]:
            return {n: _shift(x, row * strides[f"{n}_stride"]) if x.numel() else x for n, x in tensors.items()}

        if rows == 1:
            self.one_row[aligned].launch((tiles,), **tensors, **numbers)
        elif rows > MAX_GRID_X:
            for first in range(0, rows, MAX_GRID_X):
                grid = (min(MAX_GRID_X, rows - first), -(-columns // self.short_block))
                self.short_rows[aligned].launch(grid, **from_row(first), **numbers)
        elif columns <= self.short_block:
            self.short_rows[aligned].launch((rows,), **tensors, **numbers)
        elif tiles <= MAX_GRID_Y:
            self.long_rows[aligned].launch((rows, tiles), **tensors, **numbers)
        else:
            for row in range(rows):
                self.one_row[aligned].launch((tiles,), **from_row(row), **numbers)


def rows(setup: Setup, of: Activation) -> Execute:
    """Rows of adjacent elements. Of a backward, a gradient that is not needed is empty."""
    kernel = silu_forward_rows if of.is_forward else silu_backward_rows
    variants = _Rows(setup, kernel, HAS_UP=of.has_up, SIGMOID=of.function.is_sigmoid)
    one_row, block, views = variants.one_row, variants.block, of.views

    def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        gate, up, y = views(arguments, outputs)
        up = y if up is None else up
        if gate.is_contiguous() and up.is_contiguous():  # written out: names that stand in the source cost least
            columns = y.numel()
            one_row[is_aligned(gate, up, y)].launch(
                (-(-columns // block),), gate=gate, up=up, y=y, gate_stride=0, up_stride=0, y_stride=0, columns=columns
            )
        else:
            variants.launch({"gate": gate, "up": up, "y": y}, [gate, up, y])

    def backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        viewed = views(arguments, outputs)
        tensors, need = _by_parameter(viewed), viewed[-1]
        last = tensors["dgate"] if need & NEED_GATE else tensors["dup"]
        variants.launch(tensors, [x for x in tensors.values() if x.numel()] + [last], need=need)

    return forward if of.is_forward else backward


def pairs(setup: Setup, of: Activation) -> Execute:
    """Gate and up interleaved in one tensor, and their gradients in one that lies like it, or over it."""
    variants = _Rows(setup, swiglu_forward_pairs if of.is_forward else swiglu_backward_pairs)

    def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        packed, (y,) = arguments[0], outputs
        variants.launch({"packed": packed, "y": y}, [packed[..., 0::2], y])

    def backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dy, packed, dpacked = *arguments[:2], outputs[0] if outputs else arguments[1]
        variants.launch({"dy": dy, "packed": packed, "dpacked": dpacked}, [dy, packed[..., 0::2], dpacked[..., 0::2]])

    return forward if of.is_forward else backward


def strided(setup: Setup, of: Activation) -> Execute:
    """Any layout, launched once for each index of the axes past those that a kernel visits."""
    kernel = silu_forward_strided if of.is_forward else silu_backward_strided
    views, block, num_warps = of.views, setup.schedule["block"], setup.schedule["num_warps"]
    constants = _constants(setup, HAS_UP=of.has_up, SIGMOID=of.function.is_sigmoid, BLOCK=block)
    bound = setup.kernel(kernel, num_warps=num_warps, **constants)
    pointers = [name for name, parameter in kernel.types.items() if parameter.pointer]
    stride_names = {name: [f"{name}_{axis}" for axis in range(MAX_AXES)] for name in pointers}
    no_strides = dict.fromkeys([name for names in stride_names.values() for name in names], 0)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        viewed = views(arguments, outputs)
        tensors, numbers = _by_parameter(viewed), {} if of.is_forward else {"need": viewed[-1]}
        present = [name for name, tensor in tensors.items() if tensor.numel()]
        if not present:
            return
        axes = coalesce([tensors[name] for name in present])
        for offsets, sizes, inner in _windows(axes.sizes, axes.strides):
            total = sizes[0] * sizes[1] * sizes[2] * sizes[3]
            steps, starts = dict(no_strides), dict(tensors)
            for name, offset, strides in zip(present, offsets, inner, strict=True):
                if offset:
                    starts[name] = _shift(tensors[name], offset)
                steps.update(zip(stride_names[name], strides, strict=True))
            bound.launch(
                (-(-total // block),), total=total, size_1=sizes[1], size_2=sizes[2], size_3=sizes[3], **starts,
                **steps, **numbers,
            )  # fmt: skip

    return execute


def _shift(tensor: Tensor, elements: int) -> Tensor:
    """A tensor whose first element lies further on in the same storage."""
    return tensor.as_strided((1,), (1,), tensor.storage_offset() + elements)


def _windows(
    sizes: tuple[int, ...], strides: tuple[tuple[int, ...], ...]
) -> Iterator[tuple[list[int], list[int], list[list[int]]]]:
    """Cuts axes into pieces that a strided kernel can visit: each tensor's offset, four sizes, four strides of each."""
    if len(sizes) > MAX_AXES:
        for index in range(sizes[0]):
            for offsets, inner_sizes, inner in _windows(sizes[1:], tuple(row[1:] for row in strides)):
                yield [o + index * row[0] for o, row in zip(offsets, strides, strict=True)], inner_sizes, inner
        return
    padding = MAX_AXES - len(sizes)
    sizes = (1,) * padding + sizes
    strides = tuple((0,) * padding + row for row in strides)
    longest = max(range(MAX_AXES), key=lambda axis: sizes[axis])
    step = max(1, MAX_ELEMENTS // (sizes[0] * sizes[1] * sizes[2] * sizes[3] // sizes[longest]))
    for begin in range(0, sizes[longest], step):
        piece = list(sizes)
        piece[longest] = min(step, sizes[longest] - begin)
        yield [begin * row[longest] for row in strides], piece, [list(row) for row in strides]
