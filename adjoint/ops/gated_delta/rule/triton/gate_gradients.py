"""The gradients of g and β, from the sums that the gradients of tokens leave."""

from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Budget, Int32, Pointer, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta.arguments import NEED_BETA, NEED_G
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_DECAY, GATE_ROWS, GATE_STRENGTH
from adjoint.ops.gated_delta.rule.triton.gradients import GATE_SUMS, SUM_KEYS, SUM_KEYS_TO_END, key_blocks


@kernel(budget=Budget(registers=128, shared_bytes=16384), targets=NVIDIA)
@triton.jit
def rule_gate_gradients(
    gates: Pointer.float32, chunk_indices: Pointer.int32, gate_sums: Pointer.float32, state_products: Pointer.float32,
    passing_sums: Pointer.float32, strength_sums: Pointer.float32, dg: Pointer.gate, dbeta: Pointer.strength,
    heads: Int32,
    K_BLOCKS: tl.constexpr, UPSTREAM: tl.constexpr, NEED_G: tl.constexpr, NEED_BETA: tl.constexpr,
):  # fmt: skip
    """dg and dβ of one chunk and head."""
    CHUNK: tl.constexpr = 64
    program = tl.program_id(0)
    slot = (program // heads).to(tl.int64)
    rows = tl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if rows == 0:
        return
    first_token = tl.load(chunk_indices + slot * INDEX_WIDTH).to(tl.int64)
    token = tl.arange(0, CHUNK)
    place = first_token * heads + program % heads + token * heads
    lane = program.to(tl.int64)
    gate_sums += lane * (K_BLOCKS * GATE_SUMS * CHUNK) + token
    gates += lane * (GATE_ROWS * CHUNK)
    since_query = tl.zeros([CHUNK], tl.float32)
    of_key = tl.zeros([CHUNK], tl.float32)
    until = tl.zeros([CHUNK], tl.float32)
    through_state = tl.zeros([], tl.float32)
    for block in tl.static_range(K_BLOCKS):
        block_sums = gate_sums + block * (GATE_SUMS * CHUNK)
        if UPSTREAM:
            since_query += tl.load(block_sums)
        of_key += tl.load(block_sums + SUM_KEYS * CHUNK)
        until += tl.load(block_sums + (SUM_KEYS_TO_END * CHUNK - 1), token > 0, other=0)  # of the token before
        through_state += tl.load(state_products + lane * K_BLOCKS + block)
    if NEED_BETA:
        gradient = tl.load(strength_sums + lane * CHUNK + token) - of_key
        tl.store(dbeta + place, gradient.to(dbeta.dtype.element_ty), token < rows)
    if NEED_G:
        strength = tl.load(gates + GATE_STRENGTH * CHUNK + token)
        gradient = tl.load(passing_sums + lane * CHUNK + token) + tl.cumsum(
            since_query - strength * of_key, reverse=True
        )
        gradient += tl.cumsum(until) + through_state * tl.load(gates + GATE_DECAY)
        tl.store(dg + place, gradient.to(dg.dtype.element_ty), token < rows)


def bind_gate_gradients(
    setup: Setup, shape: Shape, upstream: bool, need: int
) -> Callable[[Mapping[str, Any], Tensor, Tensor], None]:
    """dg and dβ, as needed: `launch(memory, dg, dbeta)`."""
    gates = setup.kernel(
        rule_gate_gradients, gate=shape.gate, strength=shape.strength, K_BLOCKS=key_blocks(shape), UPSTREAM=upstream,
        NEED_G=bool(need & NEED_G), NEED_BETA=bool(need & NEED_BETA), num_warps=2,
    )  # fmt: skip
    grid = (shape.lanes,)

    def launch(memory: Mapping[str, Any], dg: Tensor, dbeta: Tensor) -> None:
        gates.launch(
            grid, gates=memory["gates"], chunk_indices=memory["chunk_indices"], gate_sums=memory["gate_sums"],
            state_products=memory["state_products"], passing_sums=memory["passing_sums"],
            strength_sums=memory["strength_sums"], dg=dg, dbeta=dbeta, heads=shape.heads,
        )  # fmt: skip

    return launch
