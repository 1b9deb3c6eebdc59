"""The states that stretches of a long sequence begin with, for Hopper: the scan alone, ahead of the outputs.

One sequence leaves most of a card idle in a scan from chunk to chunk. Without outputs the scan is faster, and with the
states it finds, stretches of the sequence are scanned with outputs side by side, bit for bit as in one scan. A program
has 64 columns of V, in one warpgroup, and waits for nothing but its own products; another warpgroup copies.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adjoint.core.kernels import Int32, Pointer, Pointer16, kernel
from adjoint.core.launch import Setup, run_concurrently
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper import device, state_chunks
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK, V_BLOCK
from adjoint.ops.gated_delta.rule.hopper.state_chunks import HALF
from adjoint.ops.gated_delta.rule.hopper.whole_scan import PLACES, Stretches
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS


@gluon.jit
def _load_half(source, v_row, k_column, source_rows, V: gl.constexpr):
    place = source + v_row[:, None] + (k_column * V)[None, :]
    is_there = (v_row < source_rows)[:, None] & (k_column < k_column.shape[0])[None, :]
    return gl.load(place, mask=is_there, other=0.0)


@gluon.jit
def _scan(
    source, source_rows, starts, tiles, chunks, until, every,
    HEADS: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """The products from chunk to chunk; the state is stored after `until` chunks, and then after each `every`."""
    kind: gl.constexpr = tiles.vs.dtype
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    v_row = gl.arange(0, V_BLOCK, gl.SliceLayout(1, VALUES)).to(gl.int64)
    k_column = gl.arange(0, HALF, gl.SliceLayout(0, VALUES)).to(gl.int64)
    S = _load_half(source, v_row, k_column, source_rows, V)
    narrow = state_chunks.rounded(S, kind)
    S_rest = S
    narrow_rest = narrow
    if K > HALF:
        S_rest = _load_half(source + HALF * V, v_row, k_column, source_rows, V)
        narrow_rest = state_chunks.rounded(S_rest, kind)
    stage = 0
    phase = 0
    for chunk in range(chunks):
        S, S_rest, narrow, narrow_rest = state_chunks.advance(
            S, S_rest, narrow, narrow_rest, tiles, chunk, stage, phase, 0, K
        )
        until -= 1
        if until == 0:
            until = every
            gl.store(starts + v_row[:, None] + (k_column * V)[None, :], S)
            if K > HALF:
                gl.store(starts + HALF * V + v_row[:, None] + (k_column * V)[None, :], S_rest)
            starts += HEADS * (K * V)
        stage, phase = tiles.ring.after(stage, phase)


@kernel(budget=device.BUDGET, targets=("sm_90",), schedule=("STAGES",))
@gluon.jit
def rule_states_ahead_hopper(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    sequence_begins: Pointer.int32, first_chunks: Pointer.int32, initial_state: Pointer.float32,
    starts: Pointer.float32, first_chunk: Int32, first_state: Int32, every: Int32, last_state: Int32, place: Int32,
    places: Int32,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, INITIAL: gl.constexpr,
):  # fmt: skip
    """The states of a sequence and value head, 64 columns of V, that a stretch begins with, from the chunk
    `first_state` to `last_state`, `every` so many chunks.

    The scan begins with the chunk `first_chunk`, and the initial state or, in the middle of a sequence, the state in
    the place before `place`, where the first of its results goes. A sequence has `places`, and writes those of the
    stretches it reaches. For 16-bit types, K of 64 or 128 and V a multiple of 64.
    """
    blocks: gl.constexpr = V // V_BLOCK
    size_of_state: gl.constexpr = K * V
    kind: gl.constexpr = k.dtype.element_ty

    program = gl.program_id(0)
    sequence = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_row = (program % blocks) * V_BLOCK
    begin = gl.load(sequence_begins + sequence)
    count = gl.load(sequence_begins + sequence + 1) - begin - first_chunk * CHUNK
    # No stretch begins at the end of a sequence.
    chunks = gl.minimum((count + CHUNK - 1) // CHUNK - 1, last_state - first_chunk)
    chunks = gl.maximum(chunks, 0)
    starts += ((sequence * places + place) * HEADS + head) * size_of_state + first_row
    source = initial_state + (sequence * HEADS + head) * size_of_state + first_row
    source_rows = V_BLOCK if INITIAL else 0
    if first_chunk > 0:
        source = starts - HEADS * size_of_state
        source_rows = V_BLOCK
    source_rows = gl.where(chunks > 0, source_rows, 0)

    first_token = begin.to(gl.int64) + first_chunk * CHUNK
    k += first_token * K_STRIDE + (head // GROUP).to(gl.int64) * K_HEAD
    v += first_token * V_STRIDE + head.to(gl.int64) * V_HEAD + first_row
    lane = (gl.load(first_chunks + sequence) + first_chunk).to(gl.int64) * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (CHUNK * CHUNK)

    tiles = state_chunks.allocate(kind, STAGES, K, V_BLOCK, 1)
    gl.warp_specialize(
        [
            (_scan, (source, source_rows, starts, tiles, chunks, first_state - first_chunk, every, HEADS, K, V)),
            (state_chunks.copy, (
                k, v, T, gates, tiles, count, first_row, chunks, HEADS, K_STRIDE, V_STRIDE, K, V,
            )),
        ],
        worker_num_warps=[4], worker_num_regs=[88],
    )  # fmt: skip


def start_region(shape: Shape) -> dict[str, tuple[torch.dtype, int]]:
    """The states that stretches begin with, [N, PLACES, H, K, V]."""
    return {"starts": (torch.float32, shape.sequences * PLACES * shape.heads * shape.K * shape.V)}


def rounds_of(chunks: int) -> tuple[int, int, int]:
    """The sizes a, y and z, in chunks, of the stretches of a sequence that is scanned in three rounds.

        round   states at                          beside them, outputs of
        1       a, a + y                           [0, a)
        2       b = a + 2y, b + z, b + 2z, b + 3z  [a, a + y), [a + y, b)
        3                                          four stretches of z from b on

    A chunk with outputs takes 2.6 µs of a multiprocessor of an H200, and one ahead 0.85. Both finish at the same time
    in each of the first two rounds where 2.6 a = 0.85 (a + y) and 2.6 y = 0.85 (y + 3z). Of the whole numbers around
    those, the ones that take least.
    """
    outputs, ahead = 2.6, 0.85
    ratio = ahead / (outputs - ahead)

    def time(sizes: tuple[int, int, int]) -> float:
        a, y, z = sizes
        return max(outputs * a, ahead * (a + y)) + max(outputs * y, ahead * (y + 3 * z)) + outputs * z

    last = int(chunks / (4 + 3 * ratio * (2 + ratio)))
    pairs = [(max(int(3 * ratio * z) + more, 1), z) for z in (max(last, 1), last + 1) for more in (0, 1)]
    return min(((max(chunks - 2 * y - 4 * z, 0), y, z) for y, z in pairs), key=time)


def bind_states_ahead(setup: Setup, shape: Shape, initial: bool) -> Callable[..., None]:
    """States that stretches begin with: `launch(memory, k, v, initial_state, first_chunk, first_state, every,
    last_state, place)`, into `starts`."""
    scan = device.ByStrides(
        setup, shape, rule_states_ahead_hopper, "K V", HEADS=shape.heads, STAGES=setup.schedule["ahead_stages"],
        INITIAL=initial,
    )  # fmt: skip
    grid = (shape.sequences * shape.heads * (shape.V // V_BLOCK.value),)

    def launch(
        memory: Mapping[str, Any], k: TokenRows, v: TokenRows, initial_state: Tensor | None,
        first_chunk: int, first_state: int, every: int, last_state: int, place: int,
    ) -> None:  # fmt: skip
        scan.of(k, v).launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            sequence_begins=memory["sequence_begins"], first_chunks=memory["first_chunks"],
            initial_state=memory["gates"] if initial_state is None else initial_state, starts=memory["starts"],
            first_chunk=first_chunk, first_state=first_state, every=every, last_state=last_state, place=place,
            places=PLACES,
        )  # fmt: skip

    return launch


def bind_scan_ahead(
    setup: Setup, shape: Shape, inverse: Callable[..., None], whole: Callable[..., None], initial: bool
) -> Callable[..., None]:
    """The inverses that `inverse` computes, and the results of `whole`, the scan that `bind_whole_scan` binds for whole
    sequences, in three rounds.

    The first round leaves multiprocessors idle: of one long sequence, they begin with the inverses it does not need.
    """
    ahead = bind_states_ahead(setup, shape, initial)
    a, y, z = rounds_of(-(-shape.time // packing.CHUNK))
    b = a + 2 * y
    is_apart = shape.sequences == 1 and shape.time >= setup.schedule["tokens_apart"]
    needed, rest = device.Part(0, a + y), device.Part(a + y, device.WHOLE.chunks)

    def launch(
        memory: Mapping[str, Any], q: TokenRows, k: TokenRows, v: TokenRows, scale: float,
        initial_state: Tensor | None, saved: Tensor | None, final_state: Tensor | None, out: Tensor,
    ) -> None:  # fmt: skip
        def scan(*stretches: int) -> None:
            whole(memory, q, k, v, scale, initial_state, saved, final_state, out, Stretches(*stretches))

        def states(*places: int) -> None:
            ahead(memory, k, v, initial_state, *places)

        def scan_first() -> None:
            if a > 0:
                scan(0, a, 1, 0)

        def invert_rest() -> None:
            if is_apart:
                inverse(memory, k, rest)

        # Where a is 0, the stretch in the first place begins with the sequence.
        first_states = (0, a, y, a + y, 0) if a > 0 else (0, y, y, y, 1)
        inverse(memory, k, needed if is_apart else device.WHOLE)
        run_concurrently(
            setup.device, lambda: states(*first_states), scan_first, invert_rest, worthwhile=a > 0 or is_apart
        )
        run_concurrently(
            setup.device, lambda: states(a + y, b, z, b + 3 * z, 2), lambda: scan(a, y, 2, 0), worthwhile=True
        )
        scan(b, z, 4, 2)

    return launch
