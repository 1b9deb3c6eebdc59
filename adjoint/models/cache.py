"""`Cache`: everything a `HybridLM` keeps of the tokens that have passed, in one object."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from adjoint.core.errors import ArgumentError
from adjoint.nn.cache import KeyValueCache, Places, RecurrentCache


class Cache:
    """The states of all layers after each of some sequences: recurrent, convolution, and keys and values.

    `HybridLM.new_cache` makes one; a call of the model with it goes on from where it is and overwrites it. What has passed
    is not differentiated.

        logits = model(ids, cache=cache).logits     # the next tokens of each sequence
        other = cache.copy()                        # go on in two ways
        kept = cache.snapshot()                     # recurrent states, and how long sequences are
        cache.rollback(kept)                        # forget what came after
        cache.select([2, 0])                        # some of the sequences
        Cache.join([cache, other])                  # the sequences of several caches

    Attributes:
        lengths: how many tokens of each sequence have passed.
    """

    def __init__(
        self, model: object, layers: Sequence[RecurrentCache | KeyValueCache], lengths: Sequence[int]
    ) -> None:
        self.layers, self.lengths = tuple(layers), tuple(lengths)
        self._model = model
        self._snapshots: list[Snapshot] = []

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    def belongs_to(self, model: object) -> bool:
        return self._model is model

    def place(self, shape: tuple[int, int], cu_seqlens: Int[Tensor, " bounds"] | None, device: torch.device) -> Places:
        """Where the tokens of a call belong, rows of [batch, time] or packed ones.

        Raises:
            ArgumentError: they are not of as many sequences as the cache holds.
        """
        batch, time = shape
        if cu_seqlens is None:
            counts = (time,) * batch
        else:
            bounds = cu_seqlens.tolist()
            counts = tuple(end - begin for begin, end in itertools.pairwise(bounds))
        if len(counts) != len(self):
            raise ArgumentError(
                f"HybridLM: cache holds {len(self)} sequences, and input_ids are of {len(counts)}; "
                f"give the next tokens of each, or select the sequences that go on"
            )
        past = torch.tensor(self.lengths, device=device, dtype=torch.int64)
        if cu_seqlens is None:
            rows = torch.arange(batch, device=device)[:, None].expand(batch, time)
            positions = past[:, None] + torch.arange(time, device=device)
        else:
            index = torch.arange(time, device=device)
            rows = torch.repeat_interleave(torch.tensor(counts, device=device), output_size=time)
            positions = (index - cu_seqlens[rows] + past[rows])[None]
            rows = rows[None]
        return Places(rows, positions, self.lengths, counts)

    def advance(self, places: Places) -> None:
        """Counts the tokens of a call."""
        self.lengths = tuple(past + count for past, count in zip(places.past, places.counts, strict=True))

    def reserve(self, capacity: int) -> None:
        """Memory for so many tokens of each sequence, at once."""
        for layer in self.layers:
            if isinstance(layer, KeyValueCache):
                layer.reserve(capacity)

    def copy(self) -> "Cache":
        """Another one in the same state, with memory of its own."""
        return Cache(self._model, [layer.copy() for layer in self.layers], self.lengths)

    def select(self, sequences: Sequence[int]) -> "Cache":
        """A cache of some of the sequences, in this order, with memory of its own.

        Raises:
            ArgumentError: there is no such sequence.
        """
        for sequence in sequences:
            if not 0 <= sequence < len(self):
                raise ArgumentError(f"Cache.select: sequences must be from 0 to {len(self) - 1}, got {sequence}")
        lengths = [self.lengths[sequence] for sequence in sequences]
        layers = []
        for layer in self.layers:
            device = layer.state.device if isinstance(layer, RecurrentCache) else layer.keys.device
            layers.append(layer.select(torch.tensor(list(sequences), dtype=torch.int64, device=device)))
        return Cache(self._model, layers, lengths)

    @staticmethod
    def join(caches: Sequence["Cache"]) -> "Cache":
        """A cache of the sequences of several caches of one model, with memory of its own.

        Raises:
            ArgumentError: there is none, or they are of several models.
        """
        if not caches:
            raise ArgumentError("Cache.join: caches must hold at least one")
        first = caches[0]
        if any(not cache.belongs_to(first._model) for cache in caches):
            raise ArgumentError("Cache.join: caches must be of one model, got caches of several")
        layers: list[RecurrentCache | KeyValueCache] = []
        for parts in zip(*(cache.layers for cache in caches), strict=True):
            kind = type(parts[0])
            layers.append(kind.join(parts))  # type: ignore[arg-type]
        return Cache(first._model, layers, [length for cache in caches for length in cache.lengths])

    def snapshot(self) -> "Snapshot":
        """The state now, to come back to. Keys and values are not copied: they stay where they are."""
        states = [layer.copy() if isinstance(layer, RecurrentCache) else None for layer in self.layers]
        kept = Snapshot(self.lengths, tuple(states))
        self._snapshots.append(kept)
        return kept

    def rollback(self, snapshot: "Snapshot") -> None:
        """Back to a snapshot of this cache; those taken after it are of tokens that are now forgotten.

        Raises:
            ArgumentError: the snapshot is of another cache, or of tokens that are forgotten.
        """
        if not any(kept is snapshot for kept in self._snapshots):
            raise ArgumentError(
                "Cache.rollback: snapshot must be one of this cache, taken before, and of tokens it has not rolled back"
            )
        while self._snapshots[-1] is not snapshot:
            self._snapshots.pop()
        for layer, state in zip(self.layers, snapshot.states, strict=True):
            if isinstance(layer, RecurrentCache) and state is not None:
                layer.restore(state)
        self.lengths = snapshot.lengths


class Snapshot:
    """What `Cache.rollback` needs to come back: the recurrent states, and the lengths of sequences."""

    def __init__(self, lengths: tuple[int, ...], states: tuple[RecurrentCache | None, ...]) -> None:
        self.lengths, self.states = lengths, states
