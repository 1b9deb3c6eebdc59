"""The convolution in plain PyTorch: float32 arithmetic (float64 for float64), rounded once.

Few tokens are computed at once, in few calls of torch. Many are, a chunk at a time, so that what lies between input and
output stays in the cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.launch import refuse_capture
from adjoint.core.problem import Problem, wide_dtype
from adjoint.device.sequences import out_of_range, repeated, skipped_rows, wrong_bounds
from adjoint.ops.conv.arguments import (
    NEED_BIAS,
    NEED_STATE,
    NEED_WEIGHT,
    NEED_X,
    SEQUENCES_OUT_OF_ORDER,
    STATE_INDEX_OUT_OF_RANGE,
    STATE_INDEX_REPEATED,
)
from adjoint.ops.conv.shape import Shape

_AT_ONCE, _CHUNK = 2**20, 2**18
"""Numbers up to which a batch is computed at once, and those of a chunk of others."""

_TINY = 2**14
"""Numbers that take less time than calls of torch do."""

_BOUND = 2048.0
"""Past it silu is its asymptote in every type, and 0 or −0 below; infinities would give 0·∞."""


def _activate(z: Tensor, is_silu: bool) -> Tensor:
    return F.silu(z.clamp_(min=-_BOUND), inplace=True) if is_silu else z


def _through_activation(dy: Tensor, z: Tensor, is_silu: bool) -> Tensor:
    """dz."""
    return torch.ops.aten.silu_backward(dy, z.clamp_(-_BOUND, _BOUND)) if is_silu else dy  # type: ignore[no-any-return]


class _Padded:
    """All sequences on one axis, each with the W − 1 tokens before its first: a row for each, and no edges.

    What a row of state computes belongs to nobody, and is not used. Bounds of packed sequences are read on the CPU,
    those out of order as their running maximum; where every row of a batch is a sequence, nothing goes from one device
    to the other.
    """

    def __init__(self, shape: Shape, cu_seqlens: Tensor | None, device: torch.device, raises: bool) -> None:
        self.shape, self.before, self.device = shape, shape.width - 1, device
        self.is_packed = cu_seqlens is not None
        self.rows = shape.tokens + shape.sequences * self.before
        if cu_seqlens is None:
            return
        if raises:
            report(SEQUENCES_OUT_OF_ORDER, cu_seqlens, wrong_bounds(cu_seqlens, shape.tokens))
        refuse_capture(device, "reading cu_seqlens in plain PyTorch", "plans on kernels can be recorded")
        bounds = cu_seqlens.cpu().long().clamp(0, shape.tokens).cummax(0).values
        bounds[:1], bounds[-1:] = 0, shape.tokens  # every token belongs to a sequence
        numbers, columns = torch.arange(shape.sequences), torch.arange(self.before)
        owners = torch.repeat_interleave(numbers, bounds.diff()) if shape.sequences else bounds.new_zeros(shape.tokens)
        self.places = torch.arange(shape.tokens) + self.before * (owners + 1)
        self.rows = shape.tokens + max(1, shape.sequences) * self.before
        first = bounds[:-1] + self.before * numbers
        last = bounds[1:] + self.before * numbers
        self.on_device = self.places.to(device)
        self.state_rows, self.final_rows = ((begin[:, None] + columns).flatten().to(device) for begin in (first, last))

    def chunks(self) -> Iterator[tuple[slice, slice]]:
        """Tokens of a bounded size, and the rows from the first of them to the last.

        Of a batch, part of one row or several whole ones.
        """
        if not self.shape.channels:
            return
        size, time = max(16, _CHUNK // self.shape.channels), self.shape.time
        if self.is_packed or time <= size:
            size = size if self.is_packed else size // max(1, time) * time
            parts = [
                (first, min(first + size, self.shape.tokens)) for first in range(0, self.shape.tokens, max(1, size))
            ]
        else:
            begins = [(row * time, first) for row in range(self.shape.batch) for first in range(0, time, size)]
            parts = [(row + first, row + min(first + size, time)) for row, first in begins]
        for first, last in parts:
            begin, end = (int(self.places[t]) if self.is_packed else self._place(t) for t in (first, last - 1))
            yield slice(first, last), slice(begin, end + 1)

    def _place(self, token: int) -> int:
        """The row of a token, where every row of a batch is a sequence."""
        return token + self.before * (token // self.shape.time + 1)

    def own(self, chunk: Tensor, tokens: slice, places: slice) -> Any:
        """What picks the tokens of a chunk from its rows: a view, or an index of rows."""
        count, time, channels = tokens.stop - tokens.start, self.shape.time, self.shape.channels
        if count == len(chunk):
            return chunk, ...
        if self.is_packed:
            return chunk, self.on_device[tokens] - places.start
        steps = ((time + self.before) * channels, channels, 1)
        return chunk.as_strided((count // time, time, channels), steps), ...

    def by_sequence(self, rows: Tensor) -> Tensor:
        """The rows of a batch's sequences, [batch, W − 1 + time, channels]."""
        return rows.view(self.shape.batch, self.before + self.shape.time, self.shape.channels)

    def blank(self, kind: torch.dtype, more: int = 0) -> Tensor:
        """Rows, and some more after them, of which those of no token are 0."""
        shape = (self.rows + more, self.shape.channels)
        if self.is_packed:
            return torch.zeros(shape, dtype=kind, device=self.device)
        rows = torch.empty(shape, dtype=kind, device=self.device)
        rows[self.rows :] = 0
        self.by_sequence(rows[: self.rows])[:, : self.before] = 0
        return rows

    def fill(self, x: Tensor, state: Tensor | None, kind: torch.dtype) -> Tensor:
        """x, and the states before it, or zeros."""
        rows = self.blank(kind)
        if self.is_packed:
            rows[self.on_device] = x.reshape(self.shape.tokens, self.shape.channels).to(kind)
            if state is not None:
                rows[self.state_rows] = state.mT.reshape(-1, self.shape.channels).to(kind)
            return rows
        self.by_sequence(rows)[:, self.before :] = x
        if state is not None:
            self.by_sequence(rows)[:, : self.before] = state.mT
        return rows

    def tokens(self, rows: Tensor) -> Tensor:
        """The rows of tokens, as x has them."""
        if self.is_packed:
            return rows[self.on_device][None]
        return self.by_sequence(rows)[:, self.before :]

    def states(self, rows: Tensor, is_final: bool = False) -> Tensor:
        """The rows of the initial states, or of the final ones, as states have them."""
        if self.is_packed:
            chosen = rows[self.final_rows if is_final else self.state_rows]
            return chosen.view(self.shape.sequences, self.before, self.shape.channels).mT
        both = self.by_sequence(rows)
        return (both[:, self.shape.time :] if is_final else both[:, : self.before]).mT

    def add_final(self, rows: Tensor, dfinal: Tensor) -> None:
        """Adds the gradient of the final states to the rows that they are."""
        if self.is_packed:
            rows[self.final_rows] += dfinal.mT.reshape(-1, self.shape.channels)
        else:
            self.by_sequence(rows)[:, self.shape.time :] += dfinal.mT


