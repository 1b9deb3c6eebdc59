"""The state scan alone, without outputs, for Hopper: 64 columns of the state in a warpgroup, from chunk to chunk.

    predicted = Sᵀ kᵀ          beside it: gates and v are read
    v' = r + r T°ᵀ             beside it: S decays
    Sᵀ += w k                  one half of k after the other: beside the second, the first half of S is rounded

S is in the accumulators of the tensor cores, and rounded in registers their left operand, so that a warpgroup waits for
nothing but its own products. Another copies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, TILE, V_BLOCK
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS

HALF = gl.constexpr(64)
"""Columns of k, and rows of S, that have accumulators of their own."""

Chunks = device.fields("ks vs Ts gates ring")
"""The chunks in shared memory, a stage each: k, v, T and the gates."""


@gluon.jit
def allocate(kind: gl.constexpr, STAGES: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr, READS: gl.constexpr):
    """Shared memory for chunks with WIDTH columns of v, which so many warpgroups read."""
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    vs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, WIDTH], TILE)
    Ts = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    return Chunks(ks, vs, Ts, device.Gates.allocate(STAGES), device.Ring.allocate(STAGES, 1, READS))


@gluon.jit
def copy(
    k, v, T, gates, tiles, count, v_column, chunks,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Copies a chunk as soon as there is room for it; rows past `count` are zeros, and so are columns of v that are
    none of V, where `v_column` is the first."""
    k_rows = device.Rows.of(CHUNK, K, K_STRIDE)
    v_rows = device.Rows.of(CHUNK, tiles.vs.shape[2], V_STRIDE)
    T_rows = device.Rows.of(CHUNK, CHUNK, CHUNK)
    stage = 0
    phase = 1
    pending = 0
    for chunk in range(chunks):
        mbarrier.wait(tiles.ring.empty.index(stage), phase)
        k_rows.fetch_tokens(tiles.ks.index(stage), k, count)
        tiles.gates.fetch(stage, gates)
        column = v_column + v_rows.column
        inside = v_rows.inside(count) & ((column >= 0) & (column < V))[None, :]
        async_copy.async_copy_global_to_shared(tiles.vs.index(stage), v + v_rows.offset, mask=inside)
        T_rows.fetch(tiles.Ts.index(stage), T)
        async_copy.commit_group()
        if chunk > 0:
            async_copy.wait_group(1)
            tiles.ring.fill(pending)
            pending = stage
        k += CHUNK * K_STRIDE
        v += CHUNK * V_STRIDE
        T += HEADS * (CHUNK * CHUNK)
        gates += HEADS * (GATE_ROWS * CHUNK)
        count -= CHUNK
        stage, phase = tiles.ring.after(stage, phase)
    async_copy.wait_group(0)
    if chunks > 0:
        tiles.ring.fill(pending)


@gluon.jit
def rounded(x, kind: gl.constexpr):
    """float32 x in a 16-bit type, rounded here and nowhere else: compilers would put it off to where it is used."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=False, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=False, pack=2
        )


@gluon.jit
def advance(S, S_rest, narrow, narrow_rest, tiles, chunk, stage, phase, PART: gl.constexpr, K: gl.constexpr):
    """The state after a chunk, the first 64 of its rows and the rest, and both rounded; with 64 columns of v, the
    PARTth of the tile.

    The chunk before is released: all have waited for its last product.
    """
    kind: gl.constexpr = tiles.vs.dtype
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
    mbarrier.wait(tiles.ring.full.index(stage), phase)
    k_chunk = tiles.ks.index(stage)
    operand = narrow
    if K > HALF:
        operand = gl.reshape(gl.permute(gl.join(narrow, narrow_rest), (0, 2, 1)), [V_BLOCK, K])
    predicted = device.start_product(gl.convert_layout(operand, OPERAND), k_chunk.permute((1, 0)), nothing)
    if chunk > 0:
        tiles.ring.release(tiles.ring.before(stage))
    values = tiles.vs.index(stage).slice(PART * V_BLOCK, V_BLOCK, dim=1).permute((1, 0)).load(VALUES)
    strength = tiles.gates.strengths.index(stage).load(COLUMNS)
    from_start = tiles.gates.starts.index(stage).load(COLUMNS)
    to_end = tiles.gates.ends.index(stage).load(COLUMNS)
    decay = tiles.gates.starts.index(stage).slice(CHUNK - 1, 1).load(COLUMNS)
    fresh = strength[None, :] * values.to(gl.float32)
    old = strength * from_start
    predicted = warpgroup_mma_wait(0, deps=[predicted])
    residual = fresh - old[None, :] * predicted
    operand = gl.convert_layout(residual.to(kind), OPERAND)
    v_new = warpgroup_mma(operand, tiles.Ts.index(stage).permute((1, 0)), residual, is_async=True)
    S = S * decay[None, :]
    if K > HALF:
        S_rest = S_rest * decay[None, :]
    v_new = warpgroup_mma_wait(0, deps=[v_new])
    carried = gl.convert_layout((to_end[None, :] * v_new).to(kind), OPERAND)
    S = warpgroup_mma(carried, k_chunk.slice(0, HALF, dim=1), S, is_async=True)
    if K > HALF:
        S_rest = warpgroup_mma(carried, k_chunk.slice(HALF, HALF, dim=1), S_rest, is_async=True)
        S = warpgroup_mma_wait(1, deps=[S])
        narrow = rounded(S, kind)
        S_rest = warpgroup_mma_wait(0, deps=[S_rest])
        narrow_rest = rounded(S_rest, kind)
    else:
        S = warpgroup_mma_wait(0, deps=[S])
        narrow = rounded(S, kind)
    return S, S_rest, narrow, narrow_rest
