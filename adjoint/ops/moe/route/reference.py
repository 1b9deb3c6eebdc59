"""The router's definition, in float64. Imports nothing but torch; never optimised."""

import torch
from torch import Tensor

NAN = float("nan")


def scores(logits: Tensor, score: str) -> Tensor:
    """The softmax over the experts whose logit is not NaN, or the sigmoid of each; NaN where the logit is NaN."""
    absent = logits.isnan()
    if score == "sigmoid":
        return torch.sigmoid(logits)
    return torch.softmax(logits.masked_fill(absent, float("-inf")), -1).masked_fill(absent, NAN)


def selection_scores(logits: Tensor, score: str, bias: Tensor | None, kind: torch.dtype = torch.float32) -> Tensor:
    """The numbers by which experts are compared: the logits, or the score rounded to `kind` plus the bias in `kind`."""
    if score == "softmax" and bias is None:
        return logits
    rounded = scores(logits, score).to(kind)
    return (rounded if bias is None else rounded + bias.to(kind)).double()


def ranked(values: Tensor) -> Tensor:
    """The places of values along the last axis: largest first, equal ones in their order, and NaN last."""
    # −∞ and NaN are distinguished by a first key: a stable sort by the value, then a stable sort by whether it is NaN.
    absent = values.isnan()
    order = values.masked_fill(absent, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    again = absent.gather(-1, order).to(torch.int8).sort(dim=-1, stable=True).indices
    return order.gather(-1, again)


def select(
    logits: Tensor,
    k: int,
    score: str,
    bias: Tensor | None,
    num_groups: int = 1,
    groups_kept: int = 1,
    kind: torch.dtype = torch.float32,
) -> Tensor:
    """The experts of each row, best first. Scores are compared in `kind`, which is float64 for float64 logits."""
    compared = selection_scores(logits, score, bias, kind)
    rows, experts = compared.shape
    if groups_kept == num_groups:
        return ranked(compared)[:, :k]
    by_group = compared.view(rows, num_groups, experts // num_groups)
    two_best = by_group.gather(-1, ranked(by_group)[..., :2])
    group_scores = two_best.to(kind).sum(-1).double()
    is_kept = torch.zeros(rows, num_groups, dtype=torch.bool, device=logits.device)
    is_kept.scatter_(1, ranked(group_scores)[:, :groups_kept], True)
    every = ranked(compared)
    is_out = ~is_kept.repeat_interleave(experts // num_groups, 1).gather(1, every)
    return every.gather(1, is_out.to(torch.int8).sort(dim=1, stable=True).indices)[:, :k]


def weights_of(logits: Tensor, indices: Tensor, score: str, renormalize: bool) -> Tensor:
    """The weights of chosen experts, differentiable in the logits."""
    chosen = logits.gather(1, indices)
    if not renormalize:
        weights = scores(logits, score).gather(1, indices)
    elif score == "softmax":
        weights = torch.softmax(chosen, -1)
    else:
        weights = torch.softmax(torch.nn.functional.logsigmoid(chosen), -1)
    present = logits.masked_fill(logits.isnan(), float("-inf")).amax(-1, keepdim=True)
    return weights.masked_fill(present.isinf(), NAN)


def route(
    logits: Tensor,
    k: int,
    score: str = "softmax",
    bias: Tensor | None = None,
    num_groups: int = 1,
    groups_kept: int = 1,
    renormalize: bool = True,
    kind: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Weights and experts of each row of logits [..., experts]."""
    flat = logits.reshape(-1, logits.shape[-1])
    indices = select(flat, k, score, bias, num_groups, groups_kept, kind)
    shape = (*logits.shape[:-1], k)
    return weights_of(flat, indices, score, renormalize).view(shape), indices.view(shape)


def route_backward(dweights: Tensor, logits: Tensor, indices: Tensor, score: str, renormalize: bool) -> Tensor:
    """The gradient of the logits, term by term: no autograd.

    renormalised:     dx_c = w_c·(dw_c − Σ w·dw)·s_c       for chosen c, 0 elsewhere
    softmax over all: dx_j = −p_j·Σ w·dw, + w_j·dw_j where j is chosen
    sigmoid:          dx_c = w_c·dw_c·s_c

    with s_c = 1 for softmax, 1 − σ(x_c) for sigmoid.
    """
    experts = logits.shape[-1]
    x, chosen = logits.reshape(-1, experts), indices.reshape(-1, indices.shape[-1])
    dw = dweights.reshape(chosen.shape)
    w = weights_of(x, chosen, score, renormalize)
    dot = (w * dw).sum(-1, keepdim=True)
    dense = torch.zeros_like(x)
    if score == "softmax":
        slope = w * (dw - dot)
        if not renormalize:
            present = x.masked_fill(x.isnan(), float("-inf"))
            dense = -torch.softmax(present, -1) * dot
            dense = torch.where(present.amax(-1, keepdim=True).isinf(), NAN, dense)
    else:
        slope = (w * (dw - dot) if renormalize else w * dw) * torch.sigmoid(-x.gather(1, chosen))
    return dense.scatter(1, chosen, slope).view(logits.shape)
