"""Sequences of different lengths in one row, and their labels."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short

IGNORED = -100
"""The label of a token that does not count."""


def pack(
    sequences: Iterable[Sequence[int] | Int[Tensor, " time"]], device: torch.device | str | int | None = None
) -> tuple[Int[Tensor, "1 time"], Int[Tensor, " bounds"]]:
    """Sequences of token ids as one row, [1, time], and their bounds in it.

    >>> pack([[1, 2, 3], [], [4]])
    (tensor([[1, 2, 3, 4]]), tensor([0, 3, 3, 4]))

    Raises:
        ArgumentError: a sequence is none of token ids.
    """
    if not isinstance(sequences, Iterable):
        raise ArgumentError(f"pack: sequences must be lists of token ids, got {type(sequences).__name__}")
    rows = [token_ids("pack: sequences", sequence, number, device) for number, sequence in enumerate(sequences)]
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


def token_ids(
    what: str, sequence: Sequence[int] | Tensor, number: int, device: torch.device | str | int | None = None
) -> Int[Tensor, " time"]:
    """One of several sequences as int64."""
    wrong = f"{what} must be lists of token ids, or rows of a tensor of them, and number {number} is"
    try:
        row = torch.as_tensor(sequence)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{wrong} {str(sequence)[:40]!r}") from None
    if row.dim() != 1:
        raise ArgumentError(f"{wrong} of shape {tuple(row.shape)}")
    if row.numel() and (row.is_floating_point() or row.is_complex() or row.dtype == torch.bool):
        raise ArgumentError(f"{wrong} of {short(row.dtype)}")
    return row.long() if device is None else row.to(device, torch.int64)
