"""The kernel that dispatch and combine share, and the launches of theirs that move rows.

moe_sum    one token's row from the rows of its entries, one after the other
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import Fault, status_word
from adjoint.core.kernels import Budget, Int32, Int32If16, Int64, Int64If16, Kernel, Pointer, PointerIf16, kernel
from adjoint.core.launch import Launch, Setup, is_aligned
from adjoint.core.layout import Rows, leading_axes
from adjoint.device.faults import record

MOVE = Budget(registers=128)


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

    def choose(self, outer: int, steps: int, is_adjacent: bool, *tensors: Tensor) -> Launch:
        """The variant for tensors whose rows lie like `Rows`; `steps` is the bitwise or of the distances of rows."""
        if outer or (self._columns > 1 and not is_adjacent):
            return self._strided
        return self._adjacent[(steps | self._columns) % 16 == 0 and is_aligned(*tensors)]


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
    """`moe_sum` with weights of a dtype, or none; an entry without a row is reported as `fault`, where there is one."""

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


def token_rows(tensor: Tensor) -> Rows:
    """Where the tokens of a tensor [..., columns] lie; its columns may be any distance apart."""
    return Rows(tensor, *(leading_axes(tensor) or ()))  # more than two axes are left in an empty tensor alone


def add_copies(setup: Setup) -> None:
    """Adds a region for each argument of a dispatch or a combine that must be copied first."""
    tokens, slots, experts, columns = setup.problem.sizes
    element, second = setup.problem.dtypes[0], setup.problem.dtypes[-1]
    values, entries = (element, tokens * columns), tokens * slots
    setup.copies(
        x=values, dy=values, indices=(second, entries), weights=(second, entries), inverse=(torch.int32, entries),
        offsets=(torch.int32, experts + 1),
    )  # fmt: skip
