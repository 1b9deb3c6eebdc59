"""The reverse scan for Hopper: what `rule_reverse_scan` computes of whole sequences.

A program scans 64 columns of V from the last chunk to the first, with three warpgroups. One copies W, q, k, do,
Tᵀ Pᵀ do and the gates of the chunks to come into shared memory; one has dSᵀ in the accumulators of the tensor cores,
and as their left operand too, rounded in registers; one takes Yᵀ and dS⁺ᵀ from shared memory to where they belong.
A warp that copies waits for what was copied before, and would keep the products waiting.

    dS⁺ᵀ Wᵀ                                 in two parts; beside them: dS⁺ᵀ goes to shared memory
    dSᵀ = e^Γ dS⁺ᵀ + (scale·e^G ⊙ do)ᵀ q    likewise; beside them: Y = W dS⁺ + Tᵀ Pᵀ do
    dSᵀ −= (β e^G ⊙ Y)ᵀ k                   beside it: Yᵀ goes to shared memory
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from adjoint.core.kernels import Budget, Float32, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta.rule.hopper.device import ByStrides, aggregate, arrive, rounded_to, thread_barrier
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.gates import GATE_FROM_START, GATE_ROWS, GATE_STRENGTH
from adjoint.ops.gated_delta.rule.triton.reverse_scan import ReverseScan, Upstream

V_BLOCK = 64
"""Columns of V of a program."""


@aggregate
class ChunkTiles:
    """The chunks in shared memory, a stage each: q, k, do, W, Tᵀ Pᵀ do, β and e^G."""

    qs: gl.shared_memory_descriptor
    ks: gl.shared_memory_descriptor
    dos: gl.shared_memory_descriptor
    Ws: gl.shared_memory_descriptor
    local_tiles: gl.shared_memory_descriptor
    strengths: gl.shared_memory_descriptor
    starts: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, qs, ks, dos, Ws, local_tiles, strengths, starts):
        self.qs = qs
        self.ks = ks
        self.dos = dos
        self.Ws = Ws
        self.local_tiles = local_tiles
        self.strengths = strengths
        self.starts = starts


@aggregate
class ReverseBarriers:
    """When a chunk's tiles are there and no longer read, and the same of Y and dS⁺ on their way out."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    staged: gl.shared_memory_descriptor
    drained: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty, staged, drained):
        self.full = full
        self.empty = empty
        self.staged = staged
        self.drained = drained


