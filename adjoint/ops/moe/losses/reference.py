"""The router's losses as they are defined, in float64. Imports nothing but torch; never optimised."""

import torch
from torch import Tensor


def _flat(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits as rows, and a factor for each row: 1 for a token that counts, 0 for another one."""
    rows = logits.reshape(-1, logits.shape[-1])
    counted = torch.ones_like(rows[:, 0], dtype=torch.bool) if mask is None else mask.reshape(-1)
    return rows, counted


def fractions(indices: Tensor, counted: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """f, how often each expert was chosen per token that counts."""
    chosen = torch.nn.functional.one_hot(indices.reshape(-1, indices.shape[-1]).long(), experts).sum(1)
    return chosen[counted].sum(0).to(dtype) / max(1, int(counted.sum()))


def load_balancing_loss(logits: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
    """E·Σ f_e·P_e, where P_e is the mean probability of an expert; 0 if no token counts."""
    rows, counted = _flat(logits, mask)
    f = fractions(indices, counted, rows.shape[1], rows.dtype)
    p = torch.softmax(rows[counted], -1).sum(0) / max(1, int(counted.sum()))
    return rows.shape[1] * (f * p).sum()


def load_balancing_loss_backward(dloss: Tensor, logits: Tensor, indices: Tensor, mask: Tensor | None = None) -> Tensor:
    """dx_te = dloss·E/tokens·p_te·(f_e − Σ p_t·f). The fractions f are counts and have no gradient."""
    rows, counted = _flat(logits, mask)
    f = fractions(indices, counted, rows.shape[1], rows.dtype)
    p = torch.softmax(rows, -1)
    slope = dloss * rows.shape[1] / max(1, int(counted.sum())) * p * (f - (p * f).sum(-1, keepdim=True))
    return torch.where(counted[:, None], slope, 0.0).view(logits.shape)


def z_loss(logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean of logsumexp² over the tokens that count; 0 if none does."""
    rows, counted = _flat(logits, mask)
    return torch.logsumexp(rows[counted], -1).square().sum() / max(1, int(counted.sum()))


def z_loss_backward(dloss: Tensor, logits: Tensor, mask: Tensor | None = None) -> Tensor:
    """dx_te = 2·dloss/tokens·logsumexp_t·p_te."""
    rows, counted = _flat(logits, mask)
    size = torch.logsumexp(rows, -1, keepdim=True)
    slope = 2 * dloss / max(1, int(counted.sum())) * size * torch.softmax(rows, -1)
    return torch.where(counted[:, None], slope, 0.0).view(logits.shape)
