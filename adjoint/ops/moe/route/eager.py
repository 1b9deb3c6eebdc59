"""The router in plain PyTorch: the definition itself, in float64, rounded once to the type of the weights."""

from typing import Any

import torch
from torch import Tensor

from adjoint.ops.moe.route import reference


def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    logits, bias, k, score, num_groups, groups_kept, renormalize = arguments
    rows, results = logits.reshape(-1, logits.shape[-1]), None
    if score == "softmax" and bias is None and groups_kept == num_groups:
        results = _forward_by_selection(rows, k, renormalize)
    if results is None:
        kind = outputs[0].dtype
        results = reference.route(rows.double(), k, score, bias, num_groups, groups_kept, renormalize, kind)
    for output, exact in zip(outputs, results, strict=True):
        output.copy_(exact.view(output.shape))


def _forward_by_selection(rows: Tensor, k: int, renormalize: bool) -> tuple[Tensor, Tensor] | None:
    """The definition by torch's selection, which has no order for equal values and takes NaN for the largest one.

    None if two of a row's k + 1 largest values are equal or NaN is among them, and on a GPU, for which it would wait.
    """
    if not rows.is_cpu or rows.numel() == 0:
        return None
    values, order = rows.topk(min(k + 1, rows.shape[1]), dim=1)
    if not (values[:, :-1] > values[:, 1:]).all():
        return None
    indices, exact = order[:, :k], rows.double()
    if renormalize:
        return torch.softmax(exact.gather(1, indices), -1), indices
    return torch.softmax(exact, -1).gather(1, indices), indices


def backward(arguments: tuple[Any, ...], dlogits: Tensor) -> None:
    """Writes the gradient from the saved weights. It reads the logits only for a slope or for other experts' shares."""
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
    dlogits.copy_(dense.scatter_(1, chosen, slope).view(dlogits.shape))
