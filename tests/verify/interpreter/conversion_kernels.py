"""Kernels that convert and multiply bfloat16, and sort, for the tests of the interpreter's corrections."""

import triton
import triton.language as tl


@triton.jit
def convert(values, narrow, back, count, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    inside = lane < count
    rounded = tl.load(values + lane, inside).to(tl.bfloat16)
    tl.store(narrow + lane, rounded, inside)
    tl.store(back + lane, rounded.to(tl.float32), inside)


@triton.jit
def product(left, right, out, SIZE: tl.constexpr):
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    a = tl.load(left + row * SIZE + column)
    b = tl.load(right + row * SIZE + column)
    tl.store(out + row * SIZE + column, tl.dot(a, b))


@triton.jit
def order(values, ascending, descending, largest, SIZE: tl.constexpr, FEW: tl.constexpr):
    lane = tl.arange(0, SIZE)
    found = tl.load(values + lane)
    tl.store(ascending + lane, tl.sort(found))
    tl.store(descending + lane, tl.sort(found, descending=True))
    tl.store(largest + tl.arange(0, FEW), tl.topk(found, FEW))
