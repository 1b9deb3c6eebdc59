"""What a segment makes of any state, for Hopper: `rule_state_scan` with TRANSITION.

Two warpgroups scan 64 columns each, of M, from those of the identity and without values, or of B, from 0; a third
copies what both read. They wait for each other nowhere: while one computes elements, the tensor cores work for the
other.
"""

from collections.abc import Callable, Mapping
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from adjoint.core.kernels import Pointer, Pointer16, kernel
from adjoint.core.launch import Setup
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule.hopper import device, state_chunks
from adjoint.ops.gated_delta.rule.hopper.device import CHUNK
from adjoint.ops.gated_delta.rule.hopper.state_chunks import HALF
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows
from adjoint.ops.gated_delta.rule.triton.chunk_indices import INDEX_NUMBER, INDEX_SEQUENCE, INDEX_WIDTH
from adjoint.ops.gated_delta.rule.triton.gates import GATE_ROWS

LINES = gl.constexpr(64)
"""Columns of M or B of a warpgroup."""


@gluon.jit
def _scan_columns(transitions, first_line, tiles, chunks, PART: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """64 columns of M and B, that is lines of their transposes."""
    kind: gl.constexpr = tiles.vs.dtype
    VALUES: gl.constexpr = device.product_layout(CHUNK)
    line = first_line + PART * LINES + gl.arange(0, LINES, gl.SliceLayout(1, VALUES))
    k_column = gl.arange(0, HALF, gl.SliceLayout(0, VALUES))
    S = gl.where(line[:, None] == k_column[None, :], 1.0, 0.0)
    narrow = state_chunks.rounded(S, kind)
    S_rest = S
    narrow_rest = narrow
    if K > HALF:
        S_rest = gl.where(line[:, None] == k_column[None, :] + HALF, 1.0, 0.0)
        narrow_rest = state_chunks.rounded(S_rest, kind)
    stage = 0
    phase = 0
    for chunk in range(chunks):
        S, S_rest, narrow, narrow_rest = state_chunks.advance(
            S, S_rest, narrow, narrow_rest, tiles, chunk, stage, phase, PART, K
        )
        stage, phase = tiles.ring.after(stage, phase)
    if chunks > 0:
        stored = (line < K + V)[:, None] & (k_column < HALF)[None, :]
        place = transitions + (line.to(gl.int64) * K)[:, None] + k_column.to(gl.int64)[None, :]
        gl.store(place, S, mask=stored)
        if K > HALF:
            gl.store(place + HALF, S_rest, mask=stored)


@kernel(budget=device.BUDGET, targets=("sm_90",), numeric=("SEGMENT",), schedule=("STAGES",))
@gluon.jit
def rule_transitions_hopper(
    k: Pointer16.element, v: Pointer16.element, gates: Pointer16.float32, T: Pointer16.element,
    segment_indices: Pointer.int32, sequence_begins: Pointer.int32, first_chunks: Pointer.int32,
    transitions: Pointer.float32,
    HEADS: gl.constexpr, K_STRIDE: gl.constexpr, V_STRIDE: gl.constexpr, K_HEAD: gl.constexpr, V_HEAD: gl.constexpr,
    GROUP: gl.constexpr, K: gl.constexpr, V: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """128 columns of M and B of a segment and value head: M S + B is what it makes of a state S.

    For 16-bit types, K of 64 or 128 and V a multiple of 64. Mᵀ and Bᵀ go to `transitions`, [segments, H, K + V, K]. No
    state goes past the last segment of a sequence, which has none.
    """
    WIDTH: gl.constexpr = 2 * LINES
    blocks: gl.constexpr = (K + V + WIDTH - 1) // WIDTH
    kind: gl.constexpr = k.dtype.element_ty

    program = gl.program_id(0)
    span = (program // (HEADS * blocks)).to(gl.int64)
    head = (program // blocks) % HEADS
    first_line = (program % blocks) * WIDTH
    sequence = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_SEQUENCE).to(gl.int64)
    index = gl.load(segment_indices + span * INDEX_WIDTH + INDEX_NUMBER)
    begin = gl.load(sequence_begins + sequence)
    first = begin.to(gl.int64) + index * SEGMENT
    is_followed = gl.load(sequence_begins + sequence + 1) - begin > (index + 1) * SEGMENT
    chunks = gl.where(is_followed, SEGMENT // CHUNK, 0)
    slot = (gl.load(first_chunks + sequence) + index * (SEGMENT // CHUNK)).to(gl.int64)

    k += first * K_STRIDE + (head // GROUP).to(gl.int64) * K_HEAD
    # Lines of M have no values: columns before the first of v, which are not read, and are zeros.
    v_column = first_line - K
    v += first * V_STRIDE + head.to(gl.int64) * V_HEAD + v_column
    lane = slot * HEADS + head
    gates += lane * (GATE_ROWS * CHUNK)
    T += lane * (CHUNK * CHUNK)
    transitions += (span * HEADS + head) * (K * (K + V))

    tiles = state_chunks.allocate(kind, STAGES, K, WIDTH, 2)
    gl.warp_specialize(
        [
            (_scan_columns, (transitions, first_line, tiles, chunks, 0, K, V)),
            (_scan_columns, (transitions, first_line, tiles, chunks, 1, K, V)),
            (state_chunks.copy, (
                k, v, T, gates, tiles, chunks * CHUNK, v_column, chunks, HEADS, K_STRIDE, V_STRIDE, K, V,
            )),
        ],
        worker_num_warps=[4, 4], worker_num_regs=[208, 88],
    )  # fmt: skip


def bind_transitions(setup: Setup, shape: Shape) -> Callable[[Mapping[str, Any], TokenRows, TokenRows], None]:
    """What every segment but a sequence's last makes of a state, M S + B: `launch(memory, k, v)`, Mᵀ and Bᵀ into
    `transitions`."""
    transition = device.ByStrides(
        setup, shape, rule_transitions_hopper, "K V", HEADS=shape.heads, SEGMENT=packing.SEGMENT,
        STAGES=setup.schedule["ahead_stages"],
    )  # fmt: skip
    grid = (shape.segments * shape.heads * -(-(shape.K + shape.V) // (2 * LINES.value)),)

    def launch(memory: Mapping[str, Any], k: TokenRows, v: TokenRows) -> None:
        transition.of(k, v).launch(
            grid, k=k.start, v=v.start, gates=memory["gates"], T=memory["T"],
            segment_indices=memory["segment_indices"], sequence_begins=memory["sequence_begins"],
            first_chunks=memory["first_chunks"], transitions=memory["transitions"],
        )  # fmt: skip

    return launch
