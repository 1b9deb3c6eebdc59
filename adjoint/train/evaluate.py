"""Bits per byte of held-out files."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from adjoint.models.packing import IGNORED
from adjoint.train.step.objective import Objective
from adjoint.train.step.ranks import Ranks
from adjoint.train.text.stream import Batch


@dataclass(frozen=True)
class Window:
    """Tokens of a document that go through the model together, and their labels."""

    tokens: Tensor
    labels: Tensor


def windows(document: Tensor, length: int) -> list[Window]:
    """Cuts a document into windows that overlap by half.

    Each token but the first is predicted once, from at least half a window of earlier tokens, if the document has that
    many.

    >>> [window.labels.tolist() for window in windows(torch.arange(8), 4)]
    [[1, 2, 3, 4], [-100, -100, 5, 6], [-100, -100, 7]]
    """
    parts = []
    half = length // 2
    done = 0  # the labels before this position have been predicted
    begin = 0
    while done < document.numel() - 1:
        tokens = document[begin : begin + length].long()
        labels = document[begin + 1 : begin + length + 1].long().clone()
        tokens = tokens[: labels.numel()]
        labels[: done - begin] = IGNORED
        parts.append(Window(tokens, labels))
        done = begin + tokens.numel()
        begin = done - half
    return parts


@torch.no_grad()
def bits_per_byte(
    objective: Objective, documents: Sequence[Tensor], size: int, length: int, rows: int, vocabulary: int, ranks: Ranks
) -> float:
    """−log₂ p of whole documents, divided by the bytes of their text.

    A document's first token has no predecessor, and costs log₂ of the size of the vocabulary.

    Args:
        objective: the model.
        documents: the tokens of each document.
        size: the bytes of their text.
        length: the number of tokens of a window.
        rows: the number of windows that go through the model together.
        vocabulary: the number of tokens in the vocabulary.
        ranks: the processes that share the windows.
    """
    parts = [window for document in documents for window in windows(document, length)]
    groups = [parts[begin : begin + rows] for begin in range(0, len(parts), rows)]
    turns = -(-len(groups) // ranks.size)
    nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
    training = objective.training
    objective.eval()
    for turn in range(turns):
        index = turn * ranks.size + ranks.rank
        # All ranks must call the model equally often, because they gather its parameters together.
        group = groups[index] if index < len(groups) else [Window(parts[0].tokens, parts[0].labels * 0 + IGNORED)]
        nats += objective(_batch(group).to(ranks.device), with_balance=False).nats.double()
    objective.train(training)
    first = sum(document.numel() > 0 for document in documents) * math.log(vocabulary)
    return (ranks.add_up(nats).item() + first) / math.log(2) / size


def _batch(group: Sequence[Window]) -> Batch:
    bounds = torch.tensor([0, *(window.tokens.numel() for window in group)]).cumsum(0)
    tokens, labels = (torch.cat([getattr(window, name) for window in group])[None] for name in ("tokens", "labels"))
    return Batch(tokens, labels, bounds, ())
