"""A kernel that finds value errors, for the test of the status word."""

import triton
import triton.language as tl

from adjoint.device.faults import record


@triton.jit
def find_negative(ids, status_word, row, count, BLOCK: tl.constexpr):
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    value = tl.load(ids + position, inside, other=0)
    record(status_word, row, position, value, inside & (value < 0))
