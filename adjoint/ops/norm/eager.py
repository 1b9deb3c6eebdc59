"""The norms in plain PyTorch: float64 arithmetic, rounded once.

Sums over a row and over all rows are torch's: the same bits for the same tensors, in an order that torch chooses.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.ops.norm.arguments import Backward, Forward

_BOUND = 2048.0
"""Past it silu is its asymptote in every type, and 0 or −0 below; infinities would give 0·∞."""


def _scaled(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """z = x·r and r = 1 / sqrt(mean(x²) + ε), in float64."""
    wide = x.double()
    r = wide.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return wide * r, r


def _silu(gate: Tensor) -> Tensor:
    return F.silu(gate.double().clamp(min=-_BOUND))


def forward(of: Forward, outputs: tuple[Tensor, ...]) -> None:
    """y = z·(offset + weight)·silu(gate), of s = x + residual where there is a residual."""
    x = of.x if of.residual is None else outputs[1].copy_(of.x.double() + of.residual.double())
    z, _ = _scaled(x, of.eps)
    if of.rounds:
        z = z.to(x.dtype).double()
    z.mul_(of.weight.double() + of.offset)
    outputs[0].copy_(z if of.gate is None else z.mul_(_silu(of.gate)))


def backward(of: Backward, dx: Tensor, dweight: Tensor, dgate: Tensor) -> None:
    """dx = r·(a − z·mean(a·z)) + ds with a = u·w, dweight = Σ u·z, dgate = dy·z·w·silu'(gate), u = dy·silu(gate)."""
    upstream = torch.zeros_like(of.x, dtype=torch.float64) if of.dy is None else of.dy.double()
    z, r = _scaled(of.x, of.eps)
    w = of.weight.double() + of.offset
    u = upstream if of.gate is None else upstream * _silu(of.gate)
    if of.needs.x:
        a = u * w
        gradient = (a - z * (a * z).mean(-1, keepdim=True)).mul_(r)
        dx.copy_(gradient if of.ds is None else gradient.add_(of.ds))
    if of.rounds:
        z = z.to(of.x.dtype).double()
    if of.needs.weight:
        dweight.copy_((u * z).reshape(-1, of.x.shape[-1]).sum(0))
    if of.needs.gate and of.gate is not None:
        dgate.copy_(torch.ops.aten.silu_backward(upstream * z * w, of.gate.double().clamp(-_BOUND, _BOUND)))


def l2_forward(x: Tensor, eps: float, y: Tensor) -> None:
    wide = x.double()
    y.copy_(wide / wide.square().sum(-1, keepdim=True).add_(eps).sqrt_())


def l2_backward(dy: Tensor, x: Tensor, eps: float, dx: Tensor) -> None:
    wide, upstream = x.double(), dy.double()
    r = wide.square().sum(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    y = wide * r
    dx.copy_((upstream - y * (y * upstream).sum(-1, keepdim=True)).mul_(r))
