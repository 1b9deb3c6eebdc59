"""The convolution in plain PyTorch: float64 arithmetic, rounded once, a chunk of tokens at a time, so that what lies
between input and output stays in the cache."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.launch import refuse_capture
from adjoint.core.problem import Problem
from adjoint.device.sequences import out_of_range, repeated, wrong_bounds
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

_CHUNK = 2**16
"""Numbers of a chunk."""

_BOUND = 2048.0
"""Past it silu is its asymptote in every type, and 0 or −0 below; infinities would give 0·∞."""


def _activate(z: Tensor, is_silu: bool) -> Tensor:
    return F.silu(z.clamp_(min=-_BOUND), inplace=True) if is_silu else z


def _through_activation(dy: Tensor, z: Tensor, is_silu: bool) -> Tensor:
    """dz."""
    return torch.ops.aten.silu_backward(dy, z.clamp_(-_BOUND, _BOUND)) if is_silu else dy  # type: ignore[no-any-return]


class _Sequences:
    """Where sequences begin and end on the axis of all tokens.

    Bounds of packed ones are read on the CPU, those out of order as their running maximum. Where every row of a batch
    is a sequence, nothing goes from one device to the other.
    """

    def __init__(self, shape: Shape, cu_seqlens: Tensor | None, device: torch.device, raises: bool) -> None:
        self.shape, self.device, self.bounds = shape, device, None
        if cu_seqlens is None:
            return
        if raises:
            report(SEQUENCES_OUT_OF_ORDER, cu_seqlens, wrong_bounds(cu_seqlens, shape.tokens))
        refuse_capture(device, "reading cu_seqlens in plain PyTorch", "plans on kernels can be recorded")
        self.bounds = cu_seqlens.cpu().long().clamp(0, shape.tokens).cummax(0).values
        self.lengths = self.bounds.diff()

    def at(self, age: int, first: int, last: int, from_end: bool = False) -> tuple[Tensor, Tensor]:
        """The sequences of the tokens from `first` to `last` that have so many of their sequence before them (after
        them, `from_end`), and the places of these tokens, counted from `first`."""
        shape = self.shape
        if self.bounds is None:
            age = shape.time - 1 - age if from_end else age
            if not 0 <= age < shape.time:
                return (torch.empty(0, dtype=torch.long, device=self.device),) * 2
            low = max(0, -(-(first - age) // shape.time))
            high = min(shape.batch, -(-(last - age) // shape.time))
            numbers = torch.arange(low, max(low, high), device=self.device)
            return numbers, numbers * shape.time + (age - first)
        tokens = self.bounds[1:] - 1 - age if from_end else self.bounds[:-1] + age
        low, high = torch.searchsorted(tokens, torch.tensor([first, last])).tolist()
        numbers = low + (self.lengths[low:high] > age).nonzero().flatten()
        return numbers.to(self.device), (tokens[numbers] - first).to(self.device)

    def shorter(self, than: int) -> tuple[Tensor, Tensor]:
        """The sequences with fewer tokens, and how many these have."""
        if self.bounds is None:
            count = self.shape.batch if self.shape.time < than else 0
            numbers = torch.arange(count, device=self.device)
            return numbers, torch.full_like(numbers, self.shape.time)
        numbers = (self.lengths < than).nonzero().flatten()
        return numbers.to(self.device), self.lengths[numbers].to(self.device)


class _Chunks:
    """The tokens of a problem, a chunk at a time, in float64."""

    def __init__(self, shape: Shape, x: Tensor, state: Tensor | None, sequences: _Sequences) -> None:
        self.shape, self.state, self.sequences = shape, state, sequences
        self.rows = x.reshape(shape.tokens, shape.channels)
        self.size = max(16, _CHUNK // max(1, shape.channels))

    def bounds(self) -> Iterator[tuple[int, int]]:
        """The first token of each chunk, and the end."""
        for first in range(0, self.shape.tokens, self.size):
            yield first, min(first + self.size, self.shape.tokens)

    def taps(self, first: int, last: int) -> list[Tensor]:
        """What each tap reads for the tokens of a chunk, the oldest first."""
        before = self.shape.width - 1
        start = max(0, first - before)
        rows = self.rows[start:last].double()
        if first - start < before:
            rows = torch.cat((rows.new_zeros(before - (first - start), rows.shape[1]), rows))
        taps = [rows[tap : tap + last - first] for tap in range(before + 1)]
        for age in range(before):
            numbers, places = self.sequences.at(age, first, last)
            if len(numbers) == 0:
                continue
            for tap in range(before - age):  # these reach back past the first token of the sequence
                if taps[tap].untyped_storage().data_ptr() == rows.untyped_storage().data_ptr():
                    taps[tap] = taps[tap].clone()
                column = None if self.state is None else self.state[numbers, :, age + tap]
                taps[tap][places] = rows.new_zeros(()) if column is None else column.double()
        return taps


def _preactivation(taps: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    z = taps[0] * weight[0]
    for tap in range(1, len(taps)):
        z.addcmul_(taps[tap], weight[tap])
    return z if bias is None else z.add_(bias)


def forward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The parts of y, and the final states."""
    x, weight, bias, state, cu_seqlens, *_ = arguments
    *parts, final = outputs
    shape = Shape.of(problem, len(parts))
    sequences = _Sequences(shape, cu_seqlens, x.device, raises=True)
    chunks, begins = _Chunks(shape, x, state, sequences), shape.begins
    taps_of, bias = weight.double().T, None if bias is None else bias.double()
    rows = [part.view(shape.tokens, -1) if part.numel() else part for part in parts]
    for first, last in chunks.bounds() if shape.channels else ():
        y = _activate(_preactivation(chunks.taps(first, last), taps_of, bias), shape.is_silu)
        for number, part in enumerate(rows):
            if part.numel():
                part[first:last] = y[:, begins[number] : begins[number + 1]]
    if final.numel():
        _write_final_states(final, chunks)