def _convolve(rows: Tensor, own: slice, taps: Tensor, bias: Tensor | None) -> Tensor:
    """z of some rows."""
    first, last = own.start - len(taps) + 1, own.stop - len(taps) + 1
    z = rows[first:last] * taps[0]
    for tap in range(1, len(taps)):
        z.addcmul_(rows[first + tap : last + tap], taps[tap])
    return z if bias is None else z.add_(bias)


def forward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The parts of y, and the final states."""
    x, weight, bias, state, cu_seqlens, *_ = arguments
    *parts, final = outputs
    shape = Shape.of(problem)
    if _are_few(shape):
        few = _Rows(x, weight, state)
        y = _activate(few.preactivation(bias), shape.is_silu)
        for part, own in zip(parts, y.split(shape.parts, -1) if len(parts) > 1 else (y,), strict=True):
            part.copy_(own)
        if final.numel():
            final.copy_(few.last())
        return
    padded, kind = _Padded(shape, cu_seqlens, x.device, raises=True), shape.computed
    rows, taps, bias = padded.fill(x, state, kind), weight.to(kind).T, None if bias is None else bias.to(kind)
    for tokens, places in padded.chunks():
        y, own = padded.own(_activate(_convolve(rows, places, taps, bias), shape.is_silu), tokens, places)
        y = y[own]
        for begin, part in zip(shape.begins, parts, strict=False):
            if part.numel():
                target = part.view(shape.tokens, -1)[tokens].view(*y.shape[:-1], -1)
                target.copy_(y[..., begin : begin + part.shape[2]])
    if final.numel():
        final.copy_(padded.states(rows, is_final=True))


def _joined(upstream: list[Tensor | None], shape: Shape, x: Tensor) -> Tensor | None:
    """The gradients of the parts of y side by side, 0 where there is none."""
    if len(upstream) == 1:
        return upstream[0]
    joined = x.new_zeros(x.shape)  # and not torch.cat, which autocast would have in its own dtype
    for dy, part in zip(upstream, joined.split(shape.parts, -1), strict=True):
        if dy is not None:
            part.copy_(dy)
    return joined


def backward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The gradients that are needed: dz of every row, then what each row of tokens and states contributed to."""
    shape, need = Shape.of(problem), arguments[-1]
    *upstream, dfinal, x, weight, bias, state, cu_seqlens = arguments[: len(shape.parts) + 6]
    dx, dweight, dbias, dstate = outputs
    if _are_few(shape):
        dy = _joined(upstream, shape, x)
        before_rows = _differentiate(_Rows(x, weight, state), dy, dfinal, bias, shape.is_silu, need, outputs)
        if before_rows is not None and need & NEED_STATE:
            dstate.copy_(before_rows)
        return
    padded, kind, before = _Padded(shape, cu_seqlens, x.device, raises=False), shape.computed, shape.width - 1
    rows, taps, bias = padded.fill(x, state, kind), weight.to(kind).T, None if bias is None else bias.to(kind)
    dz = padded.blank(kind, before)
    upstream = [None if part is None else part.reshape(shape.tokens, part.shape[2]) for part in upstream]
    dtaps, dbiases = (torch.zeros(n, shape.channels, dtype=torch.float64, device=x.device) for n in (before + 1, 1))
    for tokens, places in padded.chunks():
        z, own = padded.own(_convolve(rows, places, taps, bias), tokens, places)
        z = z[own].contiguous()
        dy = torch.zeros_like(z)
        for begin, part in zip(shape.begins, upstream, strict=False):
            if part is not None and part.numel():
                dy[..., begin : begin + part.shape[1]] = part[tokens].view(*z.shape[:-1], -1)
        slopes = _through_activation(dy, z, shape.is_silu)
        target, own = padded.own(dz[places], tokens, places)
        target[own] = slopes
        if need & NEED_WEIGHT:
            for tap in range(before + 1):
                read = slice(places.start - before + tap, places.stop - before + tap)
                dtaps[tap] += (dz[places] * rows[read]).sum(0)
        if need & NEED_BIAS:
            dbiases += slopes.view(-1, shape.channels).sum(0)
    if need & (NEED_X | NEED_STATE):
        size = max(16, _CHUNK // max(1, shape.channels))
        for first in range(0, len(rows), size):  # x is needed no more: its gradient lies where it was
            last = min(first + size, len(rows))
            own = rows[first:last]
            torch.mul(dz[first:last], taps[before], out=own)
            for back in range(1, before + 1):
                own.addcmul_(dz[first + back : last + back], taps[before - back])
        if dfinal is not None and before:
            padded.add_final(rows, dfinal)
    for bit, target, gradient in (
        (NEED_X, dx, lambda: padded.tokens(rows)), (NEED_WEIGHT, dweight, lambda: dtaps.T),
        (NEED_BIAS, dbias, lambda: dbiases[0]), (NEED_STATE, dstate, lambda: padded.states(rows)),
    ):  # fmt: skip
        if need & bit and target.numel():
            target.copy_(gradient())


# ------------------------------------------------------------------------------------------- few tokens


def _add_up(windows: Tensor, taps: Tensor) -> Tensor:
    """Σ_j taps[j]·windows[j]: in two calls of torch, or a call for each tap, where that takes less time."""
    if windows.numel() <= _TINY:
        return (windows * taps[:, None, None]).sum(0)
    first, *others = taps.contiguous()
    total = windows[0] * first
    for window, tap in zip(windows[1:], others, strict=True):
        total.addcmul_(window, tap)
    return total


class _Rows:
    """Rows with their states before them, or zeros, [batch, W − 1 + time, channels], in the type of the sums."""

    def __init__(self, x: Tensor, weight: Tensor, state: Tensor | None, indices: Tensor | None = None) -> None:
        self.time, self.before, kind = x.shape[1], weight.shape[1] - 1, wide_dtype(x.dtype)
        self.taps = weight.to(kind).mT
        self.skipped = skipped_rows(indices, 0 if state is None else len(state))
        self.places = None
        if state is None:
            self.tokens = F.pad(x.to(kind), (0, 0, self.before, 0))
            return
        if indices is not None and self.skipped is not None:
            self.places = torch.where(self.skipped, 0, indices).long()
            state = state[self.places] if len(state) else state.new_zeros(len(x), *state.shape[1:])
        self.tokens = self.clear(torch.cat((state.mT.to(kind), x.to(kind)), 1))

    def clear(self, values: Tensor) -> Tensor:
        """Zeroes what belongs to skipped rows."""
        return values if self.skipped is None else values.masked_fill(self.skipped[:, None, None], 0)

    def preactivation(self, bias: Tensor | None) -> Tensor:
        z = _add_up(self.windows(self.tokens, self.time), self.taps)
        return z if bias is None else z.add_(bias)

    def windows(self, rows: Tensor, length: int) -> Tensor:
        """For each tap the rows that it is multiplied with, [W, batch, length, channels]."""
        return rows.unfold(1, length, 1).permute(1, 0, 3, 2)

    def last(self) -> Tensor:
        """The states after the tokens."""
        return self.tokens[:, self.time :].mT

    def gradient(self, dz: Tensor, dlast: Tensor | None) -> Tensor:
        """The gradient of the rows, from that of z and that of the states after them."""
        rows = F.pad(dz, (0, 0, self.before, self.before))
        gradient = _add_up(self.windows(rows, self.before + self.time), self.taps.flip(0))
        if dlast is not None:
            gradient[:, self.time :] += self.clear(dlast.mT)
        return gradient

    def weight_gradient(self, dz: Tensor) -> Tensor:
        return (self.windows(self.tokens, self.time) * dz).sum((1, 2)).mT


def _are_few(shape: Shape) -> bool:
    """Whether all tokens are computed at once: no chunks, and every row of the batch a sequence."""
    return not shape.is_packed and 0 < shape.tokens * shape.channels <= _AT_ONCE


def _differentiate(
    rows: _Rows, dy: Tensor | None, dlast: Tensor | None, bias: Tensor | None, is_silu: bool, need: int,
    outputs: tuple[Tensor, ...],
) -> Tensor | None:  # fmt: skip
    """Writes dx, dweight and dbias as they are needed; the gradient of the states before the rows, if it is."""
    dx, dweight, dbias, _ = outputs
    z = rows.preactivation(bias)
    dy = torch.zeros_like(z) if dy is None else dy.to(z.dtype)
    dz = rows.clear(_through_activation(dy, z, is_silu))
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
    outputs[0].copy_(rows.clear(_activate(rows.preactivation(bias), is_silu)))
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
