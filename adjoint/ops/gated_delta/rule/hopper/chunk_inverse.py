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
    """A float32 in two bfloat16 parts."""
    high = device.rounded_to(x, gl.bfloat16)
    return high, device.rest_of(x, high)


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
def _factors(lines, step: gl.constexpr, COLUMN: gl.constexpr):
    """Sixteen numbers of a line of every block, [row, block, 1], which all threads of its columns read."""
    READ: gl.constexpr = gl.BlockedLayout([2, 8, 1, 1], [1, 1, 2, 16], [1, 1, 4, 1], [3, 2, 1, 0])
    line = lines.slice(step, 1, dim=2).permute((0, 3, 1, 2)).load(READ)
    return gl.convert_layout(line.reshape([16, line.shape[2], 1]), COLUMN)


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


@gluon.constexpr_function
def units_of(scores, group):
    """Pairs of value heads that a program has: two, where a pair reads one tile of keys and nothing else."""
    return 1 if scores or group % 2 else 2


@kernel(budget=Budget(registers=255, shared_bytes=96 * 1024), targets=("sm_90",), numeric=("PARTS",))
@gluon.jit
def rule_chunk_inverse_hopper(
    q: Pointer16.element, k: Pointer16.element, gates: Pointer16.float32, chunk_indices: Pointer.int32,
    T: Pointer16.element, P: Pointer16.element, scale: Float32, q_token_stride: Int64x16, q_head_stride: Int64x16,
    k_token_stride: Int64x16, k_head_stride: Int64x16, first_unit: Int32, end_unit: Int32,
    HEADS: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr, PARTS: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """T − I of one or two units, pairs of value heads of a chunk, from `first_unit` to before `end_unit`.

    With SCORES also P = scale·(q kᵀ) ⊙ D, 0 above the diagonal.
    """
    HALF: gl.constexpr = CHUNK // 2
    QUARTER: gl.constexpr = CHUNK // 4
    UNITS: gl.constexpr = units_of(SCORES, GROUP)
    BLOCKS: gl.constexpr = 4 * UNITS
    kind: gl.constexpr = k.dtype.element_ty
    GRAM: gl.constexpr = device.product_layout(CHUNK)
    WIDE_ROWS: gl.constexpr = device.row_layout(K)
    TILE_32: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2)
    PARTS_OF: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    PARTS_OF_ALL: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [1, 0])
    SWIZZLED_ALL: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    COLUMN: gl.constexpr = gl.BlockedLayout([16, 1, 1], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, 2], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    ROWS: gl.constexpr = device.row_layout(CHUNK)
    OUT: gl.constexpr = device.row_layout(HALF)
    pairs: gl.constexpr = HEADS // 2
    keyed: gl.constexpr = 1 if GROUP % 2 == 0 else 2

    unit_0 = first_unit + gl.program_id(0) * UNITS
    unit_1 = gl.minimum(unit_0 + (UNITS - 1), end_unit - 1)
    count_0 = gl.load(chunk_indices + (unit_0 // pairs).to(gl.int64) * INDEX_WIDTH + INDEX_COUNT)
    count_1 = gl.load(chunk_indices + (unit_1 // pairs).to(gl.int64) * INDEX_WIDTH + INDEX_COUNT)
    if count_0 + count_1 == 0:
        return
    # Instead of a unit that is not there, or has no tokens, the other one is computed twice, and stored once.
    stored = (count_0 > 0, (count_1 > 0) & (unit_1 > unit_0))
    chosen = (gl.where(count_0 > 0, unit_0, unit_1), gl.where(count_1 > 0, unit_1, unit_0))
    counts = (gl.where(count_0 > 0, count_0, count_1), gl.where(count_1 > 0, count_1, count_0))

    row = gl.arange(0, CHUNK, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    k_offset = (row.to(gl.int64) * k_token_stride)[:, None] + column.to(gl.int64)[None, :]
    q_offset = (row.to(gl.int64) * q_token_stride)[:, None] + column.to(gl.int64)[None, :]
    # Each tile is allocated alone: between writes to one allocation there are barriers.
    keys = ()
    queries = ()
    lanes = ()
    for unit in gl.static_range(UNITS):
        slot = (chosen[unit] // pairs).to(gl.int64)
        head = (chosen[unit] % pairs) * 2
        lanes += (slot * HEADS + head,)
        inside = (row < counts[unit])[:, None] & (column < K)[None, :]
        first = gl.load(chunk_indices + slot * INDEX_WIDTH).to(gl.int64)
        for which in gl.static_range(keyed):
            key_head = ((head + which) // GROUP).to(gl.int64)
            tile = gl.allocate_shared_memory(kind, [CHUNK, K], TILE)
            start = k + (first * k_token_stride + key_head * k_head_stride)
            async_copy.async_copy_global_to_shared(tile, start + k_offset, mask=inside)
            keys += (tile,)
            if SCORES:
                tile = gl.allocate_shared_memory(kind, [CHUNK, K], TILE)
                start = q + (first * q_token_stride + key_head * q_head_stride)
                async_copy.async_copy_global_to_shared(tile, start + q_offset, mask=inside)
                queries += (tile,)
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
                seen = device.start_product(keys[which], queries[which].permute((1, 0)), nothing)
            decay = _decay(gates + (lanes[0] + which) * (GATE_ROWS * CHUNK), i, j)
            if which < keyed:
                seen = warpgroup_mma_wait(0, deps=[seen])
            if which == 0:
                scores = gl.allocate_shared_memory(kind, [2, CHUNK, CHUNK], TILE)
            score = gl.where(i[None, :] >= j[:, None], (seen * scale) * decay, 0.0)
            scores.index(which).permute((1, 0)).store(score.to(kind))
        row = gl.arange(0, CHUNK, gl.SliceLayout(1, ROWS))
        column = gl.arange(0, CHUNK, gl.SliceLayout(0, ROWS))
        offset = (row * CHUNK)[:, None] + column[None, :]
        P += lanes[0] * (CHUNK * CHUNK)
        gl.store(P + offset, scores.index(0).load(ROWS))
        gl.store(P + CHUNK * CHUNK + offset, scores.index(1).load(ROWS))
    if UNITS == 2:
        gram_0 = device.start_product(keys[0], keys[0].permute((1, 0)), nothing)
        gram_1 = device.start_product(keys[1], keys[1].permute((1, 0)), nothing)
        gram_0, gram_1 = warpgroup_mma_wait(0, deps=[gram_0, gram_1])
    # Line j of a block is its column of A: [i // 8, head and block, j, i % 8], so that no two threads of a warp meet in
    # a bank. Between the blocks [j, i], of each head alone.
    for which in gl.static_range(2 * UNITS):
        head_gates = gates + (lanes[which // 2] + which % 2) * (GATE_ROWS * CHUNK)
        if UNITS == 1 and which < keyed:
            gram = device.start_product(keys[which], keys[which].permute((1, 0)), nothing)
        decay = _decay(head_gates, i, j)
        if UNITS == 1 and which < keyed:
            gram = warpgroup_mma_wait(0, deps=[gram])
        if UNITS == 2:
            gram = gram_0 if which < 2 else gram_1
        if which == 0:
            lines = gl.allocate_shared_memory(gl.float32, [4, BLOCKS, HALF, 8], FLAT)
            betweens = ()
        near, beyond = _columns(gram, decay, head_gates, i, j)
        lines.slice(2 * which, 2, dim=1).permute((1, 2, 0, 3)).store(near.reshape([2, HALF, 4, 8]))
        between = gl.allocate_shared_memory(gl.float32, [2, HALF, HALF], SWIZZLED)
        between._reinterpret(gl.float32, [2, HALF, HALF], SWIZZLED_ALL).store(beyond)
        betweens += (between.index(0),)

    # The inverses of the blocks of size 32, without the quarter that is 0; quarters are [row, head and block, column].
    # A thread has a column of the left half and one of the right, with which it reads every factor once.
    row = gl.arange(0, QUARTER, gl.SliceLayout(1, gl.SliceLayout(2, COLUMN)))[:, None, None]
    column = gl.arange(0, QUARTER, gl.SliceLayout(0, gl.SliceLayout(1, COLUMN)))[None, None, :]
    empty = gl.zeros([QUARTER, BLOCKS, QUARTER], gl.float32, COLUMN)
    upper = empty + gl.where(row == column, 1.0, 0.0)
    lower = upper
    corner = empty
    for step in gl.static_range(HALF - 1):
        factor = _factors(lines.slice(2, 2), step, COLUMN)
        if step < QUARTER:
            pivot = _line(upper, row, step)
            corner = gl.fma(factor, pivot, corner)
            factor = _factors(lines.slice(0, 2), step, COLUMN)
            upper = gl.where(row > step, gl.fma(factor, pivot, upper), upper)
        else:
            pivot = _line(corner, row, step - QUARTER)
            corner = gl.where(row + QUARTER > step, gl.fma(factor, pivot, corner), corner)
            pivot = _line(lower, row, step - QUARTER)
            lower = gl.where(row + QUARTER > step, gl.fma(factor, pivot, lower), lower)
    # Their parts by columns, [part, head and block, column, row], where A was; the product between them is −T₁ (A T₀).
    parts = lines._reinterpret(gl.bfloat16, [2 * BLOCKS, HALF, HALF], PARTS_OF)
    columns = lines._reinterpret(gl.bfloat16, [2 * BLOCKS, HALF, HALF], PARTS_OF_ALL).permute((2, 0, 1))
    left = columns.slice(0, QUARTER, dim=2)
    right = columns.slice(QUARTER, QUARTER, dim=2)
    for part in gl.static_range(2):
        of_part = _split(upper)[part]
        left.slice(0, QUARTER).slice(part * BLOCKS, BLOCKS, dim=1).store(of_part)
        right.slice(0, QUARTER).slice(part * BLOCKS, BLOCKS, dim=1).store(gl.zeros_like(of_part))
        left.slice(QUARTER, QUARTER).slice(part * BLOCKS, BLOCKS, dim=1).store(_split(corner)[part])
        right.slice(QUARTER, QUARTER).slice(part * BLOCKS, BLOCKS, dim=1).store(_split(lower)[part])
    # Of all heads before any is stored, as there is a barrier between the reads of one and the writes of another.
    results = ()
    for which in gl.static_range(2 * UNITS):
        A = _split(betweens[which].permute((1, 0)).load(LEFT))
        high = parts.index(2 * which).permute((1, 0))
        low = parts.index(BLOCKS + 2 * which).permute((1, 0))
        results += (_split(_product(A, (high.load(RIGHT), low.load(RIGHT)), MMA)),)
    tiles = ()
    for which in gl.static_range(2 * UNITS):
        high_tile = gl.allocate_shared_memory(gl.bfloat16, [HALF, HALF], TILE_32)
        low_tile = gl.allocate_shared_memory(gl.bfloat16, [HALF, HALF], TILE_32)
        high, low = results[which]
        high_tile.store(high)
        low_tile.store(low)
        tiles += ((high_tile, low_tile),)
    results = ()
    for which in gl.static_range(2 * UNITS):
        high = parts.index(2 * which + 1).permute((1, 0))
        low = parts.index(BLOCKS + 2 * which + 1).permute((1, 0))
        x = (tiles[which][0].load(RIGHT), tiles[which][1].load(RIGHT))
        product = _product((high.load(LEFT), low.load(LEFT)), x, MMA)
        rounded = device.rounded_to(product, kind)
        results += ((rounded, device.rest_of(product, rounded)),)
    # T − I as it is stored: of each head the two blocks on the diagonal and the one between them, of each part.
    row = gl.arange(0, HALF, gl.SliceLayout(1, MMA))
    column = gl.arange(0, HALF, gl.SliceLayout(0, MMA))
    is_one = row[:, None] == column[None, :]
    row = gl.arange(0, HALF, gl.SliceLayout(1, OUT))
    column = gl.arange(0, HALF, gl.SliceLayout(0, OUT))
    offset = (row * CHUNK)[:, None] + column[None, :]
    for which in gl.static_range(2 * UNITS):
        outs = ()
        for _ in gl.static_range(3 * PARTS):
            outs += (gl.allocate_shared_memory(kind, [HALF, HALF], TILE_32),)
        rounded, rest = results[which]
        outs[2].store(rounded)
        if PARTS == 2:
            outs[5].store(rest)
        for block in gl.static_range(2):
            high = parts.index(2 * which + block).permute((1, 0)).load(MMA)
            if kind == gl.bfloat16:
                rounded = high
                if PARTS == 2:
                    outs[3 + block].store(parts.index(BLOCKS + 2 * which + block).permute((1, 0)).load(MMA))
            else:
                low = parts.index(BLOCKS + 2 * which + block).permute((1, 0)).load(MMA)
                value = high.to(gl.float32) + low.to(gl.float32)
                rounded = value.to(kind)
                if PARTS == 2:
                    outs[3 + block].store((value - rounded.to(gl.float32)).to(kind))
            outs[block].store(gl.where(is_one, gl.zeros_like(rounded), rounded))
        is_stored = (offset >= 0) & stored[which // 2]
        for part in gl.static_range(PARTS):
            out = T + ((lanes[which // 2] + which % 2) * PARTS + part) * (CHUNK * CHUNK) + offset
            gl.store(out, outs[3 * part].load(OUT), mask=is_stored)
            gl.store(out + (HALF * CHUNK + HALF), outs[3 * part + 1].load(OUT), mask=is_stored)
            gl.store(out + HALF * CHUNK, outs[3 * part + 2].load(OUT), mask=is_stored)
            gl.store(out + HALF, gl.zeros([HALF, HALF], kind, OUT), mask=is_stored)


def fits_pairs(shape: Shape) -> bool:
    """Whether this kernel takes a problem: pairs of value heads, 16-bit types, and K of 64 or 128."""
    return shape.element in (torch.bfloat16, torch.float16) and shape.K in (64, 128) and shape.heads % 2 == 0


def _bind(setup: Setup, shape: Shape, parts: int, scores: bool) -> Callable[..., None]:
    inverse = setup.kernel(
        rule_chunk_inverse_hopper, element=shape.element, HEADS=shape.heads, GROUP=shape.group, K=shape.K,
        PARTS=parts, SCORES=scores,
    )  # fmt: skip
    pairs = shape.heads // 2

    def launch(memory: Mapping[str, Any], q: TokenRows, k: TokenRows, scale: float, part: Part = WHOLE) -> None:
        first, end = (min(chunk, shape.chunks) * pairs for chunk in (part.first, part.first + part.chunks))
        if first == end:
            return
        grid = (-(-(end - first) // units_of(scores, shape.group)),)
        inverse.launch(
            grid, q=q.start, k=k.start, gates=memory["gates"], chunk_indices=memory["chunk_indices"], T=memory["T"],
            P=memory["P"] if scores else memory["T"], scale=scale, q_token_stride=q.token_stride,
            q_head_stride=q.head_stride, k_token_stride=k.token_stride, k_head_stride=k.head_stride,
            first_unit=first, end_unit=end,
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
