"""x·σ(gate) by torch's own functions, in float32 arithmetic and rounded once, on the CPU.

torch computes σ(t) as 1 / (1 + e^−t), which is right for t that are not far below 0, and 0 where e^−t overflows.
"""

import torch
from torch import Tensor

from adjoint.ops.activation import in_float32
from adjoint.ops.activation.eager import ROUND


def forward(gate: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """σ(gate)·x; in y, or if that is None, in new memory with the layout of gate."""
    result = _sigmoid(gate).mul_(x.float())
    return ROUND[gate.dtype](result) if y is None else y.copy_(result)


def backward(dy: Tensor, gate: Tensor, x: Tensor, dgate: Tensor | None, dx: Tensor | None) -> None:
    """Computes dgate = dy·x·σ'(gate) and dx = dy·σ(gate), each unless its tensor is None. Outputs may be inputs."""
    in_float32.backward(dy, gate, x, dgate, dx, _differentiate)


def _differentiate(dy: Tensor, gate: Tensor, x: Tensor, dgate: Tensor | None, dx: Tensor | None) -> None:
    """`backward` for outputs that share no memory with the inputs."""
    sigmoid, upstream = _sigmoid(gate), dy.float()
    if dgate is not None:
        dgate.copy_(_sigmoid(-gate).mul_(sigmoid).mul_(upstream).mul_(x.float()))
    if dx is not None:
        dx.copy_(sigmoid.mul_(upstream))


def _sigmoid(gate: Tensor) -> Tensor:
    """σ(gate) in float32, in dense memory of its own, so that the layout of a gate does not change torch's loop."""
    if gate.dtype == torch.float32 and gate.is_contiguous():
        return gate.sigmoid()
    return torch.empty_like(gate, dtype=torch.float32).copy_(gate).sigmoid_()
