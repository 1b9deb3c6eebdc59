"""The norms in plain PyTorch: float64 arithmetic, rounded once.

Sums over a row and over all rows are torch's: the same bits for the same tensors, in an order that torch chooses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_BOUND = 2048.0
"""Past it silu is its asymptote in every type, and 0 or −0 below; infinities would give 0·∞."""


def _scaled(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """z = x·r and r = 1 / sqrt(mean(x²) + ε), in float64."""
    wide = x.double()
    r = wide.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return wide * r, r


def _silu(gate: Tensor) -> Tensor:
    return F.silu(gate.double().clamp(min=-_BOUND))


def forward(
    x: Tensor, weight: Tensor, residual: Tensor | None, gate: Tensor | None, eps: float, offset: float,
    round_before_gate: bool, y: Tensor, s: Tensor | None,
) -> None:  # fmt: skip
    """y = z·(offset + weight)·silu(gate), of s = x + residual where there is a residual."""
    if residual is not None and s is not None:
        x = s.copy_(x.double() + residual.double())
    z, _ = _scaled(x, eps)
    if round_before_gate:
        z = z.to(x.dtype).double()
    z.mul_(weight.double() + offset)
    y.copy_(z if gate is None else z.mul_(_silu(gate)))


def backward(
    dy: Tensor | None, ds: Tensor | None, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, offset: float,
    round_before_gate: bool, dx: Tensor | None, dgate: Tensor | None, dweight: Tensor | None,
) -> None:  # fmt: skip
    """dx = r·(a − z·mean(a·z)) + ds with a = u·w, dgate = dy·z·w·silu'(gate), dweight = Σ u·z, u = dy·silu(gate)."""
    upstream = torch.zeros_like(x, dtype=torch.float64) if dy is None else dy.double()
    z, r = _scaled(x, eps)
    w = weight.double() + offset
    u = upstream if gate is None else upstream * _silu(gate)
    if dx is not None:
        a = u * w
        gradient = (a - z * (a * z).mean(-1, keepdim=True)).mul_(r)
        dx.copy_(gradient if ds is None else gradient.add_(ds))
    if round_before_gate:
        z = z.to(x.dtype).double()
    if dweight is not None:
        dweight.copy_((u * z).reshape(-1, x.shape[-1]).sum(0))
    if dgate is not None and gate is not None:
        dgate.copy_(torch.ops.aten.silu_backward(upstream * z * w, gate.double().clamp(-_BOUND, _BOUND)))


def l2_forward(x: Tensor, eps: float, y: Tensor) -> None:
    wide = x.double()
    y.copy_(wide / wide.square().sum(-1, keepdim=True).add_(eps).sqrt_())


def l2_backward(dy: Tensor, x: Tensor, eps: float, dx: Tensor) -> None:
    wide, upstream = x.double(), dy.double()
    r = wide.square().sum(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    y = wide * r
    dx.copy_((upstream - y * (y * upstream).sum(-1, keepdim=True)).mul_(r))
