"""The definition of the norms and their adjoints: float64, one formula a line, never optimised.

rms_norm         y = z·w,    z = x·r,    r = 1 / sqrt(mean(x²) + ε),    w = offset + weight
gated_rms_norm   y = z·weight·silu(gate)
l2_norm          y = x / sqrt(Σx² + ε)
"""

import torch
from torch import Tensor


def reciprocal(x: Tensor, eps: float) -> Tensor:
    """r, with the last axis kept."""
    return 1 / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def silu_slope(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    return x * reciprocal(x, eps) * (offset + weight)


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """dx = r·(a − z·mean(a·z)) with a = dy·w, and dweight = Σ dy·z over all rows."""
    r = reciprocal(x, eps)
    z, a = x * r, dy * (offset + weight)
    return r * (a - z * (a * z).mean(-1, keepdim=True)), (dy * z).reshape(-1, x.shape[-1]).sum(0)


def rms_norm_residual(x: Tensor, weight: Tensor, residual: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of s = x + residual, and s."""
    return rms_norm(x + residual, weight, eps), x + residual


def rms_norm_residual_backward(
    dy: Tensor, ds: Tensor, x: Tensor, weight: Tensor, residual: Tensor, eps: float
) -> tuple[Tensor, ...]:
    dx, dweight = rms_norm_backward(dy, x + residual, weight, eps)
    return dx + ds, dweight, dx + ds


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps) * silu(gate)


def gated_rms_norm_backward(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    """The gradients to x and weight are those of the norm for dy·silu(gate); dgate = dy·z·weight·silu'(gate)."""
    dx, dweight = rms_norm_backward(dy * silu(gate), x, weight, eps)
    return dx, dy * rms_norm(x, weight, eps) * silu_slope(gate), dweight


def l2_norm(x: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)


def l2_norm_backward(dy: Tensor, x: Tensor, eps: float) -> Tensor:
    """dx = r·(dy − y·(y·dy)) with r = 1 / sqrt(Σx² + ε)."""
    r = 1 / torch.sqrt(x.square().sum(-1, keepdim=True) + eps)
    y = x * r
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))
