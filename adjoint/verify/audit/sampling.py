"""Samples of long batches: whole items, which are rows of a batch or sequences of a packed row."""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST_TOKENS = 4096
"""The number of tokens of a batch that can be compared in float64 in seconds."""

GOLDEN = (5**0.5 - 1) / 2
"""The golden ratio's fraction. Sorted by the fractional part of n·GOLDEN, any first few of the numbers n are spread
evenly."""


def sample(batch: Any, max_tokens: int = MOST_TOKENS) -> Any:
    """Some items of a batch, spread over the whole of it, with no more than `max_tokens` tokens.

    An item is never cut, so a single longer item stays whole. Items are the rows of `input_ids`, or of the first tensor
    with two axes or more; all tensors with as many rows are cut alike. With `cu_seqlens`, items are the sequences of
    the only row.
    """
    named = dict(batch) if isinstance(batch, Mapping) else None
    if named is None:
        values = list(batch) if isinstance(batch, list | tuple) else [batch]
        first = next((x for x in values if isinstance(x, Tensor) and x.dim() > 1), None)
        indices = None if first is None else _rows(first, max_tokens)
        if first is None or indices is None:
            return batch
        cut = [_cut(x, len(first), indices) for x in values]
        return type(batch)(cut) if isinstance(batch, list | tuple) else cut[0]
    first = named.get("input_ids", next((x for x in named.values() if isinstance(x, Tensor) and x.dim() > 1), None))
    if not isinstance(first, Tensor):
        return batch
    if isinstance(named.get("cu_seqlens"), Tensor) and len(first) == 1:
        return _packed(named, first, max_tokens)
    indices = _rows(first, max_tokens)
    return batch if indices is None else {name: _cut(x, len(first), indices) for name, x in named.items()}


def _rows(first: Tensor, max_tokens: int) -> Tensor | None:
    """The indices of the rows to keep; None for all."""
    rows, time = first.shape[:2] if not first.is_floating_point() or first.dim() > 2 else (len(first), 1)
    count = max(1, max_tokens // max(1, time))
    if rows <= count:
        return None
    return torch.linspace(0, rows - 1, count, device=first.device).round().long()


def _cut(value: Any, rows: int, indices: Tensor) -> Any:
    return (
        value[indices.to(value.device)] if isinstance(value, Tensor) and value.dim() and len(value) == rows else value
    )


def _packed(named: dict[str, Any], first: Tensor, max_tokens: int) -> dict[str, Any]:
    """Sequences that fit, spread over the row; at least one."""
    bounds, time = named["cu_seqlens"].tolist(), first.shape[1]
    if bounds[-1] <= max_tokens:
        return named
    lengths = [end - start for start, end in itertools.pairwise(bounds)]
    kept: list[int] = []
    for sequence in sorted(range(len(lengths)), key=lambda number: number * GOLDEN % 1):
        if not kept or sum(lengths[other] for other in kept) + lengths[sequence] <= max_tokens:
            kept.append(sequence)
    kept.sort()
    tokens = [token for sequence in kept for token in range(bounds[sequence], bounds[sequence + 1])]
    positions = torch.tensor(tokens, device=first.device)
    cut = {
        name: x[:, positions.to(x.device)] if isinstance(x, Tensor) and x.dim() > 1 and x.shape[:2] == (1, time) else x
        for name, x in named.items()
    }
    ends = list(itertools.accumulate((lengths[sequence] for sequence in kept), initial=0))
    return cut | {"cu_seqlens": torch.tensor(ends).to(named["cu_seqlens"])}
