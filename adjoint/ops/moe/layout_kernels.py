"""Triton kernels that compute a layout: a counting sort of the entries by expert.

Every span of entries counts its experts; `group_sum_counts` of the core sums the counts of every expert over
the spans; every span gives its entries their rows. The order is a pure function of the indices: nothing here
depends on which program runs first, or on how many entries a span has.

Entries of no expert have no bin. Those of a span come after all others in it, and the spans before have as
many as they have entries that are in no bin.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget
from adjoint.device.faults import record


@triton.jit
def load_expert(indices, entry, count, experts):
    """The indices at entries, and which of them are experts; none is past the end."""
    index = tl.load(indices + entry, entry < count, other=-1)
    return index, (index >= 0) & (index < experts)


@triton.jit
def moe_count_experts(
    indices, counts, status_word, fault, count, experts, RAISE: tl.constexpr, BINS: tl.constexpr, SPAN: tl.constexpr
):  # fmt: skip
    """counts[span, expert] = how many entries of the span go to the expert."""
    span = tl.program_id(0)
    entry = span * SPAN + tl.arange(0, SPAN)
    index, known = load_expert(indices, entry, count, experts)
    if RAISE:
        record(status_word, fault, entry, index, (entry < count) & (known == 0))
    bin = tl.arange(0, BINS)
    found = tl.histogram(tl.where(known, index, 0).to(tl.int32), BINS)
    found -= tl.where(bin == 0, tl.sum((known == 0).to(tl.int32)), 0)  # entries of no expert were counted as expert 0's
    tl.store(counts + span.to(tl.int64) * BINS + bin, found)


@triton.jit
def moe_place_entries(
    indices, counts, begins, totals, offsets, permutation, inverse, order, count, experts, chunk,
    ORDER: tl.constexpr, BINS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The row of each entry, the entry of each row, and where the rows of each expert begin.

    A span is sorted by expert and entry first: what goes to one expert then stands together, in order, and
    follows what the spans before have for it.

    With ORDER, `order` lists rows in the order to fill them in, and beside each its entry (`count` where that has no
    expert): `chunk` spans after `chunk` spans, the rows of each in their order.
    """
    span = tl.program_id(0)
    local = tl.arange(0, SPAN)
    bin = tl.arange(0, BINS)
    index, known = load_expert(indices, span * SPAN + local, count, experts)
    ordered = tl.sort(tl.where(known, index, BINS).to(tl.int32) * SPAN + local)
    all_spans = tl.load(totals + bin)
    this_span = tl.load(counts + span.to(tl.int64) * BINS + bin)
    spans_before = tl.load(begins + span.to(tl.int64) * BINS + bin)
    first = tl.cumsum(all_spans, 0) - all_spans
    known_rows = tl.sum(all_spans, 0)
    if span == 0:
        tl.store(offsets + bin, first, bin < experts)
        tl.store(offsets + experts, known_rows)
    begin = first + spans_before - (tl.cumsum(this_span, 0) - this_span)
    begin_unknown = known_rows + span * SPAN - tl.sum(spans_before, 0) - tl.sum(this_span, 0)
    expert = ordered // SPAN
    begin = tl.gather(begin, tl.minimum(expert, BINS - 1), 0)
    row = tl.where(expert < BINS, begin, begin_unknown) + local
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
        shift = tl.where(expert < BINS, shift, tl.sum(up_to_here, 0) - known_rows)
        both = row.to(tl.int64) * 4294967296 + tl.where(expert < BINS, entry, count)
        tl.store(order + row + shift, both, entry < count)


_SORT = Budget(registers=128, shared_bytes=16384)

KERNELS = (
    kernels.register(moe_count_experts, budget=_SORT),
    kernels.register(moe_place_entries, budget=_SORT),
)
