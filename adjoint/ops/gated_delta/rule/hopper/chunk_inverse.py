"""The inverse of each chunk's matrix for Hopper: what `rule_chunk_inverse` computes, two value heads a program.

With SCORES also what `rule_scores` does, in one part: both read k, and both need the decays within a chunk.

    k kᵀ, k qᵀ                   products of the warpgroup, in float32
    Aᵀ = (β ⊙ k kᵀ ⊙ D°)ᵀ        of both heads, into shared memory
    the inverses of size 32      by substitution, in float32: a warp for each of the four, a column a thread
    −T₁ (A₁₀ T₀)                 between them, as products of 16-bit parts
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma_wait

from adjoint.core.kernels import Budget, Float32, Int32, Int64x16, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup, run_concurrently
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, TILE, WHOLE, Part
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.chunk_inverse import bind_chunk_inverse, bind_scores
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS, GATE_STRENGTH


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _split(x):
    """A float32 in two bfloat16 parts. One instruction rounds two numbers, which x.to(...) does not give here."""
    high = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return high, (x - high.to(gl.float32)).to(gl.bfloat16)


@gluon.jit
def _product(a, b, MMA: gl.constexpr):
    """a·b of matrices in two parts, without what both second parts give."""
    a_high, a_low = a
    b_high, b_low = b
    small = mma_v2(a_low, b_high, gl.zeros([32, 32], gl.float32, MMA))
    small = mma_v2(a_high, b_low, small)
    return mma_v2(a_high, b_high, small)


@gluon.jit
def _line(T, row, i: gl.constexpr):
    """Row i of what a thread holds; its registers are known when it is compiled, so nothing is computed."""
    bits = gl.where(row == i, T.to(gl.int32, bitcast=True), 0)
    return gl.reduce(bits, 0, _either).to(gl.float32, bitcast=True)[None, :, :]


@gluon.jit
def _decay(gates, i, j):
    """e^{G_i − G_j}, of which only i ≥ j is used."""
    return device.exp(gl.load(gates + i)[None, :] - gl.load(gates + j)[:, None])


@gluon.jit
def _columns(gram, decay, gates, i, j):
    """Columns of −A, from k kᵀ: [block, column, row] of the blocks on its diagonal, and of what is right of row 31."""
    strength = -gl.load(gates + GATE_STRENGTH * CHUNK + i)[None, :]
    A = gl.where(i[None, :] > j[:, None], strength * (gram * decay), 0.0)
    first, second = gl.split(gl.permute(A.reshape([2, 32, 2, 32]), (0, 1, 3, 2)))
    half = gl.zeros_like(A).to(gl.int1) | (j < 32)[:, None]
    upper, _ = gl.split(gl.permute(half.reshape([2, 32, 2, 32]), (0, 1, 3, 2)))
    return gl.where(upper, first, second), second


@kernel(budget=Budget(registers=255, shared_bytes=96 * 1024), targets=("sm_90",), numeric=("PARTS",))
@gluon.jit
def rule_chunk_inverse_hopper(
    q: Pointer16.element, k: Pointer16.element, gates: Pointer16.float32, chunk_indices: Pointer.int32,
    T: Pointer16.element, P: Pointer16.element, scale: Float32, q_token_stride: Int64x16, q_head_stride: Int64x16,
    k_token_stride: Int64x16, k_head_stride: Int64x16, first_chunk: Int32,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """T − I of two value heads of a chunk, from `first_chunk` on; with SCORES also P = scale·(q kᵀ) ⊙ D, 0 above the
    diagonal."""
    HALF: gl.constexpr = CHUNK // 2
    kind: gl.constexpr = k.dtype.element_ty
    GRAM: gl.constexpr = device.product_layout(CHUNK)
    WIDE_ROWS: gl.constexpr = device.row_layout(K)
    TILE_32: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    PARTS_OF: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    PARTS_OF_ALL: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    SWIZZLED_ALL: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    COLUMN: gl.constexpr = gl.BlockedLayout([16, 1, 1], [1, 1, 32], [1, 4, 1], [0, 2, 1])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = device.row_layout(CHUNK)
    OUT: gl.constexpr = device.row_layout(HALF)
    pairs: gl.constexpr = HEADS // 2
    keyed: gl.constexpr = 1 if GROUP % 2 == 0 else 2

    slot = first_chunk + (gl.program_id(0) // pairs).to(gl.int64)
    head = (gl.program_id(0) % pairs) * 2
    count = gl.load(chunk_indices + slot * INDEX_WIDTH + INDEX_COUNT)
    if count == 0:
        return
    first = gl.load(chunk_indices + slot * INDEX_WIDTH).to(gl.int64)
    lane = slot * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (PARTS * CHUNK * CHUNK)
    P += lane * (CHUNK * CHUNK)

    keys = gl.allocate_shared_memory(kind, [keyed, CHUNK, K], TILE)
    queries = keys
    if SCORES:
        queries = gl.allocate_shared_memory(kind, [keyed, CHUNK, K], TILE)
    row = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    inside = (row < count)[:, None] & (column < K)[None, :]
    token = (first + row)[:, None]
    for which in gl.static_range(keyed):
        key_head = ((head + which) // GROUP).to(gl.int64)
        place = k + (token * k_token_stride + key_head * k_head_stride) + column.to(gl.int64)[None, :]
        async_copy.async_copy_global_to_shared(keys.index(which), place, mask=inside)
        if SCORES:
            place = q + (token * q_token_stride + key_head * q_head_stride) + column.to(gl.int64)[None, :]
            async_copy.async_copy_global_to_shared(queries.index(which), place, mask=inside)
    async_copy.commit_group()

    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, GRAM)
    # Everything is transposed: rows are the keys of a product, columns its queries.
    j = gl.arange(0, CHUNK, gl.SliceLayout(1, GRAM))
    i = gl.arange(0, CHUNK, gl.SliceLayout(0, GRAM))
    # Registers and shared memory decide how many programs an SM has, so nothing stays that can be had again: scores
    # before A, one head after the other, every result to shared memory at once. That is allocated when a product has
    # read its operands, and so has their place.
    async_copy.wait_group(0)
    fence_async_shared()
    if SCORES:
        for which in gl.static_range(2):
            if which < keyed:
                seen = device.start_product(keys.index(which), queries.index(which).permute((1, 0)), nothing)
            decay = _decay(gates + which * (GATE_ROWS * CHUNK), i, j)
            if which < keyed:
                seen = warpgroup_mma_wait(0, deps=[seen])
            if which == 0:
                scores = gl.allocate_shared_memory(kind, [2, CHUNK, CHUNK], TILE)
            score = gl.where(i[None, :] >= j[:, None], (seen * scale) * decay, 0.0)
            scores.index(which).permute((1, 0)).store(score.to(kind))
        row = gl.arange(0, CHUNK, gl.SliceLayout(1, ROWS))
        column = gl.arange(0, CHUNK, gl.SliceLayout(0, ROWS))
        offset = (row * CHUNK)[:, None] + column[None, :]
        gl.store(P + offset, scores.index(0).load(ROWS))
        gl.store(P + CHUNK * CHUNK + offset, scores.index(1).load(ROWS))
    # Row j of a block is its column of A: [j, head and block, i], and [j, head, i] between the blocks.
    for which in gl.static_range(2):
        head_gates = gates + which * (GATE_ROWS * CHUNK)
        if which < keyed:
            gram = device.start_product(keys.index(which), keys.index(which).permute((1, 0)), nothing)
        decay = _decay(head_gates, i, j)
        if which < keyed:
            gram = warpgroup_mma_wait(0, deps=[gram])
        if which == 0:
            on_diagonal = gl.allocate_shared_memory(gl.float32, [HALF, 4, HALF], FLAT)
            between = gl.allocate_shared_memory(gl.float32, [4, HALF, HALF], SWIZZLED)
            far = between._reinterpret(gl.float32, [2, 2, HALF, HALF], SWIZZLED_ALL)
        near, beyond = _columns(gram, decay, head_gates, i, j)
        on_diagonal.slice(2 * which, 2, dim=1).store(gl.permute(near, (1, 0, 2)))
        far.index(which).store(beyond)

    # The inverses of the blocks of size 32: [row, head and block, column]; a thread has a column.
    row = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(2, COLUMN)))[:, None, None]
    column = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    empty = gl.zeros([16, 4, HALF], gl.float32, COLUMN)
    upper = empty + gl.where(row == column, 1.0, 0.0)
    lower = empty + gl.where(row + 16 == column, 1.0, 0.0)
    lines = on_diagonal._reinterpret(gl.float32, [HALF, 4, HALF], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    for step in gl.static_range(HALF - 1):
        line = lines.index(step).permute((1, 0))
        if step < 16:
            pivot = _line(upper, row, step)
            factor = line.slice(0, 16).load(gl.SliceLayout(2, COLUMN))
            upper = gl.where(row > step, gl.fma(factor[:, :, None], pivot, upper), upper)
        else:
            pivot = _line(lower, row, step - 16)
        factor = line.slice(16, 16).load(gl.SliceLayout(2, COLUMN))
        lower = gl.where(row + 16 > step, gl.fma(factor[:, :, None], pivot, lower), lower)
    # Their parts by columns, [part, head and block, column, row], where A was; the product between them is −T₁ (A T₀).
    parts = on_diagonal._reinterpret(gl.bfloat16, [8, HALF, HALF], PARTS_OF)
    columns = on_diagonal._reinterpret(gl.bfloat16, [8, HALF, HALF], PARTS_OF_ALL).permute((2, 0, 1))
    high_columns = columns.slice(0, 4, dim=1)
    low_columns = columns.slice(4, 4, dim=1)
    high, low = _split(upper)
    high_columns.slice(0, 16).store(high)
    low_columns.slice(0, 16).store(low)
    high, low = _split(lower)
    high_columns.slice(16, 16).store(high)
    low_columns.slice(16, 16).store(low)
    x_highs = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, HALF], TILE_32)
    x_lows = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, HALF], TILE_32)
    for which in gl.static_range(2):
        A = _split(between.index(2 * which).permute((1, 0)).load(LEFT))
        high = parts.index(2 * which).permute((1, 0))
        low = parts.index(4 + 2 * which).permute((1, 0))
        high, low = _split(_product(A, (high.load(RIGHT), low.load(RIGHT)), MMA))
        x_highs.index(which).store(high)
        x_lows.index(which).store(low)
    # T − I as it is stored: of each head the two blocks on the diagonal and the one between them, of each part.
    row = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    column = gl.arange(0, HALF, gl.SliceLayout(0, MMA))
    is_one = row[:, None] == column[None, :]
    row = gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    column = gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    offset = (row * CHUNK)[:, None] + column[None, :]
    for which in gl.static_range(2):
        outs = gl.allocate_shared_memory(kind, [3 * PARTS, HALF, HALF], TILE_32)
        high = parts.index(2 * which + 1).permute((1, 0))
        low = parts.index(4 + 2 * which + 1).permute((1, 0))
        right = (x_highs.index(which).load(RIGHT), x_lows.index(which).load(RIGHT))
        corner = _product((high.load(LEFT), low.load(LEFT)), right, MMA)
        outs.index(2).store(corner.to(kind))
        if PARTS == 2:
            outs.index(5).store((corner - corner.to(kind).to(gl.float32)).to(kind))
        for block in gl.static_range(2):
            high = parts.index(2 * which + block).permute((1, 0)).load(MMA)
            if kind == gl.bfloat16:
                rounded = high
                if PARTS == 2:
                    outs.index(3 + block).store(parts.index(4 + 2 * which + block).permute((1, 0)).load(MMA))
            else:
                low = parts.index(4 + 2 * which + block).permute((1, 0)).load(MMA)
                value = high.to(gl.float32) + low.to(gl.float32)
                rounded = value.to(kind)
                if PARTS == 2:
                    outs.index(3 + block).store((value - rounded.to(gl.float32)).to(kind))
            outs.index(block).store(gl.where(is_one, gl.zeros_like(rounded), rounded))
        for part in gl.static_range(PARTS):
            out = T + (which * PARTS + part) * (CHUNK * CHUNK) + offset
            gl.store(out, outs.index(3 * part).load(OUT))
            gl.store(out + (HALF * CHUNK + HALF), outs.index(3 * part + 1).load(OUT))
            gl.store(out + HALF * CHUNK, outs.index(3 * part + 2).load(OUT))
            gl.store(out + HALF, gl.zeros([HALF, HALF], kind, OUT))


def fits_pairs(shape: Shape) -> bool:
    """Whether this kernel takes a problem: pairs of value heads, 16-bit types, and K of 64 or 128."""
    return shape.element in (torch.bfloat16, torch.float16) and shape.K in (64, 128) and shape.heads % 2 == 0


def _bind(setup: Setup, shape: Shape, parts: int, scores: bool) -> Callable[..., None]:
    inverse = setup.kernel(
        rule_chunk_inverse_hopper, element=shape.element, HEADS=shape.heads, GROUP=shape.group, K=shape.K,
        PARTS=parts, SCORES=scores,
    )  # fmt: skip

    def launch(memory: Mapping[str, Any], q: TokenRows, k: TokenRows, scale: float, part: Part = WHOLE) -> None:
        chunks = min(part.chunks, shape.chunks - part.first)
        if chunks <= 0:
            return
        inverse.launch(
            (chunks * (shape.heads // 2),), q=q.start, k=k.start, gates=memory["gates"],
            chunk_indices=memory["chunk_indices"], T=memory["T"], P=memory["P"] if scores else memory["T"], scale=scale,
            q_token_stride=q.token_stride, q_head_stride=q.head_stride, k_token_stride=k.token_stride,
            k_head_stride=k.head_stride, first_chunk=part.first,
        )  # fmt: skip

    return launch


def bind_inverse(setup: Setup, shape: Shape, parts: int) -> Callable[..., None]:
    """T − I of every chunk and value head: `launch(memory, k)`; by `rule_chunk_inverse` where this kernel cannot.

    Where it can, `launch(memory, k, part)` computes those of a part of a row that has one sequence.
    """
    if not fits_pairs(shape):
        return bind_chunk_inverse(setup, shape, parts)
    inverse = _bind(setup, shape, parts, scores=False)
    return lambda memory, k, part=WHOLE: inverse(memory, k, k, 1.0, part)


def bind_inverse_and_scores(
    setup: Setup, shape: Shape
) -> Callable[[Mapping[str, Any], TokenRows, TokenRows, float], None]:
    """T − I and P of every chunk and value head: `launch(memory, q, k, scale)`; one kernel, or two concurrently."""
    if fits_pairs(shape):
        return _bind(setup, shape, 1, scores=True)
    inverse, scores = bind_chunk_inverse(setup, shape, 1), bind_scores(setup, shape)

    def launch(memory: Mapping[str, Any], q: TokenRows, k: TokenRows, scale: float) -> None:
        run_concurrently(
            setup.device, lambda: inverse(memory, k), lambda: scores(memory, q, k, scale), worthwhile=shape.is_large
        )

    return launch
