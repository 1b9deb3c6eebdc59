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

from adjoint.core.kernels import Float32, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, LINE, TILE, V_BLOCK
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.gates import GATE_FROM_START, GATE_ROWS, GATE_STRENGTH
from adjoint.ops.gated_delta.rule.triton.reverse_scan import ReverseScan, Upstream

Chunks = device.fields("qs ks dos Ws local_tiles strengths starts ring")
"""The chunks in shared memory, a stage each: q, k, do, W, Tᵀ Pᵀ do, β and e^G."""

Results = device.fields("Ys dSs handoff")
"""What a chunk leaves in shared memory: Yᵀ and dS⁺ᵀ."""


@gluon.jit
def _producer(
    q, k, do, W, local_gradients, gates, tiles, count, chunks,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr,
):  # fmt: skip
    """Copies a chunk as soon as there is room for it; rows past the end of a sequence are zeros."""
    W_rows = device.Rows.of(CHUNK, K, K)
    k_rows = device.Rows.of(CHUNK, K, K_STRIDE)
    q_rows = device.Rows.of(CHUNK, K, Q_STRIDE)
    local_rows = device.Rows.of(V_BLOCK, CHUNK, CHUNK)
    do_rows = device.Rows.of(CHUNK, V_BLOCK, DO_STRIDE)
    remaining = count - (chunks - 1) * CHUNK
    stage = 0
    phase = 1
    pending = 0
    for chunk in range(chunks):
        mbarrier.wait(tiles.ring.empty.index(stage), phase)
        W_rows.fetch(tiles.Ws.index(stage), W)
        q_rows.fetch_tokens(tiles.qs.index(stage), q, remaining)
        k_rows.fetch_tokens(tiles.ks.index(stage), k, remaining)
        do_rows.fetch_tokens(tiles.dos.index(stage), do, remaining)
        local_rows.fetch(tiles.local_tiles.index(stage), local_gradients)
        device.fetch_gates(tiles.strengths, stage, gates, GATE_STRENGTH)
        device.fetch_gates(tiles.starts, stage, gates, GATE_FROM_START)
        async_copy.commit_group()
        if chunk > 0:
            async_copy.wait_group(1)
            tiles.ring.fill(pending)
            pending = stage
        q -= CHUNK * Q_STRIDE
        k -= CHUNK * K_STRIDE
        do -= CHUNK * DO_STRIDE
        gates -= HEADS * (GATE_ROWS * CHUNK)
        W -= HEADS * (CHUNK * K)
        local_gradients -= HEADS * (V * CHUNK)
        remaining = CHUNK
        stage, phase = tiles.ring.after(stage, phase)
    async_copy.wait_group(0)
    if chunks > 0:
        tiles.ring.fill(pending)


