"""Dispatch as defined: short, in the dtype of its input, never optimised."""

import torch
from torch import Tensor


def dispatch(x: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """The row of each entry's token, in order of (expert, token, slot); 0 for entries of no expert."""
    flat = indices.reshape(-1)
    valid = (flat >= 0) & (flat < num_experts)
    entries = torch.where(valid, flat, num_experts).argsort(stable=True)
    tokens = x.reshape(x.shape[:-1].numel(), x.shape[-1])[entries // max(1, indices.shape[-1])]
    return torch.where(valid[entries][:, None], tokens, 0)


def dispatch_backward(drows: Tensor, x: Tensor, indices: Tensor, num_experts: int) -> Tensor:
    """dx[t] = Σ drows over the rows of token t, without rows of no expert."""
    flat = indices.reshape(-1)
    valid = (flat >= 0) & (flat < num_experts)
    entries = torch.where(valid, flat, num_experts).argsort(stable=True)
    tokens = torch.where(valid[entries][:, None], drows, 0)
    dx = drows.new_zeros(x.shape[:-1].numel(), x.shape[-1])
    return dx.index_add(0, entries // max(1, indices.shape[-1]), tokens).view(x.shape)
