"""The router's losses in plain PyTorch, in float64, rounded once; without waiting for the device."""

import torch
from torch import Tensor

from adjoint.core.errors import Fault, report


def _counted(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Logits as rows in float64, which of them count, and the number of those, but at least 1."""
    rows = logits.reshape(-1, logits.shape[-1]).double()
    counted = rows.new_ones(len(rows), dtype=torch.bool) if mask is None else mask.reshape(-1)
    return rows, counted, counted.sum().double()


def balance(fault: Fault, logits: Tensor, indices: Tensor, mask: Tensor | None, loss: Tensor, load: Tensor) -> None:
    """Writes the load balancing loss. An index out of range, of a token that counts, is reported as `fault`."""
    rows, counted, tokens = _counted(logits, mask)
    experts = rows.shape[1]
    flat = indices.reshape(-1, indices.shape[-1])
    wrong = ((flat < 0) | (flat >= experts)) & counted[:, None]
    report(fault, flat, wrong)
    counts = (counted[:, None] & ~wrong).long()
    chosen = counts.new_zeros(experts).index_add_(0, flat.clamp(0, experts - 1).long().reshape(-1), counts.reshape(-1))
    shares = torch.softmax(rows, -1)
    mean = torch.where(counted[:, None], shares, 0.0).sum(0) / tokens.clamp_min(1)
    fraction = chosen.double() / tokens.clamp_min(1)
    loss.copy_(experts * (fraction * mean).sum())
    load[:experts].copy_(fraction)
    load[experts:].copy_(tokens)


def balance_backward(dloss: Tensor, logits: Tensor, mask: Tensor | None, load: Tensor, dlogits: Tensor) -> None:
    rows, counted, tokens = _counted(logits, mask)
    experts = rows.shape[1]
    shares, fraction = torch.softmax(rows, -1), load[:experts].double()
    slope = shares * (fraction - (shares * fraction).sum(-1, keepdim=True)) * (experts / tokens.clamp_min(1))
    dlogits.copy_(torch.where(counted[:, None], slope * dloss.double(), 0.0).view(dlogits.shape))


def z(logits: Tensor, mask: Tensor | None, loss: Tensor, tokens: Tensor) -> None:
    rows, counted, number = _counted(logits, mask)
    sizes = torch.where(counted, torch.logsumexp(rows, -1).square(), 0.0)
    loss.copy_(sizes.sum() / number.clamp_min(1))
    tokens.copy_(number)


def z_backward(dloss: Tensor, logits: Tensor, mask: Tensor | None, tokens: Tensor, dlogits: Tensor) -> None:
    rows, counted, number = _counted(logits, mask)
    slope = torch.logsumexp(rows, -1, keepdim=True) * torch.softmax(rows, -1) * (2 / number.clamp_min(1))
    dlogits.copy_(torch.where(counted[:, None], slope * dloss.double(), 0.0).view(dlogits.shape))
