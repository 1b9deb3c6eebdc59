"""The norms in plain PyTorch: float64 arithmetic, rounded once.

Sums over a row and over all rows are torch's: the same bits for the same tensors, in an order that torch chooses.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.ops.norm import reference
from adjoint.ops.norm.arguments import Norm

_BOUND = 2048.0
"""Past it silu is its asymptote in every type, and 0 or −0 below; infinities would give 0·∞."""


def _silu(gate: Tensor) -> Tensor:
    return F.silu(gate.double().clamp(min=-_BOUND))


def forward(norm: Norm, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """y = z·(offset + weight)·silu(gate), of s = x + residual where there is a residual."""
    of, y, s = norm.forward(arguments), outputs[0], outputs[-1]
    x = of.x if of.residual is None else s.copy_(of.x.double() + of.residual.double())
    wide = x.double()
    if not norm.weight:
        y.copy_(reference.l2_norm(wide, of.eps))
        return
    z = wide * reference.reciprocal(wide, of.eps)
    if of.rounds:
        z = z.to(x.dtype).double()
    z.mul_(of.weight.double() + of.offset)
    y.copy_(z if of.gate is None else z.mul_(_silu(of.gate)))


def backward(norm: Norm, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """dx = r·(a − z·mean(a·z)) + ds with a = u·w, dweight = Σ u·z, dgate = dy·z·w·silu'(gate), u = dy·silu(gate)."""
    of = norm.backward(arguments)
    wide = of.x.double()
    dy = torch.zeros_like(wide) if of.dy is None else of.dy.double()
    if not norm.weight:
        outputs[0].copy_(reference.l2_norm_backward(dy, wide, of.eps))
        return
    need_x, need_weight, need_gate = norm.needs(arguments[-1])
    r, w = reference.reciprocal(wide, of.eps), of.weight.double() + of.offset
    z, u = wide * r, dy if of.gate is None else dy * _silu(of.gate)
    if need_x:
        a = u * w
        gradient = (a - z * (a * z).mean(-1, keepdim=True)).mul_(r)
        outputs[0].copy_(gradient if of.ds is None else gradient.add_(of.ds))
    if of.rounds:
        z = z.to(of.x.dtype).double()
    if need_weight:
        outputs[1].copy_((u * z).reshape(-1, of.x.shape[-1]).sum(0))
    if need_gate:
        outputs[2].copy_(torch.ops.aten.silu_backward(dy * z * w, of.gate.double().clamp(-_BOUND, _BOUND)))
