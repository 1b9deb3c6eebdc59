"""x·σ(gate) by torch's own functions, in float32 arithmetic and rounded once, on the CPU.

torch computes σ(t) as 1 / (1 + e^−t), which is right for t that are not far below 0, and 0 where e^−t overflows.
"""

import torch
from torch import Tensor

from adjoint.ops.activation import in_float32
from adjoint.ops.activation.eager import ROUND


def forward(gate: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """σ(gate)·x; into y, or without one into new memory laid out like gate."""
    result = _sigmoid(gate).mul_(x.float())
    return ROUND[gate.dtype](result) if y is None else y.copy_(result)


def backward(dy: Tensor, gate: Tensor, x: Tensor, dgate: Tensor | None, dx: Tensor | None) -> None:
    """dgate = dy·x·σ'(gate) and dx = dy·σ(gate), each where a tensor is given for it; these may be the inputs."""
    in_float32.backward(dy, gate, x, dgate, dx, _differentiate)


def _differentiate(dy: Tensor, gate: Tensor, x: Tensor, dgate: Tensor | None, dx: Tensor | None) -> None:
    """`backward`, into memory that is no input's."""
    sigmoid, upstream = _sigmoid(gate), dy.float()
    if dgate is not None:
        dgate.copy_(_sigmoid(-gate).mul_(sigmoid).mul_(upstream).mul_(x.float()))
    if dx is not None:
        dx.copy_(sigmoid.mul_(upstream))


def _sigmoid(gate: Tensor) -> Tensor:
    """σ(gate) in float32, in dense memory of its own: how a gate lies does not change how torch's loop runs."""
    if gate.dtype == torch.float32 and gate.is_contiguous():
        return gate.sigmoid()
    return torch.empty_like(gate, dtype=torch.float32).copy_(gate).sigmoid_()
