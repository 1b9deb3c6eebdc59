"""The convolution in plain PyTorch: float32 arithmetic (float64 for float64), rounded once.

Batches, whose rows are sequences, are in `batches.py`; packed sequences and the steps of decoding are here.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.launch import refuse_capture
from adjoint.core.problem import Problem, wide_dtype
from adjoint.device.sequences import out_of_range, repeated, skipped_rows, wrong_bounds
from adjoint.ops.conv import batches
from adjoint.ops.conv.arguments import (
    NEED_BIAS,
    NEED_STATE,
    NEED_WEIGHT,
    NEED_X,
    SEQUENCES_OUT_OF_ORDER,
    STATE_INDEX_OUT_OF_RANGE,
    STATE_INDEX_REPEATED,
)
from adjoint.ops.conv.batches import CHUNK, activate, through_activation
from adjoint.ops.conv.shape import Shape
from adjoint.ops.conv.windows import add_taps, multiply_windows, taps_of


class _Packed:
    """Packed sequences on one axis, each with the W − 1 tokens before its first: a row for each, and no edges.

    What a row of state computes belongs to nobody, and is not used. Bounds are read on the CPU, those out of order as
    their running maximum.
    """

    def __init__(self, shape: Shape, cu_seqlens: Tensor, device: torch.device, raises: bool) -> None:
        self.shape, self.before, self.device = shape, shape.width - 1, device
        if raises:
            report(SEQUENCES_OUT_OF_ORDER, cu_seqlens, wrong_bounds(cu_seqlens, shape.tokens))
        refuse_capture(device, "reading cu_seqlens in plain PyTorch", "plans on kernels can be recorded")
        bounds = cu_seqlens.cpu().long().clamp(0, shape.tokens).cummax(0).values
        bounds[:1], bounds[-1:] = 0, shape.tokens  # every token belongs to a sequence
        numbers, columns = (torch.arange(n, device="cpu") for n in (shape.sequences, self.before))
        owners = torch.repeat_interleave(numbers, bounds.diff()) if shape.sequences else bounds.new_zeros(shape.tokens)
        self.places = torch.arange(shape.tokens, device="cpu") + self.before * (owners + 1)
        self.rows = shape.tokens + max(1, shape.sequences) * self.before
        first = bounds[:-1] + self.before * numbers
        last = bounds[1:] + self.before * numbers
        self.on_device = self.places.to(device)
        self.state_rows, self.final_rows = ((begin[:, None] + columns).flatten().to(device) for begin in (first, last))

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Tokens of a bounded size, and the rows from the first of them to the last."""
        if not self.shape.channels:
            return
        size = max(16, CHUNK // self.shape.channels)
        for first in range(0, self.shape.tokens, size):
            last = min(first + size, self.shape.tokens)
            yield slice(first, last), slice(int(self.places[first]), int(self.places[last - 1]) + 1)

    def own(self, tokens: slice, places: slice) -> Any:
        """What picks the tokens of a chunk from its rows."""
        return (
            ... if tokens.stop - tokens.start == places.stop - places.start else self.on_device[tokens] - places.start
        )

    def blank(self, kind: torch.dtype, more: int = 0) -> Tensor:
        """Rows, and some more after them, of zeros."""
        return torch.zeros((self.rows + more, self.shape.channels), dtype=kind, device=self.device)

    def fill(self, x: Tensor, state: Tensor | None, kind: torch.dtype) -> Tensor:
        """x, and the states before it, or zeros."""
        rows = self.blank(kind)
        rows[self.on_device] = x.reshape(self.shape.tokens, self.shape.channels).to(kind)
        if state is not None:
            rows[self.state_rows] = self.rows_of(state).to(kind)
        return rows

    def rows_of(self, states: Tensor) -> Tensor:
        """The columns of all states, a row for each."""
        return states.mT.reshape(len(states) * self.before, self.shape.channels)

    def states(self, rows: Tensor, is_final: bool = False) -> Tensor:
        """The rows of the initial states, or of the final ones, as states have them."""
        chosen = rows[self.final_rows if is_final else self.state_rows]
        return chosen.view(self.shape.sequences, self.before, self.shape.channels).mT


def _convolve(rows: Tensor, own: slice, taps: Sequence[Tensor], bias: Tensor | None) -> Tensor:
    """z of some rows."""
    return add_taps(rows[None, own.start - len(taps) + 1 : own.stop], taps, bias)[0]


def forward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The parts of y, and the final states."""
    x, weight, bias, state, cu_seqlens, *_ = arguments
    *parts, final = outputs
    shape = Shape.of(problem)
    if cu_seqlens is None:
        batches.forward(batches.Sequences(shape, x, weight, bias, state), parts, final)
        return
    packed, kind = _Packed(shape, cu_seqlens, x.device, raises=True), shape.computed
    rows, bias = packed.fill(x, state, kind), None if bias is None else bias.to(kind)
    taps = taps_of(weight, kind)
    for tokens, places in packed.chunks():
        y = activate(_convolve(rows, places, taps, bias), shape.is_silu)[packed.own(tokens, places)]
        for begin, part in zip(shape.begins, parts, strict=False):
            part.view(shape.tokens, part.shape[2])[tokens] = y[:, begin : begin + part.shape[2]]
    if final.numel():
        final.copy_(packed.states(rows, is_final=True))


def backward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The gradients that are needed: dz of every row, then what each row of tokens and states contributed to."""
    shape, need = Shape.of(problem), arguments[-1]
    *upstream, dfinal, x, weight, bias, state, cu_seqlens = arguments[: len(shape.parts) + 6]
    if cu_seqlens is None:
        batches.backward(batches.Sequences(shape, x, weight, bias, state), upstream, dfinal, need, outputs)
        return
    dx, dweight, dbias, dstate = outputs
    packed, kind, before = _Packed(shape, cu_seqlens, x.device, raises=False), shape.computed, shape.width - 1
    rows, bias = packed.fill(x, state, kind), None if bias is None else bias.to(kind)
    taps, dz = taps_of(weight, kind), packed.blank(kind, before)
    upstream = [None if part is None else part.reshape(shape.tokens, part.shape[2]) for part in upstream]
    dtaps, dbiases = (torch.zeros(n, shape.channels, dtype=torch.float64, device=x.device) for n in (before + 1, 1))
    for tokens, places in packed.chunks():
        own = packed.own(tokens, places)
        z = _convolve(rows, places, taps, bias)[own].contiguous()
        dy = torch.zeros_like(z)
        for begin, part in zip(shape.begins, upstream, strict=False):
            if part is not None:
                dy[:, begin : begin + part.shape[1]] = part[tokens]
        slopes = through_activation(dy, z, shape.is_silu)
        dz[places][own] = slopes
        if need & NEED_WEIGHT:
            dtaps += multiply_windows(rows[None, places.start - before : places.stop], dz[None, places])
        if need & NEED_BIAS:
            dbiases += slopes.sum(0)
    if need & (NEED_X | NEED_STATE):
        size, backwards = max(16, CHUNK // max(1, shape.channels)), taps[::-1]
        for first in range(0, len(rows), size):  # x is needed no more: its gradient lies where it was
            last = min(first + size, len(rows))
            add_taps(dz[None, first : last + before], backwards, out=rows[None, first:last])
        if dfinal is not None and before:
            rows[packed.final_rows] += packed.rows_of(dfinal)
    for bit, target, gradient in (
        (NEED_X, dx, lambda: rows[packed.on_device][None]), (NEED_WEIGHT, dweight, lambda: dtaps.T),
        (NEED_BIAS, dbias, lambda: dbiases[0]), (NEED_STATE, dstate, lambda: packed.states(rows)),
    ):  # fmt: skip
        if need & bit and target.numel():
            target.copy_(gradient())


# ------------------------------------------------------------------------------------------- steps


class _Rows:
    """Rows with their states before them, [batch, W − 1 + time, channels], in the type of the sums."""

    def __init__(self, x: Tensor, weight: Tensor, state: Tensor, indices: Tensor | None) -> None:
        self.time, self.before, kind = x.shape[1], weight.shape[1] - 1, wide_dtype(x.dtype)
        self.taps = taps_of(weight, kind)
        self.skipped, self.places = skipped_rows(indices, len(state)), None
        if indices is not None and self.skipped is not None:
            self.places = torch.where(self.skipped, 0, indices).long()
            state = state[self.places] if len(state) else state.new_zeros(len(x), *state.shape[1:])
        self.tokens = self.clear(torch.cat((state.mT.to(kind), x.to(kind)), 1))

    def clear(self, values: Tensor) -> Tensor:
        """Zeroes what belongs to skipped rows."""
        return values if self.skipped is None else values.masked_fill(self.skipped[:, None, None], 0)

    def preactivation(self, bias: Tensor | None) -> Tensor:
        return add_taps(self.tokens, self.taps, bias)

    def last(self) -> Tensor:
        """The states after the tokens."""
        return self.tokens[:, self.time :].mT

    def gradient(self, dz: Tensor, dlast: Tensor | None) -> Tensor:
        """The gradient of the rows, from that of z and that of the states after them."""
        rows = F.pad(dz, (0, 0, self.before, self.before))
        gradient = add_taps(rows, self.taps[::-1])
        if dlast is not None:
            gradient[:, self.time :] += self.clear(dlast.mT)
        return gradient

    def weight_gradient(self, dz: Tensor) -> Tensor:
        return multiply_windows(self.tokens, dz).mT


def _differentiate(
    rows: _Rows, dy: Tensor | None, dlast: Tensor | None, bias: Tensor | None, is_silu: bool, need: int,
    outputs: tuple[Tensor, ...],
) -> Tensor | None:  # fmt: skip
    """Writes dx, dweight and dbias as they are needed; the gradient of the states before the rows, if it is."""
    dx, dweight, dbias, _ = outputs
    z = rows.preactivation(bias)
    dy = torch.zeros_like(z) if dy is None else dy.to(z.dtype)
    dz = rows.clear(through_activation(dy, z, is_silu))
    if need & NEED_WEIGHT:
        dweight.copy_(rows.weight_gradient(dz))
    if need & NEED_BIAS:
        dbias.copy_(dz.sum((0, 1)))
    if not need & (NEED_X | NEED_STATE):
        return None
    gradient = rows.gradient(dz, dlast)
    if need & NEED_X:
        dx.copy_(gradient[:, rows.before :])
    return gradient[:, : rows.before].mT


def step(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """y, and the rows' new states or, in place, the pool's own."""
    x, weight, bias, state, indices, is_silu, checking = arguments
    if indices is not None:
        report(STATE_INDEX_OUT_OF_RANGE, indices, out_of_range(indices, len(state)))
        if checking:
            report(STATE_INDEX_REPEATED, indices, repeated(indices))
    rows = _Rows(x, weight, state, indices)
    outputs[0].copy_(rows.clear(activate(rows.preactivation(bias), is_silu)))
    if not problem.op.endswith("in_place"):
        outputs[1].copy_(rows.last())
    elif rows.places is None or rows.skipped is None:
        state.copy_(rows.last())
    else:
        state[rows.places[~rows.skipped]] = rows.last()[~rows.skipped].to(state.dtype)


def step_backward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The gradients that are needed; rows that share a state add up."""
    dy, dnew_state, x, weight, bias, state, indices, is_silu, _checking, need = arguments
    rows = _Rows(x, weight, state, indices)
    gradient = _differentiate(rows, dy, dnew_state, bias, is_silu, need, outputs)
    if gradient is not None and need & NEED_STATE:
        if rows.places is not None:
            pool = gradient.new_zeros(state.shape)
            gradient = pool.index_add_(0, rows.places, gradient) if len(state) else pool
        outputs[3].copy_(gradient)