@gluon.jit
def _store_results(Y, dstates, results, chunks, HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Takes Yᵀ and dS⁺ᵀ of every chunk out of shared memory."""
    of_Y = device.Rows.of(V_BLOCK, CHUNK, CHUNK).offset
    of_dS = device.Rows.of(V_BLOCK, K, K).offset
    phase = 0
    for _ in range(chunks):
        mbarrier.wait(results.handoff.staged, phase)
        dS_rows = results.dSs.load(device.row_layout(K))
        Y_rows = results.Ys.load(device.row_layout(CHUNK))
        device.thread_barrier()
        mbarrier.arrive(results.handoff.drained)
        gl.store(dstates + of_dS, dS_rows)
        gl.store(Y + of_Y, Y_rows)
        dstates -= HEADS * (V * K)
        Y -= HEADS * (V * CHUNK)
        phase ^= 1


@gluon.jit
def _consumer(
    dfinal_state, dinitial_state, state, tiles, results, chunks, scale,
    K: gl.constexpr, V: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """The products, from chunk to chunk."""
    kind: gl.constexpr = tiles.ks.dtype
    STATE: gl.constexpr = device.product_layout(K)
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    v_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, STATE)).to(gl.int64)
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE)).to(gl.int64)
    dS = gl.zeros([V_BLOCK, K], gl.float32, STATE)
    if FINAL:
        dS = gl.load(dfinal_state + state + v_row[:, None] + (k_column * V)[None, :])
    nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
    stage = 0
    phase = 0
    out_phase = 1
    for _ in range(chunks):
        rounded = device.rounded_to(dS, kind)
        rest = gl.convert_layout(device.rounded_to(dS - rounded.to(gl.float32), kind), BY_CHUNK)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        mbarrier.wait(tiles.ring.full.index(stage), phase)
        Y_tile = device.start_product(rest, tiles.Ws.index(stage).permute((1, 0)), nothing)
        Y_tile = warpgroup_mma(narrow, tiles.Ws.index(stage).permute((1, 0)), Y_tile, is_async=True)
        # Waits for nothing: without it the next product would be preceded by a wait for this one.
        dS = warpgroup_mma_wait(2, deps=[dS])
        from_start = tiles.starts.index(stage).load(COLUMNS)
        decay = tiles.starts.index(stage).slice(CHUNK - 1, 1).load(gl.SliceLayout(0, STATE))
        upstream = tiles.dos.index(stage).permute((1, 0)).load(VALUES).to(gl.float32) * (from_start * scale)[None, :]
        high = device.rounded_to(upstream, kind)
        low = gl.convert_layout(device.rounded_to(upstream - high.to(gl.float32), kind), BY_KEYS)
        high = gl.convert_layout(high, BY_KEYS)
        dS = warpgroup_mma(low, tiles.qs.index(stage), dS * decay[None, :], is_async=True)
        dS = warpgroup_mma(high, tiles.qs.index(stage), dS, is_async=True)
        local_tile = tiles.local_tiles.index(stage).load(VALUES).to(gl.float32)
        factor = tiles.strengths.index(stage).load(COLUMNS) * from_start
        mbarrier.wait(results.handoff.drained, out_phase)
        results.dSs.store(rounded)
        Y_tile = warpgroup_mma_wait(2, deps=[Y_tile])
        Y_tile += local_tile
        carried = gl.convert_layout((-(Y_tile * factor[None, :])).to(kind), BY_KEYS)
        dS = warpgroup_mma(carried, tiles.ks.index(stage), dS, is_async=True)
        results.Ys.store(Y_tile.to(kind))
        device.thread_barrier()
        mbarrier.arrive(results.handoff.staged)
        dS = warpgroup_mma_wait(0, deps=[dS])
        tiles.ring.release(stage)
        out_phase ^= 1
        stage, phase = tiles.ring.after(stage, phase)
    if INITIAL:
        # 0, and known after the loop alone: or the places would stay in registers through it.
        state += gl.minimum(stage, 0)
        gl.store(dinitial_state + state + v_row[:, None] + (k_column * V)[None, :], dS)


@kernel(budget=device.BUDGET, targets=("sm_90",), schedule=("STAGES",))
@gluon.jit
def rule_reverse_scan_hopper(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32, W: Pointer16.element,
    local_gradients: Pointer16.element, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    dfinal_state: Pointer.float32, dinitial_state: Pointer.float32, Y: Pointer16.element, dstates: Pointer16.element,
    scale: Float32,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one sequence and value head, for 64 columns of V and all of K; transposed.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. FINAL: whether there is a gradient of the final state.
    INITIAL: whether that of the initial state is needed.
    """
    blocks: gl.constexpr = V // V_BLOCK
    kind: gl.constexpr = k.dtype.element_ty

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
    tiles = Chunks(qs, ks, dos, Ws, local_tiles, strengths, starts, device.Ring.allocate(STAGES, 1, 1))
    results = Results(Ys, dSs, device.Handoff.allocate())
    gl.warp_specialize(
        [
            (_consumer, (dfinal_state, dinitial_state, state, tiles, results, chunks, scale, K, V, FINAL, INITIAL)),
            (_producer, (
                q, k, do, W, local_gradients, gates, tiles, count, chunks, HEADS, Q_STRIDE, K_STRIDE, DO_STRIDE, K, V,
            )),
            (_store_results, (Y, dstates, results, chunks, HEADS, K, V)),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[128, 96],
    )  # fmt: skip


def programs(shape: Shape) -> int:
    """Programs of a reverse scan."""
    return shape.sequences * shape.heads * (shape.V // V_BLOCK.value)


def bind_reverse_scan(setup: Setup, shape: Shape, *, final: bool, initial: bool) -> ReverseScan:
    """Y and dS⁺ of every chunk, and the initial states' gradient: `launch(memory, upstream, dinitial_state)`.

    Args:
        final: whether there is a gradient of the final states.
        initial: whether that of the initial states is needed.
    """
    scan = device.ByStrides(
        setup, shape, rule_reverse_scan_hopper, "Q K DO", HEADS=shape.heads,
        STAGES=setup.schedule["hopper_reverse_stages"], FINAL=final, INITIAL=initial,
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
