"""The outputs of chunks, o = scale·(e^G ⊙ (q S) + (q kᵀ ⊙ D) v'), from what the state scan leaves of each."""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.kernels import NVIDIA, Budget, Float32, Int32, Int64x16, Pointer, Pointer16, PointerIf16, kernel
from adjoint.core.launch import Setup, is_aligned
from adjoint.core.workspace import Memory
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows, clamp_tile, next_power_of_two, pad_to_16
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import fits
from adjoint.ops.gated_delta.rule.triton.gates import GATE_FROM_START, GATE_LOW, GATE_ROWS


@kernel(
    budget=Budget(registers=255, shared_bytes=232448), targets=NVIDIA,
    numeric={"output_step": "K_STEP", "precision": "PRECISION"}, schedule=("V_BLOCK",),
)  # fmt: skip
@triton.jit
def rule_output(
    q: Pointer16.element, k: Pointer16.element, gates: Pointer16.float32, chunk_indices: Pointer.int32,
    states: Pointer16.element, new_values: Pointer16.element, out: PointerIf16.element, key_heads: Int32,
    scale: Float32, q_token_stride: Int64x16, q_head_stride: Int64x16, k_token_stride: Int64x16,
    k_head_stride: Int64x16,
    GROUP: tl.constexpr, K: tl.constexpr, V: tl.constexpr, V_SIZE: tl.constexpr, K_BLOCK: tl.constexpr,
    K_STEP: tl.constexpr, V_BLOCK: tl.constexpr, WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o of one chunk and the value heads of a key head, for V_BLOCK columns; where K_STEP is less than a row, products
    over K are added up in steps: float32 operands take too many registers."""
    CHUNK: tl.constexpr = 64
    blocks: tl.constexpr = (V + V_BLOCK - 1) // V_BLOCK
    program = tl.program_id(0)
    slot = (program // (key_heads * blocks)).to(tl.int64)
    key_head = (program // blocks) % key_heads
    count = tl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if count == 0:
        return
    first = tl.load(chunk_indices + slot * INDEX_WIDTH).to(tl.int64)
    heads = key_heads * GROUP
    row = tl.arange(0, CHUNK)
    k_column = tl.arange(0, K_BLOCK)
    v_column = (program % blocks) * V_BLOCK + tl.arange(0, V_BLOCK)
    kind = q.dtype.element_ty
    in_keys = fits(k_column, K, K_BLOCK)
    in_values = fits(v_column, V, V_BLOCK)
    inside = (row < count)[:, None] & in_keys[None, :]
    q += first * q_token_stride + key_head.to(tl.int64) * q_head_stride
    k += first * k_token_stride + key_head.to(tl.int64) * k_head_stride
    q_offset = row[:, None] * q_token_stride.to(tl.int32)
    k_offset = row[:, None] * k_token_stride.to(tl.int32)
    if K_STEP == K_BLOCK:
        queries = tl.load(q + q_offset + k_column[None, :], inside, other=0)
        keys = tl.load(k + k_offset + k_column[None, :], inside, other=0)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    else:
        scores = tl.zeros([CHUNK, CHUNK], tl.float32)
        for step in range(0, K_BLOCK, K_STEP):
            column = step + tl.arange(0, K_STEP)[None, :]
            here = (row < count)[:, None] & (column < K)
            queries = tl.load(q + q_offset + column, here, other=0)
            keys = tl.load(k + k_offset + column, here, other=0)
            scores += tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    past = row[:, None] >= row[None, :]
    lane = slot * heads + key_head * GROUP
    gates += lane * (GATE_ROWS * CHUNK)
    states += lane * (V * K)
    new_values += lane * (V * CHUNK)
    out += (first * heads + key_head * GROUP) * V_SIZE
    states_offset = v_column[:, None] * K + k_column[None, :]
    new_offset = v_column[:, None] * CHUNK + row[None, :]
    out_offset = row[:, None] * (heads * V_SIZE) + v_column[None, :]
    for _ in range(GROUP):
        values = tl.load(new_values + new_offset, in_values[:, None] & tl.full([1, CHUNK], 1, tl.int1), other=0)
        G = tl.load(gates + row)
        from_start = tl.load(gates + GATE_FROM_START * CHUNK + row)
        between = G[:, None] - G[None, :]
        if WIDE:
            low = tl.load(gates + GATE_LOW * CHUNK + row)
            between += low[:, None] - low[None, :]
        decayed = scores * tl.where(past, tl.exp(tl.where(past, between, 0.0)), 0.0)
        rounded = decayed.to(kind)
        if K_STEP == K_BLOCK:
            state = tl.load(states + states_offset, in_values[:, None] & in_keys[None, :], other=0)
            seen = tl.dot(queries, tl.trans(state), input_precision=PRECISION)
        else:
            seen = tl.zeros([CHUNK, V_BLOCK], tl.float32)
            for step in range(0, K_BLOCK, K_STEP):
                column = step + tl.arange(0, K_STEP)[None, :]
                queries = tl.load(q + q_offset + column, (row < count)[:, None] & (column < K), other=0)
                state_place = states + v_column[:, None] * K + column
                state = tl.load(state_place, in_values[:, None] & (column < K), other=0)
                seen += tl.dot(queries, tl.trans(state), input_precision=PRECISION)
        seen *= from_start[:, None]
        total = tl.dot(rounded, tl.trans(values), seen, input_precision=PRECISION)
        if not WIDE:  # scores in two parts: with nearly equal keys their rounding is most of the error
            low_scores = (decayed - rounded.to(tl.float32)).to(kind)
            total += tl.dot(low_scores, tl.trans(values), input_precision=PRECISION)
        total *= scale
        tl.store(out + out_offset, total.to(kind), (row < count)[:, None] & fits(v_column, V_SIZE, V_BLOCK)[None, :])
        gates += GATE_ROWS * CHUNK
        states += V * K
        new_values += V * CHUNK
        out += V_SIZE


def bind_output(setup: Setup, shape: Shape) -> Callable[..., None]:
    """o of the tokens of all sequences: `launch(memory, q, k, scale, out)`; `out` is contiguous."""
    schedule = setup.schedule
    block, keys = clamp_tile(schedule["output_block"], shape.V), next_power_of_two(shape.K)
    output = setup.either(
        rule_output, element=shape.element, V_SIZE=shape.V, K_BLOCK=keys,
        K_STEP=min(keys, 32) if shape.is_float32 else keys, V_BLOCK=block, WIDE=shape.is_float32,
        PRECISION="ieee", num_warps=schedule["output_warps"], num_stages=schedule["output_stages"], **shape.constants,
    )  # fmt: skip
    grid = (shape.chunks * shape.key_heads * -(-pad_to_16(shape.V) // block),)

    def launch(memory: Memory, q: TokenRows, k: TokenRows, scale: float, out: Tensor) -> None:
        output[is_aligned(out)].launch(
            grid, q=q.start, k=k.start, gates=memory["gates"], chunk_indices=memory["chunk_indices"],
            states=memory["states"], new_values=memory["new_values"], out=out, key_heads=shape.key_heads, scale=scale,
            q_token_stride=q.token_stride, q_head_stride=q.head_stride, k_token_stride=k.token_stride,
            k_head_stride=k.head_stride,
        )  # fmt: skip

    return launch
