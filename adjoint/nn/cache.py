"""What layers keep of the tokens that have passed, for decoding: of recurrent layers and of attention.

Both are written in place, without gradients. A model keeps one for each layer in a `adjoint.models.Cache`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens of a call belong in a cache of sequences.

    `past` and `counts` say for each sequence of the call how many tokens were there before, and how many it adds.
    `slots` are the cache's rows of these sequences, None where they are all of them in order. `states`, where it is
    there, are those of recurrent states alone, −1 for a sequence whose state stays as it is.
    """

    rows: Int[Tensor, "batch time"]
    positions: Int[Tensor, "batch time"]
    past: tuple[int, ...]
    counts: tuple[int, ...]
    slots: Int[Tensor, " sequences"] | None = None
    states: Int[Tensor, " sequences"] | None = None

    @property
    def state_indices(self) -> Int[Tensor, " sequences"] | None:
        """The rows of recurrent states that the sequences go on from."""
        return self.slots if self.states is None else self.states

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the call."""
        return max((past + count for past, count in zip(self.past, self.counts, strict=True)), default=0)

    def of_cache(self, x: Tensor) -> Tensor:
        """The rows of these sequences in a tensor of the cache."""
        return x if self.slots is None else x[self.slots]


class RecurrentCache:
    """The state of a `GatedDeltaNet` after each sequence: the last inputs of its convolution, and the rule's state."""

    def __init__(
        self, conv: Float[Tensor, "sequences channels past"], state: Float[Tensor, "sequences value_heads K V"]
    ) -> None:
        self.conv, self.state = conv, state

    def write(self, conv: Tensor, state: Tensor, slots: Tensor | None = None) -> None:
        """Overwrites the states of all sequences, or of some."""
        rows = slice(None) if slots is None else slots
        self.conv[rows] = conv
        self.state[rows] = state

    def copy(self) -> "RecurrentCache":
        return RecurrentCache(self.conv.clone(), self.state.clone())

    def select(self, rows: Tensor) -> "RecurrentCache":
        return RecurrentCache(self.conv[rows], self.state[rows])


ROOM = 256
"""Memory for keys and values comes in multiples of so many tokens, which attention to them is computed by."""


class KeyValueCache:
    """Keys and values of the tokens of each sequence, at their positions; what lies after the last is unset."""

    def __init__(
        self,
        keys: Float[Tensor, "sequences heads room size"],
        values: Float[Tensor, "sequences heads room size"],
    ) -> None:
        self.keys, self.values = keys, values

    @property
    def room(self) -> int:
        """The tokens of each sequence that there is memory for."""
        return self.keys.shape[2]

    def append(
        self, k: Float[Tensor, "batch time heads size"], v: Float[Tensor, "batch time heads size"], places: Places
    ) -> None:
        """Writes the keys and values of a call's tokens where they belong, in larger memory where they do not fit."""
        self.reserve(places.longest)
        self.keys[places.rows, :, places.positions] = k.to(self.keys.dtype)
        self.values[places.rows, :, places.positions] = v.to(self.values.dtype)

    def reserve(self, capacity: int) -> None:
        """Memory for so many tokens of each sequence; where there is too little, for half as many again at least."""
        if capacity > self.room:
            capacity = max(capacity, self.room + self.room // 2)
            room = -(-capacity // ROOM) * ROOM
            self.keys, self.values = (_grown(x, room) for x in (self.keys, self.values))

    def copy(self) -> "KeyValueCache":
        return KeyValueCache(self.keys.clone(), self.values.clone())

    def select(self, rows: Tensor) -> "KeyValueCache":
        return KeyValueCache(self.keys[rows], self.values[rows])


def _grown(x: Tensor, room: int) -> Tensor:
    """The same rows with room for more tokens; 0 where there is none yet, so that masked weights of 0 meet no NaN."""
    return torch.nn.functional.pad(x, (0, 0, 0, room - x.shape[2]))
