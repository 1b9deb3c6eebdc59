"""Tokens by chunks for the paths in plain PyTorch: `[chunks, heads, chunk, ...]`."""

import torch
from torch import Tensor

from adjoint.ops.gated_delta.packing import bounds, chunks_of


class Chunks:
    """The places of the chunks of all sequences: views for rows of a batch, an index of places for packed sequences."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None, chunk: int, raises: bool = False) -> None:
        self.batch, self.time = like.shape[:2]
        self.size, self.device = chunk, like.device
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            self.each = -(-self.time // chunk)
            inside = torch.arange(self.each * chunk, device=like.device) < self.time
            self.inside = inside.view(self.each, chunk).repeat(self.batch, 1)
            return
        self.starts, lengths = bounds(self.batch, self.time, cu_seqlens, raises)
        self.numbers = (lengths + chunk - 1) // chunk
        self.first = torch.cat((self.numbers.new_zeros(1), self.numbers.cumsum(0)))[:-1]
        places, inside = chunks_of(self.starts, lengths, chunk)
        self.places, self.inside = places.to(like.device), inside.to(like.device)

    def gather(self, x: Tensor, kind: torch.dtype, repeat: int = 1) -> Tensor:
        """[B, T, heads, ...] -> [chunks, heads, chunk, ...], each head `repeat` times; padding is 0."""
        rest = x.shape[2:]
        if self.packed:
            rows = x.flatten(0, 1)[self.places].to(kind)
            rows = rows.masked_fill_(~self.inside.view(*self.inside.shape, *(1,) * len(rest)), 0)
        else:
            padded = torch.zeros(self.batch, self.each * self.size, *rest, dtype=kind, device=self.device)
            padded[:, : self.time] = x
            rows = padded.view(self.batch * self.each, self.size, *rest)
        by_head = rows.transpose(1, 2)
        return by_head.repeat_interleave(repeat, 1) if repeat > 1 else by_head

    def tokens(self, chunks: Tensor, repeat: int = 1) -> Tensor:
        """The inverse of `gather`, summed over repeated heads; 0 for tokens of no sequence."""
        if repeat > 1:
            chunks = chunks.unflatten(1, (-1, repeat)).sum(2)
        moved = chunks.transpose(1, 2)
        if not self.packed:
            return moved.reshape(self.batch, self.each * self.size, *moved.shape[2:])[:, : self.time]
        out = moved.new_zeros(self.batch * self.time, *moved.shape[2:])
        out[self.places[self.inside]] = moved[self.inside]
        return out.unflatten(0, (self.batch, self.time))

    def decays(self, G: Tensor, diagonal: int) -> Tensor:
        """e^{G_i−G_j} for j up to i + diagonal, and 0 elsewhere and for padding, which has no G. Differences come
        first."""
        future = torch.ones(self.size, self.size, dtype=torch.bool, device=G.device).triu(1 + diagonal)
        absent = future | ~self.inside[:, None, :, None]
        return (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill_(absent, -torch.inf).exp_()

    def at(self, step: int) -> tuple[slice | Tensor, slice | Tensor]:
        """The sequences that have a chunk with this number, and the places of these chunks among all chunks."""
        if not self.packed:
            return slice(None), slice(step, None, self.each)
        sequences = (self.numbers > step).nonzero()[:, 0]
        return sequences.to(self.device), (self.first[sequences] + step).to(self.device)

    @property
    def steps(self) -> int:
        if not self.packed:
            return self.each
        return int(self.numbers.max()) if len(self.numbers) else 0

    @property
    def last(self) -> Tensor:
        """The place of the last token of each chunk, [chunks, 1, 1]."""
        return (self.inside.sum(-1) - 1)[:, None, None]

    @property
    def state_places(self) -> Tensor:
        """The places of the states at the beginnings of chunks. No two share a place."""
        if not self.packed:
            row = torch.arange(self.batch, device=self.device)
            step = torch.arange(self.each, device=self.device)
            return ((row * self.time // self.size + row)[:, None] + step).flatten()
        sequence = torch.repeat_interleave(torch.arange(len(self.starts), device="cpu"), self.numbers)
        step = torch.arange(len(sequence), device="cpu") - self.first[sequence]
        return (self.starts[sequence] // self.size + sequence + step).to(self.device)


def state_count(tokens: int, sequences: int, chunk: int) -> int:
    """The number of places for the states at the beginnings of chunks."""
    return tokens // chunk + sequences
