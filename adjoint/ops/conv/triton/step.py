"""Steps of decoding: a program takes a tile of channels of one row through its tokens, and writes the state after them.

The arithmetic of a token is that of `forward.py`, operation by operation.
"""

# ruff: noqa: RUF005  (Triton joins tuples with +, and knows no unpacking)

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from adjoint.core.errors import check, report, status_word
from adjoint.core.kernels import Budget, Int32, Int64, Pointer, kernel
from adjoint.core.launch import Execute, Setup
from adjoint.device.faults import record
from adjoint.device.sequences import out_of_range, repeated
from adjoint.ops.conv.arguments import STATE_INDEX_OUT_OF_RANGE, STATE_INDEX_REPEATED
from adjoint.ops.conv.shape import Shape, named_strides
from adjoint.ops.conv.triton.rows import activate, convolve, load_bias, load_rows, load_taps, pool_place


@kernel(budget=Budget(registers=128, shared_bytes=4096), schedule=("CHANNELS",))
@triton.jit
def conv_step(
    x: Pointer.element, weight: Pointer.weight, bias: Pointer.bias, state: Pointer.element, indices: Pointer.index,
    y: Pointer.element, new_state: Pointer.element, status_word: Pointer.int64, fault: Int32, time: Int32,
    channels: Int32, tiles: Int32, states: Int64, x_row: Int64, x_token: Int64, x_channel: Int64,
    weight_channel: Int64, weight_tap: Int64, bias_step: Int64, state_sequence: Int64, state_channel: Int64,
    state_column: Int64, index_step: Int64,
    WIDTH: tl.constexpr, INDEXED: tl.constexpr, IN_PLACE: tl.constexpr, ADJACENT: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr, NARROW: tl.constexpr, NATIVE: tl.constexpr, DOUBLE: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """y of one row's tokens, and its state after them, in its own place or in the row's. ADJACENT: x_channel is 1."""
    COMPUTED: tl.constexpr = tl.float64 if DOUBLE else tl.float32
    BEFORE: tl.constexpr = WIDTH - 1
    tile = tl.program_id(0) % tiles
    row = (tl.program_id(0) // tiles).to(tl.int64)
    channel = (tile * CHANNELS + tl.arange(0, CHANNELS)).to(tl.int64)
    inside = channel < channels
    if ADJACENT:
        x_channel = 1
    place = pool_place(row, indices, index_step, states, INDEXED)
    if INDEXED:
        one = tl.zeros([1], tl.int64)
        index = tl.load(indices + row * index_step).to(tl.int64)
        wrong = (tile == 0) & ((index < -1) | (index >= states))
        record(status_word, fault, row + one, index + one, wrong & (one == 0))
    live = inside & (place >= 0)
    at = place * state_sequence + channel * state_channel
    window = load_rows(state, at, live, state_column, 0, BEFORE)
    taps = load_taps(weight, channel, inside, weight_channel, weight_tap, WIDTH, COMPUTED)
    start = load_bias(bias, channel, inside, bias_step, HAS_BIAS, CHANNELS, COMPUTED)
    for t in range(0, time):
        value = tl.load(x + row * x_row + t * x_token + channel * x_channel, live, other=0)
        rows = window + (value,)
        result = activate(convolve(rows, taps, start, 0, WIDTH), SILU, NARROW, NATIVE)
        result = tl.where(place >= 0, result, 0.0)
        tl.store(y + (row * time + t) * channels + channel, result.to(y.dtype.element_ty), inside)
        window = rows[1:]
    for column in tl.static_range(BEFORE):
        if IN_PLACE:
            tl.store(state + at + column * state_column, window[column], live)
        else:
            tl.store(new_state + (row * channels + channel) * BEFORE + column, window[column], inside)


def step(setup: Setup) -> Execute:
    """y, and the rows' new states or, in place, the pool's own."""
    shape, schedule, device = Shape.of(setup.problem), setup.schedule, setup.device
    block, in_place = shape.channel_block(schedule["channels"]), setup.problem.op.endswith("in_place")
    constants = {name: value for name, value in shape.constants(setup.nvidia).items() if name != "HAS_STATE"}
    indexed = shape.is_indexed
    bound = setup.kernel(
        conv_step, **shape.types, **constants, index=shape.index, INDEXED=indexed, IN_PLACE=in_place,
        ADJACENT=not shape.is_time_adjacent and "x" not in shape.copied, CHANNELS=block,
        num_warps=shape.warps(block, schedule["warps"]),
    )  # fmt: skip
    tiles = -(-shape.channels // block)

    def execute(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        x, weight, bias, state, indices, _silu, checking = arguments
        y = outputs[0]
        if checking and indices is not None:
            report(STATE_INDEX_REPEATED, indices, repeated(indices))
        if y.numel() == 0 and indices is not None:
            report(STATE_INDEX_OUT_OF_RANGE, indices, out_of_range(indices, len(state)))
        x_row, x_token, x_channel = x.stride()
        bound.launch(
            (shape.batch * tiles,), x=x, weight=weight, bias=weight if bias is None else bias, state=state,
            indices=indices if indexed else x, y=y, new_state=y if in_place else outputs[1],
            status_word=status_word(device), fault=STATE_INDEX_OUT_OF_RANGE.row, time=shape.time,
            channels=shape.channels, tiles=tiles, states=shape.sequences, x_row=x_row, x_token=x_token,
            x_channel=x_channel, bias_step=0 if bias is None else bias.stride(0),
            index_step=indices.stride(0) if indexed else 0, **named_strides("weight", weight, "channel", "tap"),
            **named_strides("state", state, "sequence", "channel", "column"),
        )  # fmt: skip
        if indexed and device.type == "cpu":
            check()

    return execute
