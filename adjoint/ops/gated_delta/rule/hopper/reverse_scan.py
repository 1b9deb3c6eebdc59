"""The reverse scan for Hopper: the gradient of the state from chunk to chunk, last to first, from q, k, do and T alone.

A program scans 64 columns of V of a sequence or segment, with three warpgroups. One copies the chunks to come into
shared memory, and takes Yᵀ and dS⁺ᵀ from there to where they belong. One computes of the next chunk what dS has no part
in: Pᵀ do, P = scale·(q kᵀ ⊙ D) in two parts, and scale·e^G ⊙ do in two parts. One has dSᵀ in the accumulators of the
tensor cores, and as their left operand too, rounded in registers:

    dS⁺ᵀ kᵀ                                in two parts; beside them: the second is rounded; dS⁺ᵀ goes to shared memory
    dSᵀ = e^Γ dS⁺ᵀ + (scale·e^G ⊙ do)ᵀ q   the second part; beside it: R = e^{Γ−G} ⊙ (k dS⁺) + Pᵀ do, in two parts
    Yᵀ = Rᵀ + Rᵀ T°                        three products of parts
    dSᵀ += (scale·e^G ⊙ do)ᵀ q             the first part; beside it: Y is scaled
    dSᵀ −= (β e^G ⊙ Y)ᵀ k                  beside it: Yᵀ goes to shared memory

R has two parts because T° of nearly equal keys takes differences of its rows.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from adjoint.core.kernels import Float32, Int32, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule import shape as sizes
from adjoint.ops.gated_delta.rule.hopper import device
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, GATE_SUM, LINE, TILE, V_BLOCK, WHOLE, Part
from adjoint.ops.gated_delta.rule.shape import Shape
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_COUNT, INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS
from adjoint.ops.gated_delta.rule.triton.reverse_scan import ReverseScan, Upstream

Chunks = device.fields("qs ks dos highs lows sums gates ring")
"""The chunks in shared memory, a stage each: q, k, do, both parts of T, G and the other gates."""

Local = device.fields("products rests staged")
"""Pᵀ do of a chunk in shared memory, and what scale·e^G ⊙ do loses where do is; that itself is where do was."""

Results = device.fields("Ys dSs handoff")
"""What a chunk leaves in shared memory: Yᵀ and dS⁺ᵀ. When they are there, Pᵀ do of the chunk has been read."""

SLICE = gl.constexpr(32)
"""Columns of dSᵀ whose second part is rounded before their product, and beside the product of those before."""

BY_SLICE = gl.constexpr(gl.DotOperandLayout(0, device.product_layout(SLICE), 2))

WIDE_TILE = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 16], [2, 8], [4, 16], [8, 0], [16, 0], [32, 0]]
    )
)
"""A matrix of float32 that accumulators are written to without conflicts, and read from transposed without any: the
columns of a row are exchanged by its second bit, and by the first and third together."""


@gluon.jit
def _mover(
    q, k, do, T, gates, Y, dstates, tiles, results, count, chunks,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, TRANSITION: gl.constexpr,
):  # fmt: skip
    """Takes Yᵀ and dS⁺ᵀ of a chunk out of shared memory, and copies another into the room the chunk leaves.

    Rows past the end of a sequence are zeros.
    """
    of_Y = device.Rows.of(V_BLOCK, CHUNK, CHUNK).offset
    of_dS = device.Rows.of(V_BLOCK, K, K).offset
    remaining = count - (chunks - 1) * CHUNK
    stage = 0
    stage_phase = 1
    phase = 0
    for step in range(chunks + (0 if TRANSITION else STAGES)):
        if not TRANSITION:  # noqa: SIM102  (a constant, and what only the GPU knows)
            if step >= STAGES:
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
        if step < chunks:
            mbarrier.wait(tiles.ring.empty.index(stage), stage_phase)
            device.fetch_tokens(tiles.ks.index(stage), k, K_STRIDE, remaining)
            device.fetch_tokens(tiles.qs.index(stage), q, Q_STRIDE, remaining)
            device.fetch_tokens(tiles.dos.index(stage), do, DO_STRIDE, remaining)
            device.fetch_gates(tiles.sums, stage, gates, GATE_SUM)
            tiles.gates.fetch(stage, gates)
            T_rows = device.Rows.of(CHUNK, CHUNK, CHUNK)
            T_rows.fetch(tiles.highs.index(stage), T)
            T_rows.fetch(tiles.lows.index(stage), T + CHUNK * CHUNK)
            async_copy.mbarrier_arrive(tiles.ring.full.index(stage), increment_count=False)
            q -= CHUNK * Q_STRIDE
            k -= CHUNK * K_STRIDE
            do -= CHUNK * DO_STRIDE
            T -= HEADS * (2 * CHUNK * CHUNK)
            gates -= HEADS * (GATE_ROWS * CHUNK)
            remaining = CHUNK
            stage, stage_phase = tiles.ring.after(stage, stage_phase)
    async_copy.wait_group(0)


@gluon.jit
def _local_gradients(tiles, local, results, chunks, scale):
    """Pᵀ do of every chunk, and scale·e^G ⊙ do in two parts, of which the first takes the place of do."""
    kind: gl.constexpr = tiles.ks.dtype
    SCORES: gl.constexpr = device.product_layout(CHUNK)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    ROWS: gl.constexpr = device.row_layout(V_BLOCK)
    # Everything is transposed: rows are keys, columns queries.
    j = gl.arange(0, CHUNK, gl.SliceLayout(1, SCORES))
    i = gl.arange(0, CHUNK, gl.SliceLayout(0, SCORES))
    nothing = gl.zeros([CHUNK, CHUNK], gl.float32, SCORES)
    stage = 0
    phase = 0
    out_phase = 1
    for _ in range(chunks):
        mbarrier.wait(tiles.ring.full.index(stage), phase)
        fence_async_shared()
        dos = tiles.dos.index(stage)
        scores = device.start_product(tiles.ks.index(stage), tiles.qs.index(stage).permute((1, 0)), nothing)
        sum_i = tiles.sums.index(stage).load(gl.SliceLayout(0, SCORES))
        sum_j = tiles.sums.index(stage).load(gl.SliceLayout(1, SCORES))
        decay = device.exp(sum_i[None, :] - sum_j[:, None])
        scores = warpgroup_mma_wait(0, deps=[scores])
        P = gl.where(i[None, :] >= j[:, None], (scores * scale) * decay, 0.0)
        high = device.rounded_to(P, kind)
        low = gl.convert_layout(device.rest_of(P, high), LEFT)
        products = device.start_product(low, dos, nothing)
        products = warpgroup_mma(gl.convert_layout(high, LEFT), dos, products, is_async=True)
        from_start = tiles.gates.starts.index(stage).load(gl.SliceLayout(1, ROWS))
        upstream = dos.load(ROWS).to(gl.float32) * (from_start * scale)[:, None]
        upstream_high = device.rounded_to(upstream, kind)
        upstream_low = device.rest_of(upstream, upstream_high)
        products = warpgroup_mma_wait(0, deps=[products])
        mbarrier.wait(results.handoff.staged, out_phase)
        device.thread_barrier()  # do has been read by all
        dos.store(upstream_high)
        local.rests.store(upstream_low)
        local.products.store(products)
        fence_async_shared()
        device.thread_barrier()
        mbarrier.arrive(local.staged)
        out_phase ^= 1
        stage, phase = tiles.ring.after(stage, phase)


@gluon.jit
def _halves(x):
    """The left columns of accumulators, and the right ones, in the same registers."""
    COLUMNS: gl.constexpr = x.shape[1] // 2
    first, second = gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, COLUMNS]), (0, 2, 1)))
    LAYOUT: gl.constexpr = device.product_layout(COLUMNS)
    return gl.convert_layout(first, LAYOUT), gl.convert_layout(second, LAYOUT)


@gluon.jit
def _slices(x):
    """Accumulators by columns, SLICE each."""
    first, second = _halves(x)
    if x.shape[1] == 2 * SLICE:
        return first, second
    else:
        a, b = _halves(first)
        c, d = _halves(second)
        return a, b, c, d


@gluon.jit
def _consumer(
    source, source_rows, source_v, source_k, target, target_rows, tiles, local, results, chunks, scale,
    K: gl.constexpr, V: gl.constexpr, TRANSITION: gl.constexpr,
):  # fmt: skip
    """The products, from chunk to chunk; dSᵀ is 0 at first where there are no rows of it."""
    kind: gl.constexpr = tiles.ks.dtype
    STATE: gl.constexpr = device.product_layout(K)
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    BY_CHUNK: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    BY_KEYS: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, VALUES)
    SLICES: gl.constexpr = K // SLICE
    v_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, STATE))
    k_column = gl.arange(0, K, gl.SliceLayout(0, STATE))
    place = source + v_row.to(gl.int64)[:, None] * source_v + k_column.to(gl.int64)[None, :] * source_k
    dS = gl.load(place, mask=(v_row < source_rows)[:, None] & (k_column < K)[None, :], other=0.0)
    nothing = gl.zeros([V_BLOCK, CHUNK], gl.float32, VALUES)
    stage = 0
    phase = 0
    local_phase = 0
    out_phase = 1
    mbarrier.wait(tiles.ring.full.index(0), 0, pred=chunks > 0)
    fence_async_shared()
    for step in range(chunks):
        ks = tiles.ks.index(stage)
        rounded = device.rounded_to(dS, kind)
        narrow = gl.convert_layout(rounded, BY_CHUNK)
        # The sum of one product: it begins with a slice of the second part while the next is rounded.
        slices = _slices(dS)
        of_state = nothing
        for part in gl.static_range(SLICES):
            high = device.rounded_to(slices[part], kind)
            low = gl.convert_layout(device.rest_of(slices[part], high), BY_SLICE)
            keys = ks.slice(part * SLICE, SLICE, 1).permute((1, 0))
            of_state = warpgroup_mma(low, keys, of_state, use_acc=part > 0, is_async=True)
        of_state = warpgroup_mma(narrow, ks.permute((1, 0)), of_state, is_async=True)
        # The chunk before was read when dS was there. Here products are under way, and threads may wait for each other.
        device.thread_barrier()
        mbarrier.arrive(tiles.ring.empty.index(tiles.ring.before(stage)), pred=step > 0)
        # Waits for nothing: without it the next product would be preceded by a wait for this one.
        dS = warpgroup_mma_wait(SLICES + 1, deps=[dS])
        decay = tiles.gates.starts.index(stage).slice(CHUNK - 1, 1).load(gl.SliceLayout(0, STATE))
        dS = dS * decay[None, :]
        mbarrier.wait(local.staged, local_phase)
        dS = warpgroup_mma(local.rests.permute((1, 0)), tiles.qs.index(stage), dS, is_async=True)
        if not TRANSITION:
            mbarrier.wait(results.handoff.drained, out_phase)
            results.dSs.store(rounded)
        of_scores = local.products.permute((1, 0)).load(VALUES)
        to_end = tiles.gates.ends.index(stage).load(COLUMNS)
        of_state = warpgroup_mma_wait(1, deps=[of_state])
        R = of_state * to_end[None, :] + of_scores
        R_high = device.rounded_to(R, kind)
        R_low = gl.convert_layout(device.rest_of(R, R_high), BY_CHUNK)
        R_high = gl.convert_layout(R_high, BY_CHUNK)
        Y_tile = warpgroup_mma(R_low, tiles.highs.index(stage), R, is_async=True)
        Y_tile = warpgroup_mma(R_high, tiles.lows.index(stage), Y_tile, is_async=True)
        Y_tile = warpgroup_mma(R_high, tiles.highs.index(stage), Y_tile, is_async=True)
        dS = warpgroup_mma(tiles.dos.index(stage).permute((1, 0)), tiles.qs.index(stage), dS, is_async=True)
        from_start = tiles.gates.starts.index(stage).load(COLUMNS)
        factor = tiles.gates.strengths.index(stage).load(COLUMNS) * from_start
        Y_tile = warpgroup_mma_wait(1, deps=[Y_tile])
        carried = gl.convert_layout((-(Y_tile * factor[None, :])).to(kind), BY_KEYS)
        dS = warpgroup_mma(carried, ks, dS, is_async=True)
        if not TRANSITION:
            results.Ys.store(Y_tile.to(kind))
        device.thread_barrier()
        mbarrier.arrive(results.handoff.staged)
        local_phase ^= 1
        out_phase ^= 1
        stage, phase = tiles.ring.after(stage, phase)
        # The next chunk has been there for long; beside the last product of this one the fence costs nothing.
        mbarrier.wait(tiles.ring.full.index(stage), phase, pred=step + 1 < chunks)
        fence_async_shared()
        dS = warpgroup_mma_wait(0, deps=[dS])
    V_STRIDE: gl.constexpr = K if TRANSITION else 1
    K_STRIDE: gl.constexpr = 1 if TRANSITION else V
    # 0, and known after the loop alone: or the places would stay in registers through it.
    place = target + gl.minimum(stage, 0)
    place = place + (v_row.to(gl.int64) * V_STRIDE)[:, None] + (k_column.to(gl.int64) * K_STRIDE)[None, :]
    gl.store(place, dS, mask=(v_row < target_rows)[:, None] & (k_column < K)[None, :])


@kernel(budget=device.BUDGET, targets=("sm_90",), numeric=("SEGMENT",), schedule=("STAGES",))
@gluon.jit
def rule_reverse_scan_hopper(
    q: Pointer16.element, k: Pointer16.element, do: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    dfinal_state: Pointer.float32, dinitial_state: Pointer.float32, dsegment_states: Pointer16.float32,
    Y: Pointer16.element, dstates: Pointer16.element, first_chunk: Int32, part: Int32, scale: Float32,
    HEADS: gl.constexpr, Q_STRIDE: gl.constexpr, K_STRIDE: gl.constexpr, DO_STRIDE: gl.constexpr,
    Q_HEAD: gl.constexpr, K_HEAD: gl.constexpr, DO_HEAD: gl.constexpr, GROUP: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, STAGES: gl.constexpr, FINAL: gl.constexpr, INITIAL: gl.constexpr, SEGMENTED: gl.constexpr,
    TRANSITION: gl.constexpr, SEGMENT: gl.constexpr, REVERSE_SEGMENT: gl.constexpr, UNSPLIT: gl.constexpr,
):  # fmt: skip
    """Y and dS⁺ of every chunk of one span and value head, for 64 columns of V and all of K; transposed.

    For 16-bit types, K of 64 or 128, V a multiple of 64 and two STAGES at least: the scan waits for a chunk before it
    says that it has read the one before. Spans, and what the flags and constants mean, are those of
    `rule_reverse_scan`, where there is a gradient of the outputs. Of a whole sequence, `part` chunks from `first_chunk`
    on are scanned: what stands for the gradient of the final state is that of the state they end with, and for that of
    the initial state the one they begin with.
    """
    blocks: gl.constexpr = V // V_BLOCK
    kind: gl.constexpr = k.dtype.element_ty

    program = gl.program_id(0)
    span = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * V_BLOCK
    sequence = span
    index = 0
    first = first_chunk
    size = part * CHUNK
    if SEGMENTED:
        sequence = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(gl.int64)
        index = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
        first = index * (SEGMENT // CHUNK)
        size = REVERSE_SEGMENT
    begin = gl.load(sequence_begins + sequence)
    length = gl.load(sequence_begins + sequence + 1) - begin
    count = length - first * CHUNK
    ends_here = count <= size
    count = gl.minimum(count, size)
    rows = V_BLOCK  # of dSᵀ, or none where another program scans the tokens
    if SEGMENTED:
        is_there = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_COUNT) > 0
        is_first = index % (REVERSE_SEGMENT // SEGMENT) == 0
        rows = gl.where(is_there & is_first & (length > UNSPLIT), V_BLOCK, 0)
        if TRANSITION:
            rows = gl.where(index > 0, rows, 0)
        count = gl.where(rows > 0, count, 0)
    elif UNSPLIT > 0:
        rows = gl.where(length <= UNSPLIT, V_BLOCK, 0)
        count = gl.where(rows > 0, count, 0)
    chunks = (count + CHUNK - 1) // CHUNK
    last = gl.maximum(chunks - 1, 0)
    key_head = (head // GROUP).to(gl.int64)
    token = begin.to(gl.int64) + (first + last) * CHUNK
    q += token * Q_STRIDE + key_head * Q_HEAD
    k += token * K_STRIDE + key_head * K_HEAD
    do += token * DO_STRIDE + head.to(gl.int64) * DO_HEAD + first_row
    lane = (gl.load(first_chunks + sequence) + first + last).to(gl.int64) * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (2 * CHUNK * CHUNK)
    Y += lane * (V * CHUNK) + first_row * CHUNK
    dstates += lane * (V * K) + first_row * K
    of_sequence = (sequence * HEADS + head) * (K * V) + first_row

    source = dfinal_state + of_sequence
    source_rows = rows if FINAL else 0
    source_v = 1
    source_k = V
    target = dinitial_state + of_sequence
    target_rows = rows if INITIAL else 0
    if SEGMENTED:
        # A sequence has a place for each of its segments but the first, and no two meet: see `saved_states`.
        after = (begin // REVERSE_SEGMENT + index // (REVERSE_SEGMENT // SEGMENT)).to(gl.int64)
        source_rows = gl.where(ends_here, source_rows, 0)
        target_rows = gl.where(index == 0, target_rows, 0)
        if TRANSITION:
            target = dsegment_states + ((after - 1) * HEADS + head) * (V * K) + first_row * K
            target_rows = rows
        elif not ends_here:
            source = dsegment_states + (after * HEADS + head) * (V * K) + first_row * K
            source_rows = rows
            source_v = K
            source_k = 1
    else:
        source_rows = gl.where(ends_here, source_rows, rows)
        target_rows = gl.where(first_chunk == 0, target_rows, rows)

    qs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    ks = gl.allocate_shared_memory(kind, [STAGES, CHUNK, K], TILE)
    dos = gl.allocate_shared_memory(kind, [STAGES, CHUNK, V_BLOCK], TILE)
    highs = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    lows = gl.allocate_shared_memory(kind, [STAGES, CHUNK, CHUNK], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, CHUNK], LINE)
    products = gl.allocate_shared_memory(gl.float32, [CHUNK, V_BLOCK], WIDE_TILE)
    rests = gl.allocate_shared_memory(kind, [CHUNK, V_BLOCK], TILE)
    dSs = gl.allocate_shared_memory(kind, [V_BLOCK, K], TILE)
    Ys = gl.allocate_shared_memory(kind, [V_BLOCK, CHUNK], TILE)
    # Each thread that copies arrives when its copies have. Who computes Pᵀ do has read a chunk before the other has.
    tiles = Chunks(qs, ks, dos, highs, lows, sums, device.Gates.allocate(STAGES), device.Ring.allocate(STAGES, 128, 1))
    staged = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(staged, count=1)
    local = Local(products, rests, staged)
    results = Results(Ys, dSs, device.Handoff.allocate())
    gl.warp_specialize(
        [
            (_consumer, (
                source, source_rows, source_v, source_k, target, target_rows, tiles, local, results, chunks, scale,
                K, V, TRANSITION,
            )),
            (_local_gradients, (tiles, local, results, chunks, scale)),
            (_mover, (
                q, k, do, T, gates, Y, dstates, tiles, results, count, chunks, HEADS, Q_STRIDE, K_STRIDE, DO_STRIDE,
                K, V, STAGES, TRANSITION,
            )),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[136, 128],
    )  # fmt: skip


def programs_of(shape: Shape) -> int:
    """Programs of a sequence or segment."""
    return shape.heads * (shape.V // V_BLOCK.value)


def bind_reverse_scan(setup: Setup, shape: Shape, *, final: bool, initial: bool) -> ReverseScan:
    """Y and dS⁺ of every chunk, and the initial states' gradient; but for sequences that are split.

    A launch may be of a `Part` of every sequence, with the gradients of the states it ends and begins with.

    Args:
        final: whether there is a gradient of the final states.
        initial: whether that of the initial states is needed.
    """
    spans = 0 if shape.is_split_in_reverse and not shape.is_packed else shape.sequences
    return _bind(setup, shape, spans, FINAL=final, INITIAL=initial, SEGMENTED=False, TRANSITION=False)


def bind_segment_scan(setup: Setup, shape: Shape, *, final: bool, initial: bool) -> ReverseScan:
    """The same of the sequences that are split, all segments at once."""
    return _bind(setup, shape, shape.segments, FINAL=final, INITIAL=initial, SEGMENTED=True, TRANSITION=False)


def bind_segment_terms(setup: Setup, shape: Shape, *, final: bool) -> ReverseScan:
    """What segments make of a gradient 0 of the state they end with, the last of the final state's, into
    `dsegment_states`."""
    return _bind(setup, shape, shape.segments, FINAL=final, INITIAL=False, SEGMENTED=True, TRANSITION=True)


def _bind(setup: Setup, shape: Shape, spans: int, **flags: bool) -> ReverseScan:
    scan = device.ByStrides(
        setup, shape, rule_reverse_scan_hopper, "Q K DO", HEADS=shape.heads,
        STAGES=setup.schedule["hopper_reverse_stages"], SEGMENT=packing.SEGMENT, REVERSE_SEGMENT=sizes.REVERSE_SEGMENT,
        UNSPLIT=shape.unsplit_reverse, **flags,
    )  # fmt: skip
    grid = (spans * programs_of(shape),)

    def launch(
        memory: Mapping[str, Any], upstream: Upstream, dinitial_state: Tensor | None, part: Part = WHOLE
    ) -> None:
        q, k, do, dfinal_state, scale = upstream
        assert do is not None  # or the plan refused
        absent = memory["gates"]  # stands for a pointer that no variant reads
        scan.of(q, k, do).launch(
            grid, q=q.start, k=k.start, do=do.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory["segment_indices"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], dfinal_state=absent if dfinal_state is None else dfinal_state,
            dinitial_state=absent if dinitial_state is None else dinitial_state,
            dsegment_states=memory.get("dsegment_states", absent), Y=memory["Y"], dstates=memory["dstates"],
            first_chunk=part.first, part=part.chunks, scale=scale,
        )  # fmt: skip

    return launch
