"""Triton kernels of dispatch, and the sum that it shares with combine.

    moe_gather    rows from the rows of their tokens, in an order that finds these in the cache
    moe_sum       one token's row from the rows of its entries, one after the other

Entry token·slots + slot has the row inverse[entry]. Rows past the last offset belong to no expert: they are
written as zeros and count for nothing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import Fault, check, status_word
from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Kernel, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Launch, Setup, is_aligned
from adjoint.core.layout import leading_axes
from adjoint.device.faults import record
from adjoint.ops.moe.dispatch.plans import EXPERT_OUT_OF_RANGE
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout.kernels import LayoutSort

MOVE = Budget(registers=128)


@triton.jit
def token_start(token, inner, outer_stride, inner_stride, STRIDED: tl.constexpr):
    """Where the row of each token begins."""
    if STRIDED:
        return (token // inner).to(tl.int64) * outer_stride + (token % inner).to(tl.int64) * inner_stride
    return token.to(tl.int64) * inner_stride


@kernel(budget=MOVE, schedule=("ROWS", "BLOCK"))
@triton.jit
def moe_gather(
    source: PointerIf16.element, order: Pointer.int64, out: PointerIf16.element, tokens: Int32, slots: Int32,
    columns: Int32If16, inner: Int32, outer_stride: Int64, inner_stride: Int64If16, column_stride: Int64,
    STRIDED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[row, :] = source[token, :] for the rows and entries of `order`; zeros for an entry without an expert.

    Tokens near each other have rows all over `out`. In the order of tokens, writes would be scattered; in the order of
    rows, a token would be read from memory once for every slot. So rows are filled chunk by chunk of tokens: those of a
    chunk and an expert are adjacent, and the tokens stay in the cache until the last of their rows is written.
    """
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tokens * slots
    both = tl.load(order + place, place < count, other=0)
    row = both >> 32
    entry = both.to(tl.int32)  # the lower half
    inside = (place < count)[:, None] & (column < columns)[None, :]
    start = token_start(entry // slots, inner, outer_stride, inner_stride, STRIDED)
    step = column * column_stride if STRIDED else column
    valid = inside & (entry < count)[:, None]
    value = tl.load(source + start[:, None] + step[None, :], valid, other=0, eviction_policy="evict_last")
    tl.store(out + row[:, None] * columns + column[None, :], value, inside, eviction_policy="evict_first")


@kernel(budget=Budget(registers=160), schedule=("ROWS", "BLOCK"))
@triton.jit
def moe_sum(
    rows: PointerIf16.element, weights: Pointer.weight, inverse: Pointer.int32, offsets: Pointer.int32,
    status_word: Pointer.int64, fault: Int32, out: PointerIf16.element, tokens: Int32, slots: Int32, experts: Int32,
    columns: Int32If16, row_stride: Int64If16, column_stride: Int64,
    WEIGHTED: tl.constexpr, RAISE: tl.constexpr, DOUBLE: tl.constexpr, STRIDED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, :] = Σ over j of rows[inverse[t, j], :], or of weights[t, j] times it, in the order of j."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    in_row = (column < columns)[None, :]
    step = column * column_stride if STRIDED else column
    last = tl.minimum(tl.load(offsets + experts), tokens * slots)
    total = tl.zeros([ROWS, BLOCK], tl.float64 if DOUBLE else tl.float32)
    for slot in range(0, slots):
        entry = token * slots + slot
        row = tl.load(inverse + entry, token < tokens, other=-1)
        if RAISE:
            faulty = (token < tokens) & ((row < 0) | (row >= tokens * slots)) & (tl.program_id(1) == 0)
            record(status_word, fault, entry, row, faulty)
        counts = (row >= 0) & (row < last)
        start = row.to(tl.int64) * row_stride
        term = tl.load(rows + start[:, None] + step[None, :], counts[:, None] & in_row, other=0).to(total.dtype)
        if WEIGHTED:
            term = term * tl.load(weights + entry, counts, other=0).to(total.dtype)[:, None]
        total += term
    target = out + token.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), (token < tokens)[:, None] & in_row)


# ------------------------------------------------------------------------------------------------ launches


class RowKernel:
    """A kernel for each way in which rows may lie: for 16 bytes at a time, for adjacent elements, for any strides."""

    def __init__(self, setup: Setup, kernel: Kernel, **settings: Any) -> None:
        self._adjacent = setup.either(kernel, STRIDED=False, **settings)
        self._strided = setup.kernel(kernel, STRIDED=True, **settings)
        self._columns = setup.problem.sizes[-1]

    def choose(self, outer_stride: int, row_strides: int, adjacent: bool, *tensors: Tensor) -> Launch:
        """The variant for some tensors.

        Args:
            outer_stride: of lines of tokens; 0 where one line has all of them.
            row_strides: of tokens or rows; where there are several, their bitwise or.
            adjacent: whether the elements of a row are adjacent.
            tensors: what is read or written.
        """
        if outer_stride or (self._columns > 1 and not adjacent):
            return self._strided
        return self._adjacent[(row_strides | self._columns) % 16 == 0 and is_aligned(*tensors)]


