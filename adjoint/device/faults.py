"""The device-side half of the status word (see `adjoint.core.errors`); imports Triton, so kernels only."""

import triton
import triton.language as tl


@triton.jit
def record(status_word, row, position, value, faulty):
    """Records `value` at `position` where `faulty`; the first position wins, whatever the order."""
    position = tl.minimum(position.to(tl.int64), 2147483646) << 32
    value = value.to(tl.int64)
    low = position | (value & 0xFFFFFFFF)
    high = position | ((value >> 32) & 0xFFFFFFFF)
    word = status_word + row * 2 + tl.zeros_like(value)
    tl.atomic_min(word, low, mask=faulty, sem="relaxed")
    tl.atomic_min(word + 1, high, mask=faulty, sem="relaxed")