@gluon.jit
def _producer(
    q, k, do, W, local_gradients, gates, tiles, barriers, count, chunks,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies a chunk as soon as there is room for it; rows past the end of a sequence are zeros."""
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    GATES: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    # 64 bits throughout, so that what is constant in an address becomes part of the instruction.
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    of_W = (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    of_k = (row.to(gl.int64) * K_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    of_q = (row.to(gl.int64) * Q_STRIDE)[:, None] + column.to(gl.int64)[None, :]
    value = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    place = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    of_local = (value.to(gl.int64) * 64)[:, None] + place.to(gl.int64)[None, :]
    of_do = (value.to(gl.int64) * DO_STRIDE)[:, None] + place.to(gl.int64)[None, :]
    lane = gl.arange(0, 64, GATES)
    remaining = count - (chunks - 1) * 64
    stage = 0
    phase = 1
    pending = 0
    for chunk in range(chunks):
        mbarrier.wait(barriers.empty.index(stage), phase)
        inside = (row < remaining)[:, None] & (column < K)[None, :]
        async_copy.async_copy_global_to_shared(tiles.Ws.index(stage), W + of_W)
        async_copy.async_copy_global_to_shared(tiles.qs.index(stage), q + of_q, mask=inside)
        async_copy.async_copy_global_to_shared(tiles.ks.index(stage), k + of_k, mask=inside)
        inside = (value < remaining)[:, None] & (place < 64)[None, :]
        async_copy.async_copy_global_to_shared(tiles.dos.index(stage), do + of_do, mask=inside)
        async_copy.async_copy_global_to_shared(tiles.local_tiles.index(stage), local_gradients + of_local)
        async_copy.async_copy_global_to_shared(tiles.strengths.index(stage), gates + GATE_STRENGTH * 64 + lane)
        async_copy.async_copy_global_to_shared(tiles.starts.index(stage), gates + GATE_FROM_START * 64 + lane)
        async_copy.commit_group()
        if chunk > 0:
            async_copy.wait_group(1)
            arrive(barriers.full, pending)
            pending = stage
        q -= 64 * Q_STRIDE
        k -= 64 * K_STRIDE
        do -= 64 * DO_STRIDE
        gates -= HEADS * (GATE_ROWS * 64)
        W -= HEADS * (64 * K)
        local_gradients -= HEADS * (V * 64)
        remaining = 64
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    async_copy.wait_group(0)
    if chunks > 0:
        arrive(barriers.full, pending)


@gluon.jit
def _store_results(
    Y, dstates, Ys, dSs, barriers, chunks, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr
):  # fmt: skip
    """Takes Yᵀ and dS⁺ᵀ of every chunk out of shared memory."""
    WIDE_ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, ROWS))
    column = gl.arange(0, 64, gl.SliceLayout(0, ROWS))
    of_Y = (row.to(gl.int64) * 64)[:, None] + column.to(gl.int64)[None, :]
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE_ROWS))
    column = gl.arange(0, K, gl.SliceLayout(0, WIDE_ROWS))
    of_dS = (row.to(gl.int64) * K)[:, None] + column.to(gl.int64)[None, :]
    phase = 0
    for _ in range(chunks):
        mbarrier.wait(barriers.staged, phase)
        dS_rows = dSs.load(WIDE_ROWS)
        Y_rows = Ys.load(ROWS)
        thread_barrier()
        mbarrier.arrive(barriers.drained)
        gl.store(dstates + of_dS, dS_rows)
        gl.store(Y + of_Y, Y_rows)
        dstates -= HEADS * (V * K)
        Y -= HEADS * (V * 64)
        phase ^= 1


@gluon.jit
def _consumer(
    dfinal_state, dinitial_state, state, tiles, Ys, dSs, barriers, chunks, scale,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """The products, from chunk to chunk."""
    kind: gl.constexpr = tiles.ks.dtype
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, 64, gl.SliceLayout(1, STATE)).to(gl.int64)
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE)).to(gl.int64)
    dS = gl.zeros([64, K], gl.float32, STATE)
    if FINAL:
        dS = gl.load(dfinal_state + state + v_row[:, None] + (k_column * V)[None, :])
    nothing = gl.zeros([64, 64], gl.float32, VALUES)
    stage = 0
    phase = 0
    out_phase = 1
    for _ in range(chunks):
        rounded = rounded_to(dS, kind)
        rest = gl.convert_layout(rounded_to(dS - rounded.to(gl.float32), kind), BY_CHUNK)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        mbarrier.wait(barriers.full.index(stage), phase)
        Y_tile = warpgroup_mma(rest, tiles.Ws.index(stage).permute((1, 0)), nothing, use_acc=False, is_async=True)
        Y_tile = warpgroup_mma(narrow, tiles.Ws.index(stage).permute((1, 0)), Y_tile, is_async=True)
        # Waits for nothing: without it the next product would be preceded by a wait for this one.
        dS = warpgroup_mma_wait(2, deps=[dS])
        from_start = tiles.starts.index(stage).load(COLUMNS)
        decay = tiles.starts.index(stage).slice(63, 1).load(gl.SliceLayout(0, STATE))
        upstream = tiles.dos.index(stage).permute((1, 0)).load(VALUES).to(gl.float32) * (from_start * scale)[None, :]
        high = rounded_to(upstream, kind)
        low = gl.convert_layout(rounded_to(upstream - high.to(gl.float32), kind), BY_KEYS)
        high = gl.convert_layout(high, BY_KEYS)
        dS = warpgroup_mma(low, tiles.qs.index(stage), dS * decay[None, :], is_async=True)
        dS = warpgroup_mma(high, tiles.qs.index(stage), dS, is_async=True)
        local_tile = tiles.local_tiles.index(stage).load(VALUES).to(gl.float32)
        factor = tiles.strengths.index(stage).load(COLUMNS) * from_start
        mbarrier.wait(barriers.drained, out_phase)
        dSs.store(rounded)
        Y_tile = warpgroup_mma_wait(2, deps=[Y_tile])
        Y_tile += local_tile
        carried = gl.convert_layout((-(Y_tile * factor[None, :])).to(kind), BY_KEYS)
        dS = warpgroup_mma(carried, tiles.ks.index(stage), dS, is_async=True)
        Ys.store(Y_tile.to(kind))
        thread_barrier()
        mbarrier.arrive(barriers.staged)
        dS = warpgroup_mma_wait(0, deps=[dS])
        thread_barrier()
        mbarrier.arrive(barriers.empty.index(stage))
        out_phase ^= 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if INITIAL:
        # 0, and known after the loop alone: or the places would stay in registers through it.
        state += gl.minimum(stage, 0)
        gl.store(dinitial_state + state + v_row[:, None] + (k_column * V)[None, :], dS)


@kernel(budget=Budget(registers=255, shared_bytes=232448), targets=("sm_90",), schedule=("STAGES",))
@gluon.jit
def rule_reverse_scan_hopper(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32, W: Pointer16.element,
    local_gradients: Pointer16.element, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    dfinal_state: Pointer.float32,
    dinitial_state: Pointer.float32, Y: Pointer16.element, dstates: Pointer16.element, scale: Float32,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one sequence and value head, for 64 columns of V and all of K; transposed.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. FINAL: whether there is a gradient of the final state.
    INITIAL: whether that of the initial state is needed.
    """
    CHUNK: gl.constexpr = 64
    V_BLOCK: gl.constexpr = 64
    blocks: gl.constexpr = V // V_BLOCK
    kind: gl.constexpr = k.dtype.element_ty
    TILE: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    program = gl.program_id(0)
    sequence = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * V_BLOCK
    begin = gl.load(sequence_begins + sequence)
    count = gl.load(sequence_begins + sequence + 1) - begin
    chunks = (count + CHUNK - 1) // CHUNK
    last = gl.maximum(chunks - 1, 0)
    key_head = (head // GROUP).to(gl.int64)
    token = begin.to(gl.int64) + last * CHUNK
    q += token * Q_STRIDE + key_head * Q_HEAD
    k += token * K_STRIDE + key_head * K_HEAD
    do += token * DO_STRIDE + head.to(gl.int64) * DO_HEAD + first_row
    lane = (gl.load(first_chunks + sequence) + last).to(gl.int64) * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    W += lane * (CHUNK * K)
    local_gradients += lane * (V * CHUNK) + first_row * CHUNK
    Y += lane * (V * CHUNK) + first_row * CHUNK
    dstates += lane * (V * K) + first_row * K
    state = (sequence * HEADS + head) * (K * V) + first_row

    Ws = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    dos = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V_BLOCK], TILE)
    local_tiles = gl.allocate_shared_memory(kind, [STAGES, V_BLOCK, CHUNK], TILE)
    strengths = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    starts = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    dSs = gl.allocate_shared_memory(kind, [V_BLOCK, K], TILE)
    Ys = gl.allocate_shared_memory(kind, [V_BLOCK, CHUNK], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    drained = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(staged, count=1)
    mbarrier.init(drained, count=1)
    tiles = ChunkTiles(qs, ks, dos, Ws, local_tiles, strengths, starts)
    barriers = ReverseBarriers(full, empty, staged, drained)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    dfinal_state, dinitial_state, state, tiles, Ys, dSs, barriers, chunks, scale, K, V, STAGES, FINAL,
                    INITIAL,
                ),
            ),
            (
                _producer,
                (
                    q, k, do, W, local_gradients, gates, tiles, barriers, count, chunks,
                    HEADS, Q_STRIDE, K_STRIDE, DO_STRIDE, K, V, STAGES,
                ),
            ),
            (_store_results, (Y, dstates, Ys, dSs, barriers, chunks, HEADS, K, V)),
        ],
        [4, 4],
        [128, 96],
    )  # fmt: skip


