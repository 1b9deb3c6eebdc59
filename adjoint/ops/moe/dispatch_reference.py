"""Dispatch and combine as defined: short, in the dtype of their inputs, never optimised."""

import torch
from torch import Tensor


def layout(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets, permutation and inverse: entries in order of (expert, token, slot), those of no expert last."""
    experts = indices.reshape(-1).tolist()
    known = [expert if 0 <= expert < num_experts else num_experts for expert in experts]
    permutation = sorted(range(len(known)), key=lambda entry: (known[entry], entry))
    inverse = [0] * len(known)
    for row, entry in enumerate(permutation):
        inverse[entry] = row
    offsets = [sum(expert < bound for expert in known) for bound in range(num_experts + 1)]
    made = (torch.tensor(values, dtype=torch.int32, device=indices.device) for values in (offsets, permutation))
    return (*made, torch.tensor(inverse, dtype=torch.int32, device=indices.device).view(indices.shape))  # type: ignore[return-value]


def dispatch(x: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """The row of each entry's token, in order of (expert, token, slot); 0 for entries of no expert."""
    flat = indices.reshape(-1)
    known = (flat >= 0) & (flat < num_experts)
    entries = torch.where(known, flat, num_experts).argsort(stable=True)
    tokens = x.reshape(x.shape[:-1].numel(), x.shape[-1])[entries // max(1, indices.shape[-1])]
    return torch.where(known[entries][:, None], tokens, 0)


def dispatch_backward(drows: Tensor, x: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """dx[t] = Σ drows over the rows of token t, those of no expert left out."""
    flat = indices.reshape(-1)
    known = (flat >= 0) & (flat < num_experts)
    entries = torch.where(known, flat, num_experts).argsort(stable=True)
    tokens = torch.where(known[entries][:, None], drows, 0)
    dx = drows.new_zeros(x.shape[:-1].numel(), x.shape[-1])
    return dx.index_add(0, entries // max(1, indices.shape[-1]), tokens).view(x.shape)


def combine(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor) -> Tensor:
    """y[t] = Σ over j of weights[t, j] · rows[inverse[t, j]], entries past the last offset left out."""
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
    flat, kept = inverse.reshape(-1).long(), counts.reshape(-1)
    upstream = dy.reshape(dy.shape[:-1].numel(), dy.shape[-1])[token]
    products = upstream if weights is None else upstream * weights.reshape(-1, 1)
    drows = torch.zeros_like(rows).index_copy(0, flat[kept], products[kept])
    if weights is None:
        return (drows,)
    picked = torch.zeros_like(rows).index_copy(0, torch.arange(len(flat), device=dy.device)[kept], rows[flat[kept]])
    return drows, (upstream * picked).sum(1).view(weights.shape)
