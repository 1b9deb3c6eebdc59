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
    """Tokens of a document that go through the model together, and how many of its last labels count."""

    tokens: Tensor
    labels: Tensor


def windows(document: Tensor, length: int) -> list[Window]:
    """A document in windows that overlap by half: each token but the first is predicted once, and from half a window of
    tokens before it or more, where the document has them.

    >>> [window.labels.tolist() for window in windows(torch.arange(8), 4)]
    [[1, 2, 3, 4], [-100, -100, 5, 6], [-100, -100, 7]]
    """
    parts = []
    half = length // 2
    done = 0  # labels up to this token are predicted
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
    """−log₂ p of whole documents, to a byte of their text. A document's first token, which nothing precedes, costs
    log₂ of the vocabulary.

    Args:
        objective: the model.
        documents: tokens of each.
        size: bytes of their text.
        length: tokens of a window.
        rows: windows that go through the model together.
        vocabulary: how many tokens there are.
        ranks: windows are shared out over them.
    """
    parts = [window for document in documents for window in windows(document, length)]
    groups = [parts[begin : begin + rows] for begin in range(0, len(parts), rows)]
    turns = -(-len(groups) // ranks.size)
    nats = torch.zeros((), dtype=torch.float64, device=ranks.device)
    training = objective.training
    objective.eval()
    for turn in range(turns):
        index = turn * ranks.size + ranks.rank
        # All ranks call the model equally often, since its parameters are gathered together.
        group = groups[index] if index < len(groups) else [Window(parts[0].tokens, parts[0].labels * 0 + IGNORED)]
        nats += objective(_batch(group).to(ranks.device), with_balance=False).nats.double()
    objective.train(training)
    first = sum(document.numel() > 0 for document in documents) * math.log(vocabulary)
    return (ranks.add_up(nats).item() + first) / math.log(2) / size


def _batch(group: Sequence[Window]) -> Batch:
    bounds = torch.tensor([0, *(window.tokens.numel() for window in group)]).cumsum(0)
    tokens, labels = (torch.cat([getattr(window, name) for window in group])[None] for name in ("tokens", "labels"))
    return Batch(tokens, labels, bounds, ())
