"""The losses as they are defined, in float64. Imports nothing but torch; never optimised.

Options come as keywords of the public functions. Tokens whose label is `ignore_index` count for nothing.
"""

from typing import Any

import torch
from torch import Tensor

NAMES = ("ignore_index", "label_smoothing", "z_loss", "softcap", "reduction", "shift", "return_log_probabilities")


def targets(labels: Tensor, ignore_index: int = -100, shift: bool = False) -> tuple[Tensor, Tensor]:
    """The class of each token, 0 where it does not count, and which tokens do; with `shift`, that of the next token."""
    labels = labels.long()  # which has every ignore_index
    if shift:
        end = torch.full_like(labels[..., :1], ignore_index)
        labels = torch.cat((labels[..., 1:], end), -1)
    counted = labels != ignore_index
    return torch.where(counted, labels, 0), counted


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    return logits if not softcap else softcap * torch.tanh(logits / softcap)


def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: str = "mean", shift: bool = False, return_log_probabilities: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss, and the log-probabilities of the labels where they are asked for."""
    target, counted = targets(labels, ignore_index, shift)
    z = torch.where(counted[..., None], capped(logits, softcap), 0.0)
    size = torch.logsumexp(z, -1)
    chosen = z.gather(-1, target[..., None])[..., 0] - size
    losses = -(1 - label_smoothing) * chosen + z_loss * size * size
    if label_smoothing:
        losses = losses + label_smoothing * (size - z.mean(-1))
    losses = torch.where(counted, losses, 0.0)
    log_probabilities = torch.where(counted, chosen, 0.0)
    number = counted.sum().clamp_min(1)
    loss = losses if reduction == "none" else losses.sum() / (number if reduction == "mean" else 1)
    return (loss, log_probabilities) if return_log_probabilities else (loss,)


def cross_entropy_backward(
    upstream: tuple[Tensor, ...], logits: Tensor, labels: Tensor, *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: str = "mean",
    shift: bool = False, return_log_probabilities: bool = False,
) -> Tensor:  # fmt: skip
    """dlogits. With p = softmax(z) and y the label: g·((1 + 2λL)·p − (1 − ε)·1_y − ε/V) + h·(1_y − p), times dz/dx."""
    target, counted = targets(labels, ignore_index, shift)
    g = upstream[0].expand(labels.shape)
    g = g / counted.sum().clamp_min(1) if reduction == "mean" else g
    h = upstream[1] if return_log_probabilities else torch.zeros_like(g)
    z = torch.where(counted[..., None], capped(logits, softcap), 0.0)
    size = torch.logsumexp(z, -1)
    p = torch.exp(z - size[..., None])
    label = torch.nn.functional.one_hot(target, logits.shape[-1]).to(p.dtype)
    slope = g[..., None] * (
        (1 + 2 * z_loss * size[..., None]) * p - (1 - label_smoothing) * label - label_smoothing / logits.shape[-1]
    )
    slope = slope + h[..., None] * (label - p)
    if softcap:
        slope = slope * (1 - (z / softcap).square())
    return torch.where(counted[..., None], slope, 0.0)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden @ weight.T if bias is None else hidden @ weight.T + bias


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    return cross_entropy(logits_of(hidden, weight, bias), labels, **options)


def linear_cross_entropy_backward(
    upstream: tuple[Tensor, ...], hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dhidden, dweight, and dbias where there is a bias."""
    dlogits = cross_entropy_backward(upstream, logits_of(hidden, weight, bias), labels, **options)
    rows = dlogits.reshape(-1, weight.shape[0])
    dweight = rows.T @ hidden.reshape(-1, weight.shape[1])
    return (dlogits @ weight, dweight) if bias is None else (dlogits @ weight, dweight, rows.sum(0))
