"""Triton kernels of `embedding`, and what launches them.

The forward gathers rows. The backward groups the ids, sums tiles of hot rows level by level, and writes the rows.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, status_word
from adjoint.core.kernels import Int32, Int32If16, Int64, Int64If16, Pointer, PointerIf16, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.ops.embedding.kernels import COPY, GroupSums, access_of, by_access, tile_of
from adjoint.ops.embedding.plans import tile_in_words
from adjoint.ops.embedding.table import ID_OUT_OF_RANGE


@kernel(budget=COPY, schedule=("ROWS", "BLOCK"))
@triton.jit
def embedding_gather(
    ids: Pointer.ids, weight: PointerIf16.element, out: PointerIf16.element, status_word: Pointer.int64,
    fault: Int32, count: Int32, rows: Int32, columns: Int32If16, row_stride: Int64If16, column_stride: Int64,
    RAISE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[n, :] = weight[ids[n], :], and zeros where an id is out of range."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    row = tl.load(ids + token, inside, other=0)
    valid = (row >= 0) & (row < rows)
    if RAISE:
        record(status_word, fault, token, row, inside & (valid == 0) & (tl.program_id(1) == 0))
    start = tl.where(valid, row, 0).to(tl.int64) * row_stride
    step = column if UNIT else column * column_stride
    in_row = (column < columns)[None, :]
    value = tl.load(weight + start[:, None] + step[None, :], (inside & valid)[:, None] & in_row, other=0)
    tl.store(out + token[:, None] * columns + column[None, :], value, inside[:, None] & in_row)


def gather(setup: Setup) -> Execute:
    """out = weight[ids]."""
    problem = setup.problem
    (element, ids_dtype), columns, device = problem.dtypes, problem.sizes[-1], setup.device
    tile = tile_of(setup.schedule, "gather", columns)
    raises = problem.options[-1] == "raise"
    kernels = by_access(
        setup, embedding_gather, {"element": element, "ids": ids_dtype, "RAISE": raises, **tile.settings}
    )
    setup.copies(ids=(ids_dtype, problem.sizes[0]))

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        ids, weight = arguments[:2]
        (out,), count = outputs, ids.numel()
        if count == 0 or columns == 0:
            return
        memory = setup.memory(workspace)
        row_stride, column_stride = weight.stride()
        kernels[access_of(column_stride == 1 or columns == 1, weight, out, columns, row_stride)].launch(
            tile.grid(count, columns), ids=memory.contiguous("ids", ids), weight=weight, out=out,
            status_word=status_word(device), fault=ID_OUT_OF_RANGE.row, count=count, rows=weight.shape[0],
            columns=columns, row_stride=row_stride, column_stride=column_stride,
        )  # fmt: skip
        if device.type == "cpu":
            check()

    return execute


class _RowSums:
    """Sums the rows of dout that each id has."""

    def __init__(self, setup: Setup, tile: int, **form: Any) -> None:
        (element, ids_dtype), (count, _, columns) = setup.problem.dtypes[:2], setup.problem.sizes
        self.setup, self.sums = setup, GroupSums(setup, ids_dtype, tile, **form)
        setup.add_numeric(tile=tile_in_words(tile))
        setup.copies(ids=(ids_dtype, count), gradient=(element, count * columns))

    def write(self, dout: Tensor, ids: Tensor, padding: int, out: Tensor, workspace: Tensor | None) -> Memory:
        memory = self.setup.memory(workspace)
        ids, dout = memory.contiguous("ids", ids), memory.contiguous("gradient", dout)
        self.sums.launch(memory, ids, padding, dout, out)
        return memory


def dense(setup: Setup, tile: int) -> Execute:
    """The gradient of the whole table."""
    sums = _RowSums(setup, tile)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, ids, _, padding = arguments
        if outputs[0].numel():
            sums.write(dout, ids, padding, outputs[0], workspace)

    return execute


def into(setup: Setup, tile: int) -> Execute:
    """Adds the gradient to the rows of a buffer that occur, and touches no other."""
    sums = _RowSums(setup, tile, listed=True, into=True)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        dout, ids, buffer, padding = arguments
        if dout.numel():
            sums.write(dout, ids, padding, buffer, workspace)
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)

    return execute


def sparse(setup: Setup, tile: int) -> Execute:
    """The rows that occur, ascending, and their gradients.

    Waits for the device once, at the end, where their number is read: until then there is room for as many
    rows as tokens, and what is returned is the beginning of it.
    """
    sums = _RowSums(setup, tile, listed=True)
    count, _, columns = setup.problem.sizes

    def execute(arguments: tuple[Any, ...], _: Any, workspace: Tensor | None) -> tuple[Tensor, ...]:
        dout, ids, _, padding = arguments
        values = dout.new_empty(count, columns)
        if count == 0:
            return ids.new_empty(0, dtype=torch.int64), values
        memory = sums.write(dout, ids, padding, values, workspace)
        number = int(memory.tensor("group_count"))
        return memory.tensor("group_keys")[:number].to(torch.int64), values[:number]

    return execute