class TiledKernel(RowKernel):
    """A `RowKernel` whose programs have some items and some of their columns each; short rows share a program."""

    def __init__(self, setup: Setup, kernel: Kernel, part: str, items: int, **settings: Any) -> None:
        schedule, columns = setup.schedule, setup.problem.sizes[-1]
        block = max(16, min(schedule[f"{part}_block"], 1 << (columns - 1).bit_length() if columns else 1))
        rows = max(1, schedule[f"{part}_elements"] // block)
        warps = min(schedule[f"{part}_warps"], max(1, rows * block // 256))  # none without work
        super().__init__(setup, kernel, ROWS=rows, BLOCK=block, num_warps=warps, **settings)
        self.grid = -(-items // rows), -(-columns // block)


class RowSum:
    """out[t, :] = Σ over j of rows[inverse[t, j], :], or of weights[t, j] times it, in the order of j.

    Args:
        setup: binds the kernel.
        weight: the dtype of the weights; None without weights.
        fault: what an entry without a row is reported as; None where it is not reported.
    """

    def __init__(self, setup: Setup, weight: torch.dtype | None, fault: Fault | None) -> None:
        self._tokens, self._slots, self._experts, self._columns = setup.problem.sizes
        element = setup.problem.dtypes[0]
        self._fault, self._device = 0 if fault is None else fault.row, setup.device
        self._kernel = TiledKernel(
            setup, moe_sum, "sum", self._tokens, element=element, weight=weight or torch.float32,
            WEIGHTED=weight is not None, RAISE=fault is not None, DOUBLE=element == torch.float64,
        )  # fmt: skip

    def launch(self, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, out: Tensor) -> None:
        row_stride, column_stride = rows.stride()
        self._kernel.choose(0, row_stride, column_stride == 1, rows, out).launch(
            self._kernel.grid, rows=rows, weights=inverse if weights is None else weights, inverse=inverse,
            offsets=offsets, status_word=status_word(self._device), fault=self._fault, out=out, tokens=self._tokens,
            slots=self._slots, experts=self._experts, columns=self._columns, row_stride=row_stride,
            column_stride=column_stride,
        )  # fmt: skip


def token_lines(tensor: Tensor) -> tuple[int, int, int, int]:
    """Where the tokens of a tensor [..., columns] lie: tokens of a line, strides of lines, of tokens and of columns."""
    axes = leading_axes(tensor) or (1, 0, 0)  # more than two axes are left in an empty tensor alone: others are copied
    return (*axes, tensor.stride(-1))


def scratch_for_copies(setup: Setup) -> bool:
    """Adds a region for each argument that must be copied first, as the problem's layout says; whether there is any."""
    tokens, slots, experts, columns = setup.problem.sizes
    element, second = setup.problem.dtypes[0], setup.problem.dtypes[-1]
    regions = {
        "x": (element, tokens * columns),
        "dy": (element, tokens * columns),
        "indices": (second, tokens * slots),
        "weights": (second, tokens * slots),
        "inverse": (torch.int32, tokens * slots),
        "offsets": (torch.int32, experts + 1),
    }
    setup.scratch(**{name: regions[name] for name in setup.problem.layout.split(", ") if name})
    return bool(setup.problem.layout)


def dispatch(setup: Setup) -> Execute:
    """The rows and their layout."""
    tokens, slots, experts, columns = setup.problem.sizes
    element, index = setup.problem.dtypes
    sort = LayoutSort(setup, index, tokens * slots, experts, EXPERT_OUT_OF_RANGE, ordered=True)
    gather = TiledKernel(setup, moe_gather, "gather", tokens * slots, element=element)
    scratch_for_copies(setup)
    # As many bytes of tokens as the cache keeps until all of their rows are filled.
    chunk = max(1, setup.schedule["gather_chunk"] * 2 // element.itemsize // sort.span)
    on_cpu = setup.device.type == "cpu"

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        memory = setup.memory(workspace)
        x, indices = memory.contiguous("x", arguments[0]), memory.contiguous("indices", arguments[1])
        rows, *layout = outputs
        sort.write(memory, indices, Layout(*layout), chunk)
        inner, outer_stride, inner_stride, column_stride = token_lines(x)
        gather.choose(outer_stride, inner_stride, column_stride == 1, x, rows).launch(
            gather.grid, source=x, order=memory["order"], out=rows, tokens=tokens, slots=slots, columns=columns,
            inner=inner, outer_stride=outer_stride, inner_stride=inner_stride, column_stride=column_stride,
        )  # fmt: skip
        if on_cpu:
            check()

    return execute


def dispatch_backward(setup: Setup) -> Execute:
    """The gradient of the tokens."""
    row_sum, has_copies = RowSum(setup, None, None), scratch_for_copies(setup)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        drows, inverse, offsets = arguments
        if has_copies:
            memory = setup.memory(workspace)
            inverse, offsets = memory.contiguous("inverse", inverse), memory.contiguous("offsets", offsets)
        row_sum.launch(drows, None, inverse, offsets, outputs[0])

    return execute
