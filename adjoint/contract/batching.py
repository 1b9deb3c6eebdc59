"""How the items of a problem follow each other along one axis: other sizes, other batches, pieces.

A `Subject` uses these functions by default; a family with another layout of its items provides its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adjoint.contract.inputs import Inputs, each, is_differentiable

Answers = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Outputs and gradients."""

PIECE = 2**24
"""The number of elements of a tensor that are compared with the reference at once; it keeps float64 copies small."""


@dataclass(frozen=True)
class Rebatch:
    """Some of a problem's items in another batch, and the results that must have the same bits.

    Attributes:
        name: which items these are, for the row that fails.
        inputs, upstream: the other batch.
        pairs: `(whole, alone) -> (tensor, tensor), ...`: the pairs that must be equal bit for bit. If not all results
            of a direction promise batch invariance, that direction comes with an empty tuple.
    """

    name: str
    inputs: Inputs
    upstream: tuple[Tensor, ...]
    pairs: Callable[[Answers, Answers], Iterable[tuple[Tensor, Tensor]]]


def _change(change: Callable[[Tensor], Tensor], inputs: Inputs, batched: Sequence[bool]) -> Inputs:
    """Changes the inputs that have items; the others stay as they are."""
    pairs = zip(inputs, batched, strict=True)
    return tuple(change(x) if has_items and x is not None else x for x, has_items in pairs)


def resized(
    inputs: Inputs, upstream: tuple[Tensor, ...], size: int, axis: int, batched: Sequence[bool]
) -> tuple[Inputs, tuple[Tensor, ...]]:
    """The same items, repeated or cut to `size` of them; inputs that are not batched stay as they are."""

    def fit(tensor: Tensor) -> Tensor:
        copies = -(-size // tensor.shape[axis])
        return torch.cat([tensor] * copies, dim=axis).narrow(axis, 0, size).contiguous()

    return _change(fit, inputs, batched), tuple(map(fit, upstream))


def rebatched(
    inputs: Inputs, upstream: tuple[Tensor, ...], axis: int, batched: Sequence[bool] | None = None
) -> Iterator[Rebatch]:
    """Three other batches: the first item alone, the last item alone, and the second half of the items.

    Inputs that are not batched stay as they are, and their gradients are not compared. There is no other batch if the
    first input has fewer than two axes.
    """
    batched = [True] * len(inputs) if batched is None else batched
    compared = [has_items for x, has_items in zip(inputs, batched, strict=True) if is_differentiable(x)]
    size = inputs[0].shape[axis] if inputs[0].dim() > 1 else 0
    for begin, length in ((0, 1), (size - 1, 1), (size // 2, size - size // 2)) if size else ():

        def part(tensor: Tensor, begin: int = begin, length: int = length) -> Tensor:
            return tensor.narrow(axis, begin, length)

        def pairs(
            whole: Answers, alone: Answers, part: Callable[[Tensor], Tensor] = part
        ) -> Iterator[tuple[Tensor, Tensor]]:
            yield from zip(alone[0], map(part, whole[0]), strict=True)
            gradients = zip(zip(alone[1], whole[1], strict=True), compared, strict=False)
            yield from ((one, part(among_all)) for (one, among_all), has_items in gradients if has_items)

        yield Rebatch(f"items {begin}+{length}", _change(part, inputs, batched), tuple(map(part, upstream)), pairs)


def pieces(arguments: Inputs, outputs: tuple[Tensor, ...], axis: int) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of the arguments and outputs, all cut at the same items."""
    tensors = [tensor for tensor in (*arguments, *outputs) if tensor is not None]
    items = tensors[0].shape[axis]
    step = max(1, PIECE * items // max(1, *(tensor.numel() for tensor in tensors)))
    for begin in range(0, items, step):
        index = (slice(None),) * axis + (slice(begin, begin + step),)

        def part(tensor: Tensor, index: tuple[slice, ...] = index) -> Tensor:
            return tensor[index]

        yield each(part, arguments), tuple(map(part, outputs))
