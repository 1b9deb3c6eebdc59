"""What layers keep of the tokens that have passed, for decoding: of recurrent layers and of attention.

Both are written in place, without gradients. A model keeps one for each layer in a `adjoint.models.Cache`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Places:
    """Where the tokens of a call belong in the cached sequences.

    `past` and `counts` say for each sequence how many tokens were there before the call, and how many it adds.
    """

    rows: Int[Tensor, "batch time"]
    positions: Int[Tensor, "batch time"]
    past: tuple[int, ...]
    counts: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence after the call."""
        return max((past + count for past, count in zip(self.past, self.counts, strict=True)), default=0)


class RecurrentCache:
    """The state of a `GatedDeltaNet` after each sequence: the last inputs of its convolution, and the rule's state."""

    def __init__(
        self, conv: Float[Tensor, "sequences channels past"], state: Float[Tensor, "sequences value_heads K V"]
    ) -> None:
        self.conv, self.state = conv, state

    def copy(self) -> "RecurrentCache":
        return RecurrentCache(self.conv.clone(), self.state.clone())

    def select(self, rows: Tensor) -> "RecurrentCache":
        return RecurrentCache(self.conv[rows], self.state[rows])

    def restore(self, kept: "RecurrentCache") -> None:
        self.conv.copy_(kept.conv)
        self.state.copy_(kept.state)

    @staticmethod
    def join(parts: Sequence["RecurrentCache"]) -> "RecurrentCache":
        return RecurrentCache(torch.cat([part.conv for part in parts]), torch.cat([part.state for part in parts]))


class KeyValueCache:
    """Keys and values of the tokens of each sequence, at their positions; what lies after the last is unset."""

    def __init__(
        self,
        keys: Float[Tensor, "sequences capacity heads size"],
        values: Float[Tensor, "sequences capacity heads size"],
    ) -> None:
        self.keys, self.values = keys, values

    def append(
        self, k: Float[Tensor, "batch time heads size"], v: Float[Tensor, "batch time heads size"], places: Places
    ) -> None:
        """Writes the keys and values of a call's tokens where they belong, in larger memory where they do not fit."""
        self.reserve(places.longest)
        self.keys[places.rows, places.positions] = k.to(self.keys.dtype)
        self.values[places.rows, places.positions] = v.to(self.values.dtype)

    def reserve(self, capacity: int) -> None:
        """Memory for so many tokens of each sequence; where there is too little, for half as many again as there was."""
        room = self.keys.shape[1]
        if capacity > room:
            capacity = max(capacity, room + room // 2)
            self.keys, self.values = (_grown(x, capacity) for x in (self.keys, self.values))

    def copy(self) -> "KeyValueCache":
        return KeyValueCache(self.keys.clone(), self.values.clone())

    def select(self, rows: Tensor) -> "KeyValueCache":
        return KeyValueCache(self.keys[rows], self.values[rows])

    @staticmethod
    def join(parts: Sequence["KeyValueCache"]) -> "KeyValueCache":
        capacity = max(part.keys.shape[1] for part in parts)
        keys, values = (
            torch.cat([_grown(x, capacity) for x in tensors])
            for tensors in ([part.keys for part in parts], [part.values for part in parts])
        )
        return KeyValueCache(keys, values)


def _grown(x: Tensor, capacity: int) -> Tensor:
    """The same rows with room for more tokens; 0 where there is none yet, so that masked weights of 0 meet no NaN."""
    return torch.nn.functional.pad(x, (0, 0, 0, 0, 0, capacity - x.shape[1]))
