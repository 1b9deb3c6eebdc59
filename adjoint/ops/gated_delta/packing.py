"""The places of sequences, and the groups of them that the eager path computes at a time.

All sequences are parts of one flat token axis: the rows of a batch one after the other, or the sequences into which
`cu_seqlens` cuts its only row. Chunks and segments are counted from the start of their sequence.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.launch import refuse_capture
from adjoint.device.sequences import wrong_bounds
from adjoint.ops.gated_delta.arguments import SEQUENCES_OUT_OF_ORDER

CHUNK = 64
"""The number of tokens of a chunk. Chunks are counted from the start of a sequence."""

SEGMENT = 1024
"""The number of tokens between the states that a forward saves for its backward, from the start of a sequence."""

_ROWS = 2**15
"""The most tokens times value heads that are computed at once. It bounds intermediate memory and keeps it in caches."""


@dataclass(frozen=True)
class Group:
    """Sequences of similar length, longest first, and a range of key heads, which are computed together.

    Attributes:
        chunk: the size of a chunk, a power of two: `CHUNK`, or less if every sequence fits into one smaller chunk.
        sequences: the numbers of the sequences.
        starts: the first token of each.
        lengths: the tokens of each, none of them 0.
        longest: the first of the lengths.
        first_head: the first key head.
        heads: the number of key heads.
    """

    chunk: int
    sequences: Tensor
    starts: Tensor
    lengths: Tensor
    longest: int
    first_head: int
    heads: int

    @property
    def segments(self) -> int:
        return -(-self.longest // SEGMENT)

    def active(self, segment: int) -> int:
        """How many sequences, from the first, reach a segment."""
        return int((self.lengths > segment * SEGMENT).sum()) if segment else len(self.lengths)

    @cached_property
    def spacing(self) -> int | None:
        """The distance between sequences of one length that follow each other evenly, as the rows of a batch do; else
        None.

        Such sequences are read and written as views, so no table of places goes to the device.
        """
        number, length = len(self.sequences), self.longest
        if number == 1:
            return length
        distance = int(self.starts[1] - self.starts[0])
        even = (self.starts.diff() == distance).all() and (self.sequences.diff() == 1).all()
        return distance if even and int(self.lengths[-1]) == length else None

    def numbers(self, device: torch.device) -> slice | Tensor:
        """The numbers of the sequences, as an index."""
        if self.spacing is None:
            return self.sequences.to(device)
        first = int(self.sequences[0])
        return slice(first, first + len(self.sequences))

    def saved(self, segment: int, device: torch.device) -> Tensor:
        """The places of the saved states at the beginning of a segment that is not the first. No two share a place."""
        if self.spacing is None:
            starts = self.starts[: self.active(segment)].to(device)
        else:
            starts = torch.arange(len(self.starts), device=device) * self.spacing + int(self.starts[0])
        return starts // SEGMENT + segment - 1


def saved_states(tokens: int) -> int:
    """The most states that a forward over this many tokens saves. It saves none before the first segment of a sequence.

    A sequence saves ⌈length / SEGMENT⌉ − 1 states, from place ⌊start / SEGMENT⌋ on, so sequences never share a place.
    A single sequence with all tokens has all places.
    """
    return max(tokens - 1, 0) // SEGMENT


def bounds(rows: int, time: int, cu_seqlens: Tensor | None, raises: bool) -> tuple[Tensor, Tensor]:
    """The start of each sequence on the flat token axis and its length, on the CPU. Wrong bounds are put in order.

    On an accelerator this waits for `cu_seqlens`, because the number of chunks depends on its values.
    """
    if cu_seqlens is None:
        starts = torch.arange(rows, device="cpu") * time
        return starts, torch.full_like(starts, time)
    if raises:
        report(SEQUENCES_OUT_OF_ORDER, cu_seqlens, wrong_bounds(cu_seqlens, time))
    refuse_capture(cu_seqlens.device, "reading cu_seqlens in plain PyTorch", "plans on kernels can be recorded")
    ends = cu_seqlens.cpu().long().clamp(0, time).cummax(0).values
    return ends[:-1], ends[1:] - ends[:-1]


def groups(starts: Tensor, lengths: Tensor, key_heads: int, value_heads: int) -> Iterator[Group]:
    """Divides all sequences that are not empty into groups whose intermediate results have a bounded size."""
    if key_heads == 0:
        return
    lengths, order = lengths.sort(descending=True, stable=True)
    per_key_head = value_heads // key_heads
    sizes = lengths.tolist()
    begin, count = 0, bisect_left(sizes, True, key=lambda size: size == 0)
    while begin < count:
        longest = sizes[begin]
        chunk = min(CHUNK, 1 << (longest - 1).bit_length())
        padded = min(SEGMENT, -(-longest // chunk) * chunk)
        heads = max(1, min(key_heads, _ROWS // max(1, padded * per_key_head)))
        fitting = max(1, _ROWS // max(1, padded * per_key_head * heads))
        # A sequence of less than half the length would be padding for the most part: it waits for a group of its own.
        half = min(longest, SEGMENT) / 2
        dissimilar = bisect_left(sizes, True, begin, count, key=lambda size: size <= half)
        end = min(begin + fitting, dissimilar)
        members = order[begin:end]
        of_members = starts[members], lengths[begin:end], longest
        for first in range(0, key_heads, heads):
            yield Group(chunk, members, *of_members, first, min(heads, key_heads - first))
        begin = end


class Tokens:
    """The tokens of one segment of a group, as `[steps, sequences, chunk]`."""

    def __init__(self, group: Group, segment: int, device: torch.device) -> None:
        self.number, self.chunk = group.active(segment), group.chunk
        past = segment * SEGMENT
        self.start, self.length = int(group.starts[0]) + past, min(group.longest - past, SEGMENT)
        self.spacing, self.steps = group.spacing, -(-self.length // self.chunk)
        if self.spacing is None:
            lengths = (group.lengths[: self.number] - past).clamp_max(SEGMENT)
            starts = group.starts[: self.number] + past
            place = torch.arange(self.steps * self.chunk, device="cpu")
            inside = place[None] < lengths[:, None]
            places = torch.where(inside, starts[:, None] + place[None], 0)

            def by_step(x: Tensor) -> Tensor:
                return x.view(self.number, self.steps, self.chunk).transpose(0, 1).contiguous().to(device)

            self.inside, self.places = by_step(inside), by_step(places)

    def _parts(self, x: Tensor, chunks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of `[tokens, heads, ...]` and of `[steps, sequences, heads, chunk, ...]` with the same tokens: first
        the whole chunks, and then the tail."""
        assert self.spacing is not None
        whole, tail = divmod(self.length, self.chunk)
        step, head, *rest = x.stride()
        first = x.storage_offset() + self.start * step
        for begin, steps, size in ((0, whole, self.chunk), (whole, 1, tail)):
            if steps and size:
                shape = (steps, self.number, x.shape[1], size, *x.shape[2:])
                strides = (self.chunk * step, self.spacing * step, head, step, *rest)
                rows = x.as_strided(shape, strides, first + begin * self.chunk * step)
                yield rows, chunks if not tail else chunks[begin : begin + steps, :, :, :size]

    def gather(self, x: Tensor, wide: torch.dtype) -> Tensor:
        """[tokens, heads, ...] -> [steps, sequences, heads, chunk, ...], in another dtype; padding is 0."""
        shape = (self.steps, self.number, x.shape[1], self.chunk, *x.shape[2:])
        result = torch.empty(shape, dtype=wide, device=x.device)
        if self.spacing is None:
            rows = x.index_select(0, self.places.view(-1)).unflatten(0, (self.steps, self.number, self.chunk))
            result.copy_(rows.transpose(2, 3))
            padding = ~self.inside.view(self.steps, self.number, 1, self.chunk, *(1,) * (x.dim() - 2))
            return result.masked_fill_(padding, 0)
        if self.length % self.chunk:
            result[-1].zero_()
        for rows, chunks in self._parts(x, result):
            chunks.copy_(rows)
        return result

    def scatter(self, out: Tensor, chunks: Tensor) -> None:
        """The inverse of `gather`: writes the group's own tokens into `[tokens, heads, ...]`, rounded to its dtype."""
        if self.spacing is None:
            out[self.places[self.inside]] = chunks.transpose(2, 3)[self.inside].to(out.dtype)
            return
        for rows, part in self._parts(out, chunks):
            rows.copy_(part)


def chunks_of(starts: Tensor, lengths: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The places `[chunks, chunk]` on the flat token axis of all chunks of all sequences, and which of them are inside
    their sequence. The others point to place 0."""
    numbers = (lengths + chunk - 1) // chunk
    sequence = torch.repeat_interleave(torch.arange(len(starts), device="cpu"), numbers)
    first = torch.cat((numbers.new_zeros(1), numbers.cumsum(0)))[:-1]
    begin = (torch.arange(len(sequence), device="cpu") - first[sequence]) * chunk
    offset = begin[:, None] + torch.arange(chunk, device="cpu")[None]
    inside = offset < lengths[sequence][:, None]
    return torch.where(inside, starts[sequence][:, None] + offset, 0), inside
