"""Triton functions that kernels of several ops share: where rows lie, logits across a warp, sums in a stated order.

A row of logits lies across one warp: lane l of slice s holds expert 32·s + l.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

import triton
import triton.language as tl

LANES = tl.constexpr(32)
"""Experts of a slice, and slots of a row of results: a warp's width, so that no reduction depends on a layout."""


@triton.jit
def row_start(row, inner, outer, step, SPLIT: tl.constexpr):
    """Where rows begin; with SPLIT they lie along two axes, as `adjoint.core.layout.Rows` has them."""
    if SPLIT:
        return (row // inner).to(tl.int64) * outer + (row % inner).to(tl.int64) * step
    else:
        return row.to(tl.int64) * step


@triton.jit
def load_slices(row_pointers, inside, EXPERTS: tl.constexpr, SLICES: tl.constexpr):
    """The logits of rows, as one tensor [rows, 32] a slice, and −∞ past the last expert."""
    lane = tl.arange(0, LANES)
    slices = ()
    for s in tl.static_range(SLICES):
        if s * LANES + LANES <= EXPERTS:
            mask = inside[:, None] & (lane >= 0)[None, :]
        else:
            mask = inside[:, None] & (lane + s * LANES < EXPERTS)[None, :]
        pointers = row_pointers[:, None] + (lane + s * LANES)[None, :]
        slices = slices + (tl.load(pointers, mask, other=float("-inf")),)
    return slices


@triton.jit
def row_maximum(slices, SLICES: tl.constexpr):
    """The largest logit of each row, NaN left out, in float32; −∞ where there is none."""
    best = tl.full(slices[0].shape, float("-inf"), tl.float32)
    for s in tl.static_range(SLICES):
        value = slices[s].to(tl.float32)
        best = tl.where(value > best, value, best)
    return tl.max(best, 1)


@triton.jit
def warp_sum(values):
    """Each row's sum of 32, in all of its places: lanes 16 apart, then 8, 4, 2 and 1, whatever the layout of threads.

    `tl.sum` adds in the order of the layout that the compiler has chosen, which differs between versions, numbers of
    warps and ways to load what is summed.
    """
    lane = tl.arange(0, LANES)[None, :] + tl.zeros(values.shape, tl.int32)
    for step in tl.static_range(5):
        values += tl.gather(values, lane ^ (16 // 2**step), 1)
    return values


@triton.jit
def exponential_sum(slices, maximum, WIDE: tl.constexpr, SLICES: tl.constexpr):
    """Σ e^(logit − maximum) over each row, NaN left out: a lane's slices in order, then halves of the warp."""
    total = tl.zeros(slices[0].shape, WIDE)
    for s in tl.static_range(SLICES):
        value = slices[s].to(tl.float32)
        term = tl.exp(value.to(WIDE) - maximum[:, None].to(WIDE))
        total += tl.where(value == value, term, 0.0)
    return warp_sum(total)


@triton.jit
def halves(both):
    """The left and the right half of the columns."""
    rows: tl.constexpr = both.shape[0]
    columns: tl.constexpr = both.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(both, (rows, 2, columns)), (0, 2, 1)))


@triton.jit
def sum_by_halves(values, LEVELS: tl.constexpr):
    """[1, 2^LEVELS] -> [1, 1]: the first half plus the second, and so on, whatever the layout of threads."""
    for _ in tl.static_range(LEVELS):
        first, second = halves(values)
        values = first + second
    return values
