"""x·σ(gate) in plain PyTorch, on any device that has float64.

Types up to 32 bits are computed in float64 and rounded once; torch's σ gives 0 for gates below −709, where every result
has left them. For float64 itself the half exponentials of the kernels are written out.
"""

import torch
from torch import Tensor

from adjoint.ops.activation.eager import ROUND

_BOUND = 2048.0  # past it σ is 0 or 1 in every type


def forward(gate: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """σ(gate)·x; in y, or if that is None, in new memory with the layout of gate."""
    if gate.dtype == torch.float64:
        r, d, _ = _parts(gate)
        wide = (x * d).mul_(r * d)
    else:
        wide = gate.double().sigmoid_().mul_(x)
    return ROUND[gate.dtype](wide) if y is None else y.copy_(wide)


def backward(dy: Tensor, gate: Tensor, x: Tensor, dgate: Tensor | None, dx: Tensor | None) -> None:
    """Computes dgate = dy·x·σ'(gate) and dx = dy·σ(gate), each unless its tensor is None.

    It reads everything before it writes, so the outputs may be the inputs.
    """
    if gate.dtype == torch.float64:
        r, d, h = _parts(gate)
        to_x = (dy * d).mul_(r * d)
        to_gate = (dy * h).mul_(x * (h * r * r))
    else:
        wide = gate.double()
        sigmoid = wide.sigmoid()
        to_x = sigmoid * dy
        to_gate = wide.neg_().sigmoid_().mul_(sigmoid).mul_(dy).mul_(x)
    if dgate is not None:
        dgate.copy_(to_gate)
    if dx is not None:
        dx.copy_(to_x)


def _parts(gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """r, d and h: σ(gate) is r·d² and its slope r²·h², with h = e^−|gate|/2 and d = e^(min(gate, 0)/2)."""
    h = (gate.abs().clamp_max_(_BOUND) * -0.5).exp_()
    return 1 / (1 + h * h), torch.where(gate >= 0, 1.0, h), h
