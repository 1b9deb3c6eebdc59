"""Kernels whose programs race, each in one way, and some that do not."""

import triton
import triton.language as tl


@triton.jit
def store_own(out, values):
    program = tl.program_id(0)
    tl.store(out + program, tl.load(values + program))


@triton.jit
def store_same(out, values):
    tl.store(out, tl.load(values))


@triton.jit
def store_different(out, values):
    tl.store(out, tl.program_id(0).to(tl.float32))


@triton.jit
def load_of_another(out, values):
    program = tl.program_id(0)
    tl.store(out + program, tl.load(out + (program + 1) % tl.num_programs(0)))


@triton.jit
def store_twice_at_once(out, values):
    lane = tl.arange(0, 4)
    tl.store(out + 4 * tl.program_id(0) + lane // 2, lane.to(tl.float32))


@triton.jit
def store_past_the_end(out, values):
    lane = tl.arange(0, 4)
    tl.store(out + 3 * tl.program_id(0) + lane, (tl.program_id(0) + lane).to(tl.float32))


@triton.jit
def store_again(out, values):
    program = tl.program_id(0)
    tl.store(out + program, 1.0)
    tl.store(out + program, tl.load(out + program) + 1.0)


@triton.jit
def store_nothing(out, values):
    tl.store(out + tl.arange(0, 4), 1.0, tl.arange(0, 4) < 0)
