"""Computes a layout on the device: a counting sort of the entries by expert.

    sort = LayoutSort(setup, indices.dtype, count, experts, fault)    # in a plan's setup

    sort.write(memory, indices, layout)                               # in its execution

Every span of entries counts its experts; `CountSums` sums the counts of every expert over the spans; every span gives
its entries their rows. The order is a pure function of the indices: nothing here depends on which program runs first,
or on how many entries a span has.

Entries of no expert have no bin. Those of a span come after all others in it, and the spans before have as
many as they have entries that are in no bin.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import Fault, status_word
from adjoint.core.kernels import Budget, Int32, Pointer, kernel
from adjoint.core.launch import Setup
from adjoint.core.workspace import Memory
from adjoint.device.faults import record
from adjoint.device.grouping.kernels import CountSums
from adjoint.ops.moe.layout import SCHEDULES, Layout

_SORT = Budget(registers=128, shared_bytes=16384)


@triton.jit
def load_expert(indices, entry, count, experts):
    """The indices at entries, and which of them are valid experts; none is past the end."""
    index = tl.load(indices + entry, entry < count, other=-1)
    return index, (index >= 0) & (index < experts)


@kernel(budget=_SORT, schedule=("SPAN",))
@triton.jit
def moe_count_experts(
    indices: Pointer.index, counts: Pointer.int32, status_word: Pointer.int64, fault: Int32, count: Int32,
    experts: Int32,
    BINS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """counts[span, expert] = how many entries of the span go to the expert; others are reported."""
    span = tl.program_id(0)
    entry = span * SPAN + tl.arange(0, SPAN)
    index, valid = load_expert(indices, entry, count, experts)
    record(status_word, fault, entry, index, (entry < count) & (valid == 0))
    bin = tl.arange(0, BINS)
    entries = tl.histogram(tl.where(valid, index, 0).to(tl.int32), BINS)
    entries -= tl.where(bin == 0, tl.sum((valid == 0).to(tl.int32)), 0)  # those of no expert were counted as expert 0's
    tl.store(counts + span.to(tl.int64) * BINS + bin, entries)


@kernel(budget=_SORT, schedule=("SPAN",))
@triton.jit
def moe_place_entries(
    indices: Pointer.index, counts: Pointer.int32, begins: Pointer.int32, totals: Pointer.int32,
    offsets: Pointer.int32, permutation: Pointer.int32, inverse: Pointer.int32, order: Pointer.int64,
    count: Int32, experts: Int32, chunk: Int32,
    ORDER: tl.constexpr, BINS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The row of each entry, the entry of each row, and where the rows of each expert begin.

    A span is sorted by expert and entry first: the entries of one expert are then neighbours, in order, behind those of
    the spans before.

    With ORDER, `order` lists the rows in the order to fill them in, each in the upper half of a number whose lower half
    is its entry (`count` where that has no expert): `chunk` spans after `chunk` spans, the rows of each in their order.
    """
    span = tl.program_id(0)
    local = tl.arange(0, SPAN)
    bin = tl.arange(0, BINS)
    index, valid = load_expert(indices, span * SPAN + local, count, experts)
    ordered = tl.sort(tl.where(valid, index, BINS).to(tl.int32) * SPAN + local)
    all_spans = tl.load(totals + bin)
    this_span = tl.load(counts + span.to(tl.int64) * BINS + bin)
    spans_before = tl.load(begins + span.to(tl.int64) * BINS + bin)
    first = tl.cumsum(all_spans, 0) - all_spans
    valid_rows = tl.sum(all_spans, 0)
    if span == 0:
        tl.store(offsets + bin, first, bin < experts)
        tl.store(offsets + experts, valid_rows)
    begin = first + spans_before - (tl.cumsum(this_span, 0) - this_span)
    begin_invalid = valid_rows + span * SPAN - tl.sum(spans_before, 0) - tl.sum(this_span, 0)
    expert = ordered // SPAN
    begin = tl.gather(begin, tl.minimum(expert, BINS - 1), 0)
    row = tl.where(expert < BINS, begin, begin_invalid) + local
    entry = span * SPAN + ordered % SPAN
    tl.store(inverse + entry, row, entry < count)
    tl.store(permutation + row, entry, entry < count)
    if ORDER:
        first_span = span // chunk * chunk
        next_span = first_span + chunk
        chunks_before = tl.load(begins + first_span.to(tl.int64) * BINS + bin)
        up_to_here = all_spans
        if next_span < tl.num_programs(0):
            up_to_here = tl.load(begins + next_span.to(tl.int64) * BINS + bin)
        this_chunk = up_to_here - chunks_before
        shift = first_span * SPAN + tl.cumsum(this_chunk, 0) - this_chunk - (first + chunks_before)
        shift = tl.gather(shift, tl.minimum(expert, BINS - 1), 0)
        shift = tl.where(expert < BINS, shift, tl.sum(up_to_here, 0) - valid_rows)
        both = row.to(tl.int64) * 4294967296 + tl.where(expert < BINS, entry, count)
        tl.store(order + row + shift, both, entry < count)


# ------------------------------------------------------------------------------------------------ launches


class LayoutSort:
    """Computes layouts of `count` entries, in scratch memory that it adds to the plan's workspace.

    With `ordered`, it writes the order to fill rows in, too, into the region "order".
    """

    def __init__(
        self, setup: Setup, indices: torch.dtype, count: int, experts: int, fault: Fault, ordered: bool = False
    ) -> None:
        schedule = SCHEDULES.named("moe_layout", "interpreter" if setup.interpreted else "default")
        self.count, self.experts, self.fault, self.span = count, experts, fault, schedule["span"]
        self.bins = max(2, 1 << (experts - 1).bit_length())
        self.spans = max(1, -(-count // self.span))  # at least one: its program writes the offsets
        sizes: dict[str, Any] = {"index": indices, "BINS": self.bins, "SPAN": self.span}
        self._count = setup.kernel(moe_count_experts, num_warps=schedule["count_warps"], **sizes)
        self._sums = CountSums(setup)
        self._place = setup.kernel(moe_place_entries, ORDER=ordered, num_warps=schedule["place_warps"], **sizes)
        counts = torch.int32, self.spans * self.bins
        setup.scratch(expert_counts=counts, expert_begins=counts, expert_totals=(torch.int32, self.bins))
        if ordered:
            setup.scratch(order=(torch.int64, max(1, count)))

    def write(self, memory: Memory, indices: Tensor, layout: Layout, chunk: int = 1) -> None:
        """Fills a layout from contiguous indices; where rows have an order, for chunks of so many spans."""
        grid, counts, begins = (self.spans,), memory["expert_counts"], memory["expert_begins"]
        self._count.launch(
            grid, indices=indices, counts=counts, status_word=status_word(indices.device), fault=self.fault.row,
            count=self.count, experts=self.experts,
        )  # fmt: skip
        self._sums.launch(counts, begins, memory["expert_totals"], self.bins, self.spans)
        self._place.launch(
            grid, indices=indices, counts=counts, begins=begins, totals=memory["expert_totals"], offsets=layout.offsets,
            permutation=layout.permutation, inverse=layout.inverse, order=memory.get("order", counts),
            count=self.count, experts=self.experts, chunk=chunk,
        )  # fmt: skip
