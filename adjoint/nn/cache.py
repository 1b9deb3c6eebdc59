"""Caches for decoding: the states of recurrent layers, and the keys and values of attention.

Both are written in place, without gradients. A model has one for each layer in an `adjoint.models.Cache`. Their memory
is made outside of inference mode, so that a cache that was filled there can be overwritten elsewhere.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """The places of a call's tokens in a cache of sequences.

    Attributes:
        rows, positions: the row of each token in the cache, and its position in its sequence.
        past: the number of earlier tokens of each sequence of the call.
        counts: the number of tokens that the call adds to each sequence.
        slots: the cache's rows of these sequences; None if they are all rows in order.
        states: if present, the rows of recurrent states instead of `slots`, with −1 for a sequence whose state stays as
            it is.
    """

    rows: Int[Tensor, "batch time"]
    positions: Int[Tensor, "batch time"]
    past: tuple[int, ...]
    counts: tuple[int, ...]
    slots: Int[Tensor, " sequences"] | None = None
    states: Int[Tensor, " sequences"] | None = None

    @property
    def state_indices(self) -> Int[Tensor, " sequences"] | None:
        """The rows of the recurrent states from which the sequences go on."""
        return self.slots if self.states is None else self.states

    @property
    def longest(self) -> int:
        """The number of tokens of the longest sequence after the call."""
        return max((past + count for past, count in zip(self.past, self.counts, strict=True)), default=0)

    def of_cache(self, x: Tensor) -> Tensor:
        """The rows of these sequences in a tensor of the cache."""
        return x if self.slots is None else x[self.slots]


class RecurrentCache:
    """The state of a `GatedDeltaNet` after each sequence: the last inputs of its convolution, and the state of the
    gated delta rule."""

    def __init__(
        self, conv: Float[Tensor, "sequences channels past"], state: Float[Tensor, "sequences value_heads K V"]
    ) -> None:
        self.conv, self.state = conv, state

    def write(self, conv: Tensor, state: Tensor, slots: Tensor | None = None) -> None:
        """Overwrites the states of all sequences, or of those in some rows."""
        rows = slice(None) if slots is None else slots
        self.conv[rows] = conv
        self.state[rows] = state

    @torch.inference_mode(False)
    def copy(self) -> "RecurrentCache":
        return RecurrentCache(self.conv.clone(), self.state.clone())

    @torch.inference_mode(False)
    def select(self, rows: Tensor) -> "RecurrentCache":
        return RecurrentCache(self.conv[rows], self.state[rows])


ROOM = 256
"""Memory for keys and values comes in multiples of this many tokens. Attention to them is computed in such pieces."""


class KeyValueCache:
    """The keys and values of the tokens of each sequence, at their positions. Memory behind the last one is unused."""

    def __init__(
        self,
        keys: Float[Tensor, "sequences heads room size"],
        values: Float[Tensor, "sequences heads room size"],
    ) -> None:
        self.keys, self.values = keys, values

    @property
    def room(self) -> int:
        """The number of tokens of each sequence for which there is memory."""
        return self.keys.shape[2]

    def append(
        self, k: Float[Tensor, "batch time heads size"], v: Float[Tensor, "batch time heads size"], places: Places
    ) -> None:
        """Writes the keys and values of a call's tokens to their places. If they do not fit, the memory grows first."""
        self.reserve(places.longest)
        self.keys[places.rows, :, places.positions] = k.to(self.keys.dtype)
        self.values[places.rows, :, places.positions] = v.to(self.values.dtype)

    def reserve(self, capacity: int) -> None:
        """Makes room for `capacity` tokens of each sequence. If the memory must grow, it grows by at least a half."""
        if capacity > self.room:
            capacity = max(capacity, self.room + self.room // 2)
            room = -(-capacity // ROOM) * ROOM
            self.keys, self.values = (_grown(x, room) for x in (self.keys, self.values))

    @torch.inference_mode(False)
    def copy(self) -> "KeyValueCache":
        return KeyValueCache(self.keys.clone(), self.values.clone())

    @torch.inference_mode(False)
    def select(self, rows: Tensor) -> "KeyValueCache":
        return KeyValueCache(self.keys[rows], self.values[rows])


@torch.inference_mode(False)
def _grown(x: Tensor, room: int) -> Tensor:
    """The same rows with room for more tokens. New places are 0, because a masked weight of 0 must not meet a NaN."""
    return torch.nn.functional.pad(x, (0, 0, 0, room - x.shape[2]))
