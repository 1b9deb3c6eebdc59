"""The convolution of batches in plain PyTorch, where every row is a sequence: a chunk of tokens at a time.

What lies between input and output stays in the cache, in memory that all chunks share.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.ops.conv.arguments import NEED_BIAS, NEED_STATE, NEED_WEIGHT, NEED_X
from adjoint.ops.conv.shape import Shape
from adjoint.ops.conv.windows import add_taps, multiply_windows, taps_of

CHUNK = 2**16
"""Numbers of a chunk."""

_BOUND = 2048.0
"""Past it silu is its asymptote in every type, and 0 or −0 below; infinities would give 0·∞."""


_PIECE, _VECTORS = 2**16, 128
"""Numbers that torch gives to one thread or in halves to two, and a multiple of what its vector loops take at a time on
two threads."""


def activate(z: Tensor, is_silu: bool, out: Tensor | None = None) -> Tensor:
    """y, of a contiguous z, which is lost; into other contiguous memory of its type where it is given.

    torch computes the exponentials of the last elements of a loop in other instructions than the rest. No element is
    among the last here, so that each has the same bits wherever it lies.
    """
    if not is_silu:
        return z
    count = z.clamp_(min=-_BOUND).numel()
    if count <= _PIECE and count % _VECTORS == 0:
        return torch.ops.aten.silu.out(z, out=z if out is None else out)  # type: ignore[no-any-return]
    y = torch.constant_pad_nd(z.flatten(), (0, -count % _VECTORS))
    for piece in y.split(_PIECE):
        F.silu(piece, inplace=True)
    y = y[:count].view(z.shape)
    return y if out is None else out.copy_(y)


def through_activation(dy: Tensor, z: Tensor, is_silu: bool) -> Tensor:
    """dz, from dy of the type of z; z is lost."""
    return torch.ops.aten.silu_backward(dy, z.clamp_(-_BOUND, _BOUND)) if is_silu else dy  # type: ignore[no-any-return]


class Chunk(NamedTuple):
    """Whole rows of a batch, or tokens of one row."""

    rows: slice
    tokens: slice

    def of(self, x: Tensor) -> Tensor:
        """Its part of a tensor [batch, time, …]; itself where that is all of it, which costs nothing."""
        is_all = self.rows.stop - self.rows.start == x.shape[0] and self.tokens.stop - self.tokens.start == x.shape[1]
        return x if is_all else x[self.rows, self.tokens]


def _chunks(shape: Shape) -> Iterator[Chunk]:
    """From the last tokens of a row to its first: a gradient needs those of the tokens after it."""
    size = max(16, CHUNK // max(1, shape.channels))
    if shape.time <= size:
        count = max(1, size // max(1, shape.time))
        every = slice(0, shape.time)
        yield from (Chunk(slice(row, min(row + count, shape.batch)), every) for row in range(0, shape.batch, count))
        return
    for row in range(shape.batch):
        for end in range(shape.time, 0, -size):
            yield Chunk(slice(row, row + 1), slice(max(0, end - size), end))


class Sequences:
    """The rows of a batch with their states before them, or zeros, in the type of the sums."""

    def __init__(self, shape: Shape, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None) -> None:
        self.shape, self.x, self.state, self.before, self.kind = shape, x, state, shape.width - 1, shape.computed
        self.taps = taps_of(weight, self.kind)
        self.bias = None if bias is None else bias.to(self.kind)
        self._memory: Tensor | None = None

    def rows(self, chunk: Chunk) -> Tensor:
        """The tokens of a chunk and the W − 1 before them."""
        begin = chunk.tokens.start - self.before
        if begin >= 0 and chunk.tokens.start > 0:
            return self.x[chunk.rows, begin : chunk.tokens.stop].to(self.kind)
        tokens = chunk.of(self.x) if chunk.tokens.start == 0 else self.x[chunk.rows, : chunk.tokens.stop]
        if self.state is None:
            return torch.constant_pad_nd(tokens.to(self.kind), (0, 0, -begin, 0))
        state = self.state[chunk.rows].mT[:, chunk.tokens.start :]
        return torch.cat((state.to(self.kind), tokens.to(self.kind)), 1)  # autocast would join no 16-bit types

    def preactivation(self, rows: Tensor) -> Tensor:
        """z of a chunk, from its rows; it lies where that of the chunk before did."""
        shape = (rows.shape[0], rows.shape[1] - self.before, rows.shape[2])
        if self._memory is None or self._memory.shape != shape:
            self._memory = rows.new_empty(shape)
        return add_taps(rows, self.taps, self.bias, out=self._memory)

    def final(self) -> Tensor:
        """The states after the last tokens, [batch, channels, W − 1]."""
        time = self.shape.time
        if time >= self.before:
            return self.x[:, time - self.before :].mT
        return self.rows(Chunk(slice(0, len(self.x)), slice(0, time)))[:, time:].mT


def forward(sequences: Sequences, parts: list[Tensor], final: Tensor) -> None:
    """The parts of y, and the final states where there is memory for them."""
    shape = sequences.shape
    for chunk in _chunks(shape) if shape.tokens and shape.channels else ():
        z = sequences.preactivation(sequences.rows(chunk))
        if len(parts) == 1 and shape.is_silu and parts[0].dtype == z.dtype:
            activate(z, True, chunk.of(parts[0]))
            continue
        y = activate(z, shape.is_silu)
        for begin, part in zip(shape.begins, parts, strict=False):
            chunk.of(part).copy_(y[..., begin : begin + part.shape[2]])
    if final.numel():
        final.copy_(sequences.final())


class _Sums:
    """Sums over all chunks; those of several are added in float64."""

    def __init__(self) -> None:
        self._total: Tensor | None = None

    def add(self, part: Tensor) -> None:
        self._total = part if self._total is None else self._total.double() + part

    def write(self, out: Tensor) -> None:
        if self._total is None:
            out.zero_()
        else:
            out.copy_(self._total)


def backward(
    sequences: Sequences, upstream: list[Tensor | None], dfinal: Tensor | None, need: int, outputs: tuple[Tensor, ...]
) -> None:
    """The gradients that are needed."""
    dx, dweight, dbias, dstate = outputs
    shape, before, kind = sequences.shape, sequences.before, sequences.kind
    taps, of_taps, of_bias = sequences.taps[::-1], _Sums(), _Sums()
    last = None if dfinal is None else dfinal.mT.to(kind)
    after: Tensor | None = None  # dz of the tokens after a chunk of the same row, and zeros after a row
    for chunk in _chunks(shape) if shape.tokens and shape.channels else ():
        rows = sequences.rows(chunk)
        z = sequences.preactivation(rows)
        dz = through_activation(_upstream(chunk, upstream, shape, z), z, shape.is_silu)
        if need & NEED_WEIGHT:
            of_taps.add(multiply_windows(rows, dz))
        if need & NEED_BIAS:
            of_bias.add(dz.sum((0, 1)))
        if not need & (NEED_X | NEED_STATE):
            continue
        if after is None or chunk.tokens.stop == shape.time:
            slopes = torch.constant_pad_nd(dz, (0, 0, 0, before))
        else:
            slopes = torch.cat((dz, after), 1)
        after = slopes[:, :before]
        into = chunk.of(dx) if need & NEED_X and dx.dtype == kind else None
        gradient = add_taps(slopes, taps, out=into)
        kept = max(chunk.tokens.start, shape.time - before)  # the first token of the chunk that is in the final state
        if last is not None and kept < chunk.tokens.stop:
            begin = kept - shape.time + before
            gradient[:, kept - chunk.tokens.start :] += last[chunk.rows, begin : begin + chunk.tokens.stop - kept]
        if need & NEED_X and into is None:
            chunk.of(dx).copy_(gradient)
        if need & NEED_STATE and before and chunk.tokens.start == 0:
            gradient = add_taps(torch.constant_pad_nd(after, (0, 0, before, 0)), taps)
            if last is not None and shape.time < before:
                gradient[:, shape.time :] += last[chunk.rows, : before - shape.time]
            dstate[chunk.rows] = gradient.mT
    if need & NEED_WEIGHT:
        of_taps.write(dweight.mT)
    if need & NEED_BIAS:
        of_bias.write(dbias)
    if need & NEED_STATE and not shape.tokens:  # the final state is the initial one
        dstate.copy_(torch.zeros_like(dstate) if dfinal is None else dfinal)


def _upstream(chunk: Chunk, upstream: list[Tensor | None], shape: Shape, z: Tensor) -> Tensor:
    """The gradients of the parts of y side by side, 0 where there is none, in the type of z."""
    if len(upstream) == 1 and upstream[0] is not None:
        return chunk.of(upstream[0]).to(z.dtype)
    dy = torch.zeros_like(z)
    for begin, part in zip(shape.begins, upstream, strict=False):
        if part is not None:
            dy[..., begin : begin + part.shape[2]] = chunk.of(part)
    return dy
