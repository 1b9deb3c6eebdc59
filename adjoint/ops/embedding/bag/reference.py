"""`embedding_bag` as defined: short, in the dtype of its inputs, never optimised."""

from itertools import pairwise

import torch
from torch import Tensor


def bags_of(ids: Tensor, offsets: Tensor | None, include_last_offset: bool = False) -> list[Tensor]:
    """The positions of each bag's entries in the flattened ids."""
    if offsets is None:
        count, width = ids.shape
        return [torch.arange(bag * width, (bag + 1) * width) for bag in range(count)]
    bounds = offsets.tolist() if include_last_offset else [*offsets.tolist(), ids.numel()]
    return [torch.arange(begin, end) for begin, end in pairwise(bounds)]


def embedding_bag(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    mode: str,
    padding: int = -1,
    include_last_offset: bool = False,
) -> Tensor:
    """The sum, mean or maximum of each bag's rows, with differentiable functions of torch."""
    flat = ids.reshape(-1)
    factors = None if per_sample_weights is None else per_sample_weights.reshape(-1)
    results = []
    for entries in bags_of(ids, offsets, include_last_offset):
        entries = entries.to(flat.device)
        rows_of = flat[entries]
        entries = entries[(rows_of >= 0) & (rows_of < weight.shape[0]) & (rows_of != padding)]
        rows = weight[flat[entries].long()]
        if factors is not None:
            rows = rows * factors[entries][:, None]
        if len(entries) == 0:
            results.append(rows.sum(0))
        elif mode == "max":
            largest = (rows == rows.amax(0)) | rows.isnan()  # a NaN makes the maximum NaN
            winner = largest.to(torch.int8).argmax(0)
            results.append(rows.gather(0, winner[None])[0])
        else:
            results.append(rows.sum(0) / (len(entries) if mode == "mean" else 1))
    return torch.stack(results) if results else weight.new_zeros(0, weight.shape[1])