def _write_final_states(final: Tensor, chunks: _Chunks) -> None:
    sequences, before = chunks.sequences, final.shape[2]
    numbers, lengths = sequences.shorter(before)
    for column in range(before):
        own, places = sequences.at(before - 1 - column, 0, chunks.shape.tokens, from_end=True)
        if chunks.state is None:
            final[numbers, :, column] = 0
        else:  # of sequences that have no such token, an earlier column of the initial state
            final[numbers, :, column] = chunks.state[numbers, :, (lengths + column).clamp_max(before - 1)]
        final[own, :, column] = chunks.rows[places]


def backward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The gradients that are needed; chunks from the last to the first, with dz of the W − 1 tokens after each."""
    need, part_count = arguments[-1], len(arguments) - len(problem.options) - 6
    *upstream, dfinal, x, weight, bias, state, cu_seqlens = arguments[: part_count + 6]
    dx, dweight, dbias, dstate = outputs
    shape = Shape.of(problem, part_count)
    before, begins = shape.width - 1, shape.begins
    sequences = _Sequences(shape, cu_seqlens, x.device, raises=False)
    chunks, taps_of = _Chunks(shape, x, state, sequences), weight.double().T
    wide = {"dtype": torch.float64, "device": x.device}
    dtaps, dbiases = torch.zeros(taps_of.shape, **wide), torch.zeros(shape.channels, **wide)
    dstates = torch.zeros(dstate.shape if need & NEED_STATE else 0, **wide)
    later = torch.zeros(before, shape.channels, **wide)
    bias = None if bias is None else bias.double()
    for first, last in reversed(list(chunks.bounds())) if shape.channels else ():
        taps = chunks.taps(first, last)
        dy = torch.zeros(last - first, shape.channels, **wide)
        for number, part in enumerate(upstream):
            if part is not None and part.numel():
                dy[:, begins[number] : begins[number + 1]] = part.reshape(shape.tokens, -1)[first:last]
        dz = _through_activation(dy, _preactivation(taps, taps_of, bias), shape.is_silu)
        if need & NEED_WEIGHT:
            for tap in range(before + 1):
                dtaps[tap] += torch.linalg.vecdot(dz, taps[tap], dim=0)
        if need & NEED_BIAS:
            dbiases += dz.sum(0)
        if need & NEED_STATE:
            for age in range(before):
                numbers, places = sequences.at(age, first, last)
                for tap in range(before - age if len(numbers) else 0):
                    dstates[numbers, :, age + tap] += taps_of[tap] * dz[places]
        reach = torch.cat((dz, later))
        if need & NEED_X:
            total = dz * taps_of[before]
            for back in range(1, before + 1):
                source = reach[back : back + last - first]
                for age in range(back):
                    numbers, places = sequences.at(age, first + back, last + back)
                    if len(numbers):  # they are of another sequence than the tokens so far before them
                        source = source.clone()
                        source[places] = 0
                total.addcmul_(source, taps_of[before - back])
            for column in range(before if dfinal is not None else 0):
                numbers, places = sequences.at(before - 1 - column, first, last, from_end=True)
                if len(numbers):
                    total[places] += dfinal[numbers, :, column].double()
            dx.view(shape.tokens, -1)[first:last] = total
        later = reach[:before]
    if need & NEED_STATE and dfinal is not None and before:
        numbers, lengths = sequences.shorter(before)
        for column in range(before):
            kept = lengths + column < before
            dstates[numbers[kept], :, (lengths + column)[kept]] += dfinal[numbers[kept], :, column].double()
    for bit, target, gradient in (
        (NEED_WEIGHT, dweight, dtaps.T), (NEED_BIAS, dbias, dbiases), (NEED_STATE, dstate, dstates)
    ):  # fmt: skip
        if need & bit:
            target.copy_(gradient)


# ------------------------------------------------------------------------------------------------ steps


class _Rows:
    """The rows of a step with their states before them, in float64, [batch, W − 1 + time, channels]."""

    def __init__(self, x: Tensor, state: Tensor, indices: Tensor | None) -> None:
        self.skipped = None if indices is None else out_of_range(indices, len(state)) | (indices < 0)
        self.places = None if self.skipped is None else torch.where(self.skipped, 0, indices).long()
        own = state
        if self.places is not None:
            own = state[self.places] if len(state) else state.new_zeros(len(x), *state.shape[1:])
        self.tokens = self.clear(torch.cat((own.transpose(1, 2), x), 1).double())
        self.state = own

    def clear(self, values: Tensor) -> Tensor:
        """Zeroes what belongs to skipped rows."""
        return values if self.skipped is None else values.masked_fill_(self.skipped[:, None, None], 0)

    def preactivation(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        time = self.tokens.shape[1] - weight.shape[1] + 1
        taps = [self.tokens[:, tap : tap + time] for tap in range(weight.shape[1])]
        return _preactivation(taps, weight.double().T, None if bias is None else bias.double())


def step(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """y, and the rows' new states or, in place, the pool's own."""
    x, weight, bias, state, indices, is_silu, checking = arguments
    if indices is not None:
        report(STATE_INDEX_OUT_OF_RANGE, indices, out_of_range(indices, len(state)))
        if checking:
            report(STATE_INDEX_REPEATED, indices, repeated(indices))
    rows = _Rows(x, state, indices)
    outputs[0].copy_(rows.clear(_activate(rows.preactivation(weight, bias), is_silu)))
    new_state = rows.tokens[:, x.shape[1] :].transpose(1, 2).to(state.dtype)
    if not problem.op.endswith("in_place"):
        outputs[1].copy_(new_state)
    elif rows.places is None or rows.skipped is None:
        state.copy_(new_state)
    else:
        state[rows.places[~rows.skipped]] = new_state[~rows.skipped]


def step_backward(problem: Problem, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """The gradients that are needed; rows that share a state add up."""
    dy, dnew_state, x, weight, bias, state, indices, is_silu, _checking, need = arguments
    dx, dweight, dbias, dstate = outputs
    rows, time, before = _Rows(x, state, indices), x.shape[1], weight.shape[1] - 1
    dy = torch.zeros(x.shape, dtype=torch.float64, device=x.device) if dy is None else dy.double()
    dz = rows.clear(_through_activation(dy, rows.preactivation(weight, bias), is_silu).clone())
    dtokens = torch.zeros_like(rows.tokens)
    for tap in range(before + 1):
        dtokens[:, tap : tap + time].addcmul_(dz, weight[:, tap].double())
        if need & NEED_WEIGHT:
            dweight[:, tap] = (dz * rows.tokens[:, tap : tap + time]).sum((0, 1))
    if dnew_state is not None:
        dtokens[:, time:] += rows.clear(dnew_state.transpose(1, 2).double().clone())
    if need & NEED_BIAS:
        dbias.copy_(dz.sum((0, 1)))
    if need & NEED_X:
        dx.copy_(dtokens[:, before:])
    if need & NEED_STATE:
        gradient = dtokens[:, :before].transpose(1, 2)
        if rows.places is not None:
            pool = torch.zeros(state.shape, dtype=torch.float64, device=state.device)
            gradient = pool.index_add_(0, rows.places, gradient) if len(state) else pool
        dstate.copy_(gradient)
