"""Triton kernels that compute a layout: a counting sort of the entries by expert, in three steps.

Every span of entries counts its experts; every expert's counts are summed over the spans; every span gives its
entries their rows. Ranks inside a span come from comparisons and from counts of what stands before, so the
order is a pure function of the indices: nothing here depends on which program runs first.

Bins are the experts, and after them one for entries whose expert is out of range.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.faults import record
from adjoint.core.kernels import Budget

SPAN, TILE = 1024, 128
"""Entries of a program, and those it compares with each other."""

_SPAN = tl.constexpr(SPAN)
_TILE = tl.constexpr(TILE)


@triton.jit
def load_expert(indices, entry, count, experts):
    """The indices at entries, which of them are experts, and their bins."""
    index = tl.load(indices + entry, entry < count, other=0)
    known = (index >= 0) & (index < experts)
    # Entries past the end stand after all others, so nobody's rank counts them, and the last bin's total is not used.
    return index, known, tl.where(known & (entry < count), index, experts).to(tl.int32)


@triton.jit
def moe_count_experts(indices, counts, status_word, fault, count, experts, RAISE: tl.constexpr, BINS: tl.constexpr):
    """counts[span, bin] = how many entries of the span are in the bin."""
    span = tl.program_id(0)
    entry = span * _SPAN + tl.arange(0, _SPAN)
    index, known, bin = load_expert(indices, entry, count, experts)
    if RAISE:
        record(status_word, fault, entry, index, (entry < count) & (known == 0))
    tl.store(counts + span.to(tl.int64) * BINS + tl.arange(0, BINS), tl.histogram(bin, BINS))


@triton.jit
def moe_sum_counts(counts, totals, spans, BINS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr):
    """Each count becomes the sum of those of the spans before, bin by bin; totals gets the sum of each bin."""
    bin = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    carried = tl.zeros([WIDTH], tl.int32)
    for begin in range(0, spans, CHUNK):
        span = begin + tl.arange(0, CHUNK)
        places = counts + span.to(tl.int64)[:, None] * BINS + bin[None, :]
        found = tl.load(places, (span < spans)[:, None], other=0)
        tl.store(places, carried[None, :] + tl.cumsum(found, 0) - found, (span < spans)[:, None])
        carried += tl.sum(found, 0)
    tl.store(totals + bin, carried)


@triton.jit
def moe_place_entries(
    indices, counts, totals, offsets, permutation, inverse, count, experts, BINS: tl.constexpr
):  # fmt: skip
    """The row of each entry, the entry of each row, and where the rows of each expert begin."""
    span = tl.program_id(0)
    bins = tl.arange(0, BINS)
    total = tl.load(totals + bins)
    begins = tl.cumsum(total, 0) - total
    if span == 0:
        tl.store(offsets + bins, begins, bins <= experts)
    next_row = begins + tl.load(counts + span.to(tl.int64) * BINS + bins)
    local = tl.arange(0, _TILE)
    for first in range(span * _SPAN, tl.minimum(span * _SPAN + _SPAN, count), _TILE):
        entry = first + local
        _, _, bin = load_expert(indices, entry, count, experts)
        before = (bin[:, None] == bin[None, :]) & (local[:, None] < local[None, :])
        row = tl.gather(next_row, bin, 0) + tl.sum(before.to(tl.int32), 0)
        tl.store(inverse + entry, row, entry < count)
        tl.store(permutation + row, entry, entry < count)
        next_row += tl.histogram(bin, BINS)


_COUNT = Budget(registers=128, shared_bytes=49152)

KERNELS = (
    kernels.register(moe_count_experts, budget=_COUNT),
    kernels.register(moe_sum_counts, budget=_COUNT),
    kernels.register(moe_place_entries, budget=Budget(registers=255, shared_bytes=49152)),
)
