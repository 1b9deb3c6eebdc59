"""`Cache`: the states of all layers of a `HybridLM` after earlier tokens, in one object."""

import itertools
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor

from adjoint.core.arguments import require_integer
from adjoint.core.errors import ArgumentError
from adjoint.nn.cache import KeyValueCache, Places, RecurrentCache
from adjoint.nn.tokens import require_count

if TYPE_CHECKING:
    from adjoint.models.decoding import Decoder


class Cache:
    """The states of all layers for some sequences: recurrent states, those of convolutions, and keys and values.

    `HybridLM.new_cache` makes one. A call of the model with a cache goes on after its tokens and overwrites it, for all
    of its sequences or, with `slots`, for some. So the sequences of a batch can come and go. Earlier tokens get no
    gradients.

        model(ids, cache=cache)                     # the next tokens of each sequence
        model(ids, cache=cache, slots=[3, 0])       # of two of them
        cache.clear([3])                            # another sequence may begin there
        other = cache.copy()                        # go on in two ways
        snapshot = cache.snapshot()                 # recurrent states, and how long sequences are
        cache.rollback(snapshot)                    # forget what came after

    Attributes:
        lengths: the number of earlier tokens of each sequence.
        dtype, device: those of the model when the cache was made.
        decoder: the decoder that `HybridLM.decoder` has made for this cache.
    """

    def __init__(
        self,
        model: object,
        layers: Sequence[RecurrentCache | KeyValueCache],
        lengths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.lengths = tuple(layers), tuple(lengths)
        self.dtype, self.device = dtype, device
        self._model = model
        self.decoder: Decoder | None = None
        self._snapshots: list[int] = []
        self._next = 0

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.lengths)

    def belongs_to(self, model: object) -> bool:
        return self._model is model

    def place(
        self, input_ids: Int[Tensor, "batch time"], cu_seqlens: Tensor | None, slots: Sequence[int] | None
    ) -> Places:
        """The places of a call's tokens, which are rows [batch, time] or packed.

        Raises:
            ArgumentError: the number of sequences is not that of the cache, or that of the slots.
        """
        (batch, time), device = input_ids.shape, input_ids.device
        counts = (time,) * batch
        if cu_seqlens is not None:
            counts = tuple(end - begin for begin, end in itertools.pairwise(cu_seqlens.tolist()))
        self.check(len(counts), slots)
        past = self.lengths if slots is None else tuple(self.lengths[slot] for slot in slots)
        sequence = torch.arange(batch, device=device)[:, None].expand(batch, time)
        offset = torch.arange(time, device=device).expand(batch, time)
        if cu_seqlens is not None:
            sequence = torch.repeat_interleave(
                torch.tensor(counts, dtype=torch.int64, device=device), output_size=time
            )[None]
            offset = offset - cu_seqlens[sequence]
        positions = torch.tensor(past, dtype=torch.int64, device=device)[sequence] + offset
        if slots is None:
            return Places(sequence, positions, past, counts)
        chosen = torch.tensor(tuple(slots), dtype=torch.int64, device=device)
        return Places(chosen[sequence], positions, past, counts, chosen)

    def check(self, sequences: int, slots: Sequence[int] | None) -> None:
        """Raises ArgumentError if a call's number of sequences is not that of the cache, or that of the slots."""
        if slots is None:
            if sequences != len(self):
                raise ArgumentError(
                    f"HybridLM: cache holds {len(self)} sequences, and input_ids are of {sequences}; "
                    f"give the next tokens of each, or slots"
                )
            return
        self._require(slots)
        if sequences != len(slots) or len(set(slots)) != len(slots):
            raise ArgumentError(
                f"HybridLM: slots must name another slot for each of {sequences} sequences, got {list(slots)}"
            )

    def _require(self, slots: Sequence[int]) -> None:
        if not isinstance(slots, Collection):
            raise ArgumentError(f"Cache: slots must be a list of them, got {slots!r}")
        for slot in slots:
            if not 0 <= require_integer("Cache", "slots", slot) < len(self):
                raise ArgumentError(f"Cache: slots must be from 0 to {len(self) - 1}, got {slot}")

    def advance(self, places: Places, slots: Sequence[int] | None = None) -> None:
        """Counts the tokens of a call."""
        self.count(places.counts, slots)

    def count(self, counts: Sequence[int], slots: Sequence[int] | None = None) -> None:
        """Adds to the lengths of all sequences, or of those of some slots."""
        lengths = list(self.lengths)
        for slot, count in zip(range(len(self)) if slots is None else slots, counts, strict=True):
            lengths[slot] += count
        self.lengths = tuple(lengths)

    def reserve(self, capacity: int) -> None:
        """Makes room for this many tokens of each sequence at once."""
        capacity = require_count("Cache.reserve", "capacity", capacity)
        for layer in self.layers:
            if isinstance(layer, KeyValueCache):
                layer.reserve(capacity)

    def clear(self, slots: Sequence[int]) -> None:
        """Forgets the sequences of some slots, so that others can begin there. Earlier snapshots become invalid.

        Raises:
            ArgumentError: there is no such slot.
        """
        self._require(slots)
        for layer in self.layers:
            if isinstance(layer, RecurrentCache):
                rows = torch.tensor(tuple(slots), dtype=torch.int64, device=layer.state.device)
                layer.conv.index_fill_(0, rows, 0)
                layer.state.index_fill_(0, rows, 0)
        self.lengths = tuple(0 if slot in slots else length for slot, length in enumerate(self.lengths))
        self._snapshots = []

    def copy(self) -> "Cache":
        """Another cache in the same state, with memory of its own."""
        layers = [layer.copy() for layer in self.layers]
        return Cache(self._model, layers, self.lengths, self.dtype, self.device)

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> "Cache":
        """A copy as well. It belongs to the same model, or to the model's copy if that is copied at the same time."""
        other = self.copy()
        other._model = memo.get(id(self._model), self._model)
        return other

    def select(self, slots: Sequence[int]) -> "Cache":
        """A cache of the sequences of these slots, in this order, with memory of its own. A slot may occur twice.

        Raises:
            ArgumentError: there is no such slot.
        """
        self._require(slots)
        layers = []
        for layer in self.layers:
            device = layer.state.device if isinstance(layer, RecurrentCache) else layer.keys.device
            layers.append(layer.select(torch.tensor(tuple(slots), dtype=torch.int64, device=device)))
        return Cache(self._model, layers, [self.lengths[slot] for slot in slots], self.dtype, self.device)

    def snapshot(self) -> "Snapshot":
        """The present state, for `rollback`. Keys and values are not copied, because they stay in their places."""
        states = tuple(layer.copy() if isinstance(layer, RecurrentCache) else None for layer in self.layers)
        self._snapshots.append(self._next)
        self._next += 1
        return Snapshot(self, self._snapshots[-1], self.lengths, states)

    def rollback(self, snapshot: "Snapshot") -> None:
        """Goes back to a snapshot of this cache. Later snapshots become invalid, because their tokens are forgotten.

        Raises:
            ArgumentError: the snapshot is of another cache, or is invalid.
        """
        if not isinstance(snapshot, Snapshot) or snapshot.cache is not self or snapshot.number not in self._snapshots:
            raise ArgumentError(
                "Cache.rollback: snapshot must be one of this cache, of tokens that it has not forgotten since, by "
                "another rollback or by clear"
            )
        self._snapshots = [number for number in self._snapshots if number <= snapshot.number]
        for layer, state in zip(self.layers, snapshot.states, strict=True):
            if isinstance(layer, RecurrentCache) and state is not None:
                layer.write(state.conv, state.state)
        self.lengths = snapshot.lengths


class Snapshot:
    """The data that `Cache.rollback` needs: the recurrent states and the lengths of the sequences."""

    def __init__(
        self, cache: Cache, number: int, lengths: tuple[int, ...], states: tuple[RecurrentCache | None, ...]
    ) -> None:
        self.cache, self.number, self.lengths, self.states = cache, number, lengths, states
