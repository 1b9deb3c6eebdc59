"""Triton kernels after the gradients of tokens: those of g and β from their parts, those of q and k through norms.

Notation and layouts of `rule_backward_kernels.py`.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget


@triton.jit
def rule_gate_gradients(
    gates, places, parts, kept, passing, besides, dg, dbeta, heads,
    K_BLOCKS: tl.constexpr, UPSTREAM: tl.constexpr, NEED_G: tl.constexpr, NEED_BETA: tl.constexpr,
):  # fmt: skip
    """dg and dβ of one chunk and head."""
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    slot = (program // heads).to(tl.int64)
    rows = tl.load(places + slot * 4 + 1)
    if rows == 0:
        return
    at = tl.load(places + slot * 4).to(tl.int64)
    token = tl.arange(0, CHUNK)
    place = at * heads + program % heads + token * heads
    lane = program.to(tl.int64)
    parts += lane * (K_BLOCKS * 3 * CHUNK) + token
    gates += lane * (5 * CHUNK)
    since_query = tl.zeros([CHUNK], tl.float32)
    of_key = tl.zeros([CHUNK], tl.float32)
    until = tl.zeros([CHUNK], tl.float32)
    whole = tl.zeros([], tl.float32)
    for block in tl.static_range(K_BLOCKS):
        own = parts + block * (3 * CHUNK)
        if UPSTREAM:
            since_query += tl.load(own)
        of_key += tl.load(own + CHUNK)
        until += tl.load(own + (2 * CHUNK - 1), token > 0, other=0)  # of the token before
        whole += tl.load(kept + lane * K_BLOCKS + block)
    if NEED_BETA:
        found = tl.load(besides + lane * CHUNK + token) - of_key
        tl.store(dbeta + place, found.to(dbeta.dtype.element_ty), token < rows)
    if NEED_G:
        strength = tl.load(gates + 2 * CHUNK + token)
        found = tl.load(passing + lane * CHUNK + token) + tl.cumsum(since_query - strength * of_key, reverse=True)
        found += tl.cumsum(until) + whole * tl.load(gates + 4 * CHUNK - 1)
        tl.store(dg + place, found.to(dg.dtype.element_ty), token < rows)


@triton.jit
def rule_unnormalize(
    x, factors, gradient, out, rows,
    SIZE: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient through a norm for whole rows, [rows, SIZE] in float32, which the kernel before had in blocks."""
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (column < SIZE)
    wide = tl.load(x + row * PADDED + column, inside, other=0).to(tl.float32)
    dy = tl.load(gradient + row * SIZE + column, inside, other=0)
    factor = tl.load(factors + row, row < rows, other=0)
    along = tl.sum(wide * dy, 1)
    tl.store(out + row * SIZE + column, ((dy - wide * along[:, None]) * factor).to(out.dtype.element_ty), inside)


KERNELS = (
    kernels.register(rule_unnormalize, budget=Budget(registers=168, shared_bytes=16384), targets=kernels.NVIDIA),
    kernels.register(rule_gate_gradients, budget=Budget(registers=128, shared_bytes=16384), targets=kernels.NVIDIA),
)
