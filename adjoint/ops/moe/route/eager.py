"""The router in plain PyTorch: the definition itself, in float64, rounded once to the type of the weights."""

from typing import Any

import torch
from torch import Tensor

from adjoint.ops.moe.route import reference


def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    logits, bias, k, score, num_groups, groups_kept, renormalize = arguments
    kind = outputs[0].dtype
    results = reference.route(logits.double(), k, score, bias, num_groups, groups_kept, renormalize, kind)
    for output, exact in zip(outputs, results, strict=True):
        output.copy_(exact)


def backward(arguments: tuple[Any, ...], dlogits: Tensor) -> None:
    """From the saved weights: the logits are read only where a slope or the other experts' shares need them."""
    dweights, weights, indices, logits, experts, k, _, score, renormalize = arguments
    w, dw, chosen = weights.reshape(-1, k).double(), dweights.reshape(-1, k).double(), indices.reshape(-1, k)
    dot = (w * dw).sum(-1, keepdim=True)
    slope = w * (dw - dot) if renormalize or score == "softmax" else w * dw
    dense = w.new_zeros(len(w), experts)
    if score == "sigmoid":
        slope = slope * torch.sigmoid(-logits.reshape(-1, experts).double().gather(1, chosen))
    elif not renormalize:
        x = logits.reshape(-1, experts).double()
        dense = -torch.softmax(x.masked_fill(x.isnan(), float("-inf")), -1) * dot
    dlogits.copy_(dense.scatter(1, chosen, slope).view(dlogits.shape))
