"""The definition of the activations and their adjoints: float64, one formula a line, never optimised.

    silu(x) = x·σ(x),    σ(x) = 1 / (1 + e^−x)

Written with e^−|x|, which cannot overflow.
"""

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    decay = torch.exp(-x.abs())
    return torch.where(x >= 0, 1.0, decay) / (1 + decay)


def silu(x: Tensor) -> Tensor:
    """x·σ(x); its limit, −0, at −∞."""
    return torch.where(x == -torch.inf, -0.0, x * sigmoid(x))


def silu_slope(x: Tensor) -> Tensor:
    """σ(x)·(1 + x·σ(−x)); its limits, −0 at −∞ and 1 at +∞."""
    slope = sigmoid(x) * (1 + x * sigmoid(-x))
    return torch.where(x == -torch.inf, -0.0, torch.where(x == torch.inf, 1.0, slope))


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    return dy * silu_slope(x)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def swiglu_backward(dy: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to gate and up."""
    return dy * up * silu_slope(gate), dy * silu(gate)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * sigmoid(gate)


def sigmoid_gate_backward(dy: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients to x and gate; 1 − σ(gate) is σ(−gate)."""
    return dy * sigmoid(gate), dy * x * (sigmoid(gate) * sigmoid(-gate))


def unpack(packed: Tensor, order: str) -> tuple[Tensor, Tensor]:
    """The gate and the up inside a packed tensor."""
    half = packed.shape[-1] // 2
    if order == "interleaved":
        return packed[..., 0::2], packed[..., 1::2]
    first, second = packed[..., :half], packed[..., half:]
    return (first, second) if order == "gate_up" else (second, first)


def pack(gate: Tensor, up: Tensor, order: str) -> Tensor:
    """The inverse of `unpack`."""
    if order == "interleaved":
        return torch.stack((gate, up), dim=-1).flatten(-2)
    return torch.cat((gate, up) if order == "gate_up" else (up, gate), dim=-1)


def swiglu_packed(packed: Tensor, order: str) -> Tensor:
    return swiglu(*unpack(packed, order))


def swiglu_packed_backward(dy: Tensor, packed: Tensor, order: str) -> Tensor:
    return pack(*swiglu_backward(dy, *unpack(packed, order)), order)
