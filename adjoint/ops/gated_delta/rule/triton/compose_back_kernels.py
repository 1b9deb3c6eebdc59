"""The Triton kernel that takes the gradient of the state from segment to segment of a sequence, last to first.

Few heads would leave most of a card idle on the way back from chunk to chunk, so the segments of a long sequence are
walked at once. What a segment makes of a state is M S + B, so what it makes of the gradient dS of the state it ends
with is Mᵀ dS + B', by the M of the forward:

    walk           M of every segment but the first and the last of a sequence
    walk_back      B' of every segment but the first: back from 0, the last from the gradient of the final state
    compose_back   Mᵀ dS + B', the gradient of the state that every segment but the first begins with
    walk_back      every segment from the gradient that the one after it begins with: Y and dS⁺ of all chunks

Segments have BACK tokens, more than those between saved states: this kernel goes through them one after the other. A
sequence of up to WHOLE tokens is walked in one, by programs that have fewer columns of V.
"""

import triton
import triton.language as tl

from adjoint.core import kernels
from adjoint.core.kernels import Budget


@triton.jit
def rule_compose_back(
    transitions, begins, dstarts, heads,
    K: tl.constexpr, V: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, BACK: tl.constexpr,
    WHOLE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the state at the start of every segment but the first, in float32; one program per sequence, head
    and block of V, which V is a multiple of.

    `transitions` has Mᵀ, [places, H, K, K]; `dstarts` B', and then the result in its place, transposed,
    [places, H, V, K]: that of the last segment is complete as it is.
    """
    blocks: tl.constexpr = V // V_BLOCK
    program = tl.program_id(0)
    sequence = (program // (heads * blocks)).to(tl.int64)
    head = (program // blocks) % heads
    begin = tl.load(begins + sequence)
    count = tl.load(begins + sequence + 1) - begin
    if count <= WHOLE:
        return
    segments = tl.cdiv(count, BACK)
    v_row = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    k_column = tl.arange(0, K_BLOCK)
    in_keys = (k_column < K)[None, :]
    in_M = (k_column < K)[:, None] & in_keys
    last = (begin // BACK + segments).to(tl.int64) - 2
    transitions += ((last - 1) * heads + head) * (K * K)
    dstarts += (last * heads + head) * (V * K)
    M_offset = k_column[:, None] * K + k_column[None, :]
    offset = v_row[:, None] * K + k_column[None, :]
    dS = tl.load(dstarts + offset, in_keys, other=0.0)
    for _ in tl.range(0, segments - 2, num_stages=STAGES):
        dstarts -= heads * (V * K)
        M_turned = tl.load(transitions + M_offset, in_M, other=0.0)
        own = tl.load(dstarts + offset, in_keys, other=0.0)
        dS = tl.dot(dS, tl.trans(M_turned), own, input_precision=PRECISION)
        tl.store(dstarts + offset, dS, in_keys)
        transitions -= heads * (K * K)


KERNELS = (
    kernels.register(rule_compose_back, budget=Budget(registers=255, shared_bytes=232448), targets=kernels.NVIDIA),
)
