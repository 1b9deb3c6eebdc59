"""Combine as defined: short, in the dtype of its inputs, never optimised."""

import torch
from torch import Tensor


def combine(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """y[t] = Σ over j of weights[t, j] · rows[inverse[t, j]], without entries past the last offset."""
    counts = (inverse >= 0) & (inverse < offsets[-1])
    if rows.shape[0] == 0:
        return rows.new_zeros(*inverse.shape[:-1], rows.shape[1])
    terms = rows[torch.where(counts, inverse, 0).long()]
    factors = counts.to(rows.dtype) if weights is None else torch.where(counts, weights, 0)
    return torch.where(counts[..., None], terms * factors[..., None], 0).sum(-2)


def combine_backward(
    dy: Tensor, rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor
) -> tuple[Tensor, ...]:
    """drows[inverse[t, j]] = weights[t, j] · dy[t]; dweights[t, j] = dy[t] · rows[inverse[t, j]]."""
    counts = (inverse >= 0) & (inverse < offsets[-1])
    token = torch.arange(inverse.shape[:-1].numel(), device=dy.device).repeat_interleave(inverse.shape[-1])
    flat, valid = inverse.reshape(-1).long(), counts.reshape(-1)
    upstream = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])[token]
    products = upstream if weights is None else upstream * weights.reshape(-1, 1)
    drows = torch.zeros_like(rows).index_copy(0, flat[valid], products[valid])
    if weights is None:
        return (drows,)
    picked = torch.zeros_like(rows).index_copy(0, torch.arange(len(flat), device=dy.device)[valid], rows[flat[valid]])
    return drows, (upstream * picked).sum(1).view(weights.shape)
