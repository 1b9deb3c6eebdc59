"""The order of tokens: an endless stream of documents, cut into rows, of which every step takes some.

Each epoch has all documents in an order of its own. Row r of the stream has the tokens from r·T to r·T + T and one more
token, which is the last label. Rows are shuffled too, so that a long document does not fill steps by itself. They are
shuffled in blocks of B rows, as many as an epoch has: place p of the order has row ⌊p / B⌋·B + π(p mod B). Step s has
the places from s·R to s·R + R, whatever the number of ranks. So the data of a step depend only on the seed and on the
step's number. The position of a run in its data is the number of its steps, so a resumed run repeats nothing and leaves
nothing out.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from adjoint.core.errors import ArgumentError
from adjoint.models.packing import IGNORED


@dataclass(frozen=True)
class Batch:
    """Tokens and their labels: [rows, T], where each row is a sequence, or [1, rows · T], packed.

    Attributes:
        cu_seqlens: the bounds of packed sequences; None for rows.
        rows: the numbers of the rows in the stream.
    """

    tokens: Int[Tensor, "batch time"]
    labels: Int[Tensor, "batch time"]
    cu_seqlens: Int[Tensor, " bounds"] | None
    rows: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of labels that count."""
        return int((self.labels != IGNORED).sum())

    def to(self, device: torch.device) -> "Batch":
        tokens, labels = (x.to(device, non_blocking=True) for x in (self.tokens, self.labels))
        bounds = None if self.cu_seqlens is None else self.cu_seqlens.to(device, non_blocking=True)
        return Batch(tokens, labels, bounds, self.rows)


class Stream:
    """An endless stream of documents in shuffled rows, with another random order of the documents in each epoch.

    Args:
        documents: the tokens of each document.
        length: the number of tokens of a row, T.
        seed: the seed of the order.
        packing: whether each document in a row is a sequence of its own; otherwise the row is one sequence.

    Raises:
        ArgumentError: no document has a token to predict.

    >>> documents = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    >>> batch = Stream(documents, 4, seed=0).batch([0, 1])
    >>> batch.tokens.shape, batch.count
    (torch.Size([1, 8]), 5)
    """

    def __init__(self, documents: Sequence[Tensor], length: int, *, seed: int, packing: bool = True) -> None:
        self.documents = [document for document in documents if document.numel()]
        self.length, self.packing, self._seed = length, packing, seed
        self.tokens_of_epoch = sum(document.numel() for document in self.documents)
        if self.tokens_of_epoch < 2:
            raise ArgumentError("train: the data has fewer than two tokens; give more text")
        if packing and all(document.numel() < 2 for document in self.documents):
            raise ArgumentError(
                "train: no file of the data has two tokens, so that none can be predicted; give more text"
            )
        self._block = max(1, self.tokens_of_epoch // length)
        self._orders: dict[int, tuple[list[int], list[int]]] = {}
        self._shuffles: dict[int, list[int]] = {}

    def _permute(self, count: int, *numbers: int) -> list[int]:
        """A permutation that depends only on the seed and on some numbers."""
        text = ",".join(map(str, (self._seed, *numbers)))
        seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        return torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()  # type: ignore[no-any-return]

    def _order(self, epoch: int) -> tuple[list[int], list[int]]:
        """The documents of an epoch in their order, and the position at which each ends."""
        if epoch not in self._orders:
            order = self._permute(len(self.documents), 0, epoch)
            ends = list(accumulate(self.documents[index].numel() for index in order))
            self._orders = {number: ordering for number, ordering in self._orders.items() if number == epoch - 1}
            self._orders[epoch] = (order, ends)
        return self._orders[epoch]

    def row_at(self, place: int) -> int:
        """The number of the row at a place of the shuffled order."""
        block, index = divmod(place, self._block)
        if block not in self._shuffles:
            self._shuffles = {block: self._permute(self._block, 1, block)}
        return block * self._block + self._shuffles[block][index]

    def pieces(self, begin: int, count: int) -> list[tuple[int, int, int]]:
        """The pieces of documents in `count` tokens of the stream from position `begin` on.

        A piece is the index of a document, its first token, and the number of tokens.
        """
        pieces = []
        while count:
            epoch, position = divmod(begin, self.tokens_of_epoch)
            order, ends = self._order(epoch)
            place = bisect_right(ends, position)
            index = order[place]
            first = position - (ends[place] - self.documents[index].numel())
            size = min(count, ends[place] - position)
            pieces.append((index, first, size))
            begin, count = begin + size, count - size
        return pieces

    def batch(self, places: Iterable[int]) -> Batch:
        """The rows at some places of the order."""
        rows = tuple(self.row_at(place) for place in places)
        tokens, labels, sizes = [], [], []
        for row in rows:
            pieces = self.pieces(row * self.length, self.length)
            tokens += [self.documents[index][first : first + size] for index, first, size in pieces]
            if self.packing:
                labels += [self._labels(*piece) for piece in pieces]
                sizes += [size for _, _, size in pieces]
            else:
                following = self.pieces(row * self.length + 1, self.length)
                labels += [self.documents[index][first : first + size].long() for index, first, size in following]
                sizes.append(self.length)
        is_packed = len(sizes) > len(rows)
        bounds = torch.tensor([0, *accumulate(sizes)]) if is_packed else None
        shape = (1 if is_packed else len(rows), -1)
        return Batch(torch.cat(tokens).long().view(shape), torch.cat(labels).view(shape), bounds, rows)

    def _labels(self, index: int, first: int, size: int) -> Tensor:
        """The label of each token of a piece: the next token in the document."""
        following = self.documents[index][first + 1 : first + size + 1].long()
        return torch.nn.functional.pad(following, (0, size - following.numel()), value=IGNORED)