def programs(shape: Shape) -> int:
    """Programs of a reverse scan."""
    return shape.sequences * shape.heads * (shape.V // V_BLOCK)


def bind_reverse_scan(setup: Setup, shape: Shape, *, final: bool, initial: bool) -> ReverseScan:
    """Y and dS⁺ of every chunk, and the initial states' gradient: `launch(memory, upstream, dinitial_state)`.

    Args:
        final: whether there is a gradient of the final states.
        initial: whether that of the initial states is needed.
    """
    scan = ByStrides(
        setup, shape, rule_reverse_scan_hopper, "Q K DO", element=shape.element, HEADS=shape.heads, GROUP=shape.group,
        K=shape.K, V=shape.V, STAGES=setup.schedule["hopper_reverse_stages"], FINAL=final, INITIAL=initial,
    )  # fmt: skip
    grid = (programs(shape),)

    def launch(memory: Mapping[str, Any], upstream: Upstream, dinitial_state: Tensor | None) -> None:
        q, k, do, dfinal_state, scale = upstream
        assert do is not None  # or the plan refused
        absent = memory["gates"]  # stands for a pointer that no variant reads
        scan.of(q, k, do).launch(
            grid, q=q.start, k=k.start, do=do.start, gates=memory["gates"], W=memory["W"],
            local_gradients=memory["local_gradients"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], dfinal_state=absent if dfinal_state is None else dfinal_state,
            dinitial_state=absent if dinitial_state is None else dinitial_state, Y=memory["Y"],
            dstates=memory["dstates"], scale=scale,
        )  # fmt: skip

    return launch
