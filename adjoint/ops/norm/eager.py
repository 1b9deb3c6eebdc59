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
"""Beyond ±_BOUND silu has its limits in every type: its asymptote above, and 0 or −0 below. Infinities would give
0·∞."""


def _wide(x: Tensor) -> Tensor:
    """A float64 copy that may be overwritten."""
    return x.to(torch.float64, copy=True)


def _gate(gate: Tensor) -> Tensor:
    """A float64 copy, bounded below."""
    return _wide(gate).clamp_(min=-_BOUND)


def _reciprocal(squares: Tensor, eps: float) -> Tensor:
    """r = 1 / sqrt(mean(x²) + eps) of each row."""
    return squares.mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()


def forward(norm: Norm, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """y = z·(offset + weight)·silu(gate), for s = x + residual if there is a residual.

    s has the same bits as a sum in float64 that is then rounded, because 53 bits are more than twice the 24 bits of
    float32. New memory costs more than arithmetic here, so tensors that are no longer needed are overwritten.
    """
    of, y, s = norm.forward(arguments), outputs[0], outputs[-1]
    x = of.x if of.residual is None else torch.add(of.x, of.residual, out=s)
    if not norm.weight:
        y.copy_(reference.l2_norm(x.double(), of.eps))
        return
    z = _wide(x)
    z.mul_(_reciprocal(z * z, of.eps))
    if of.rounds:
        z = _wide(z.to(x.dtype))
    z.mul_(of.weight.double() + of.offset)
    y.copy_(z if of.gate is None else z.mul_(F.silu(_gate(of.gate), inplace=True)))


def backward(norm: Norm, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """dx = r·(a − z·mean(a·z)) + ds with a = u·w, dweight = Σ u·z, dgate = dy·z·w·silu'(gate), u = dy·silu(gate).

    The gradient of x comes last, because it is computed in the memory of u and z.
    """
    of = norm.backward(arguments)
    dy = torch.zeros_like(of.x, dtype=torch.float64) if of.dy is None else _wide(of.dy)
    if not norm.weight:
        outputs[0].copy_(reference.l2_norm_backward(dy, of.x.double(), of.eps))
        return
    need_x, need_weight, need_gate = norm.needs(arguments[-1])
    z = _wide(of.x)
    scratch = z * z
    r, w = _reciprocal(scratch, of.eps), of.weight.double() + of.offset
    z.mul_(r)
    rounded, u = z, dy
    if of.rounds:
        rounded = _wide(z.to(of.x.dtype))
    if of.gate is not None:
        gate = _gate(of.gate)
        u = F.silu(gate).mul_(dy)
    if need_gate:
        product = torch.mul(dy, rounded, out=scratch).mul_(w)
        outputs[2].copy_(torch.ops.aten.silu_backward(product, gate.clamp_(max=_BOUND)))
    if need_weight:
        outputs[1].copy_(torch.mul(u, rounded, out=scratch).reshape(-1, of.x.shape[-1]).sum(0))
    if need_x:
        a = u.mul_(w)
        slope = torch.mul(a, z, out=scratch).mean(-1, keepdim=True)
        gradient = a.sub_(z.mul_(slope)).mul_(r)
        outputs[0].copy_(gradient if of.ds is None else gradient.add_(of.ds))
