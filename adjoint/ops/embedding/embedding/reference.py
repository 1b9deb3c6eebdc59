"""`embedding` as defined: short, in the dtype of its inputs, never optimised."""

import torch
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """out[n] = weight[ids[n]], and 0 where an id is out of range."""
    valid = (ids >= 0) & (ids < weight.shape[0])
    rows = weight.new_zeros(*ids.shape, weight.shape[1])
    rows[valid] = weight[ids[valid].long()]
    return rows


def embedding_backward(gradient: Tensor, ids: Tensor, weight: Tensor, padding: int = -1) -> Tensor:
    """dweight[r] = Σ gradient[n] over the n with ids[n] = r; padding and ids out of range add nothing."""
    flat = ids.reshape(-1)
    counts = (flat >= 0) & (flat < weight.shape[0]) & (flat != padding)
    rows = gradient.reshape(ids.numel(), weight.shape[1])[counts]
    return torch.zeros_like(weight).index_add(0, flat[counts].long(), rows)
