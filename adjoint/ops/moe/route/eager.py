"""The router in plain PyTorch: the definition itself, in float64, rounded once."""

import torch
from torch import Tensor

from adjoint.ops.moe.route import reference


def forward(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    score: str,
    num_groups: int,
    groups_kept: int,
    renormalize: bool,
    weights: Tensor,
    indices: Tensor,
) -> None:
    exact, experts = reference.route(logits.double(), k, score, bias, num_groups, groups_kept, renormalize)
    weights.copy_(exact)
    indices.copy_(experts)


def backward(
    dweights: Tensor,
    weights: Tensor,
    indices: Tensor,
    logits: Tensor | None,
    experts: int,
    k: int,
    dtype: torch.dtype,
    score: str,
    renormalize: bool,
    dlogits: Tensor,
) -> None:
    """From the saved weights: the logits are read only where a slope or the other experts' shares need them."""
    w, chosen = weights.reshape(-1, k).double(), indices.reshape(-1, k)
    dw = dweights.reshape(-1, k).double()
    dot = (w * dw).sum(-1, keepdim=True)
    slope = w * (dw - dot) if renormalize or score == "softmax" else w * dw
    dense = w.new_zeros(len(w), experts)
    if logits is not None:
        x = logits.reshape(-1, experts).double()
        if score == "sigmoid":
            slope = slope * torch.sigmoid(-x.gather(1, chosen))
        else:
            absent = x.isnan()
            dense = -torch.softmax(x.masked_fill(absent, float("-inf")), -1) * dot
    dlogits.copy_(dense.scatter(1, chosen, slope).view(dlogits.shape))
