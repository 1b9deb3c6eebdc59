"""Sequences of different lengths in one row, and their labels."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from adjoint.core.errors import ArgumentError

IGNORED = -100
"""The label of a token that does not count."""


def pack(
    sequences: Iterable[Sequence[int] | Int[Tensor, " time"]], device: torch.device | str | int | None = None
) -> tuple[Int[Tensor, "1 time"], Int[Tensor, " bounds"]]:
    """Sequences of token ids as one row, [1, time], and their bounds in it.

    >>> pack([[1, 2, 3], [], [4]])
    (tensor([[1, 2, 3, 4]]), tensor([0, 3, 3, 4]))
    """
    rows = [torch.as_tensor(sequence, dtype=torch.int64, device=device) for sequence in sequences]
    for row in rows:
        if row.dim() != 1:
            raise ArgumentError(f"pack: a sequence must be a list of token ids, got shape {tuple(row.shape)}")
    bounds = [0]
    for row in rows:
        bounds.append(bounds[-1] + row.numel())
    ids = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64, device=device)
    return ids[None], torch.tensor(bounds, device=ids.device)


def next_labels(
    labels: Int[Tensor, "batch time"], cu_seqlens: Int[Tensor, " bounds"] | None
) -> Int[Tensor, "batch time"]:
    """For each token the label after it in its sequence; that of a sequence's last token does not count."""
    padded = F.pad(labels, (0, 1), value=IGNORED)
    if cu_seqlens is not None:
        padded[0, cu_seqlens] = IGNORED
    return padded[:, 1:]
