"""The activations in plain PyTorch, on any device that has float64.

Types up to 32 bits are computed in float64 and rounded once. Library functions then serve: their
naive forms overflow only for |x| > 709, where every result has long left the narrower types. For
float64 itself that is not so, and the half exponentials of the kernels are written out.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

ROUND = {  # these methods cost half of Tensor.to
    torch.float64: Tensor.double,
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
}
"""The methods that round a tensor to a dtype."""
_BOUND = 2048.0  # past it silu is its asymptote in every type; infinities would give 0·∞


def forward(gate: Tensor, up: Tensor | None, y: Tensor | None) -> Tensor:
    """silu(gate)·up, or silu(gate) without an up; in y, or if that is None, in new memory with the layout of gate."""
    if gate.dtype == torch.float64:
        value, _, d = _parts(gate)
        wide = value.mul_(d if up is None else up * d)
    else:
        wide = F.silu(gate.double().clamp_min_(-_BOUND), inplace=True)
        if up is not None:
            wide.mul_(up)
    return ROUND[gate.dtype](wide) if y is None else y.copy_(wide)


def backward(dy: Tensor, gate: Tensor, up: Tensor | None, dgate: Tensor | None, dup: Tensor | None) -> None:
    """Computes dgate = dy·up·silu'(gate) and dup = dy·silu(gate), each unless its tensor is None.

    It reads everything before it writes, so the outputs may be the inputs.
    """
    if gate.dtype == torch.float64:
        value, slope, d = _parts(gate)
        scaled = dy * d
        to_up = scaled * value
        to_gate = scaled * (d * slope) if up is None else scaled * (up * (d * (0.5 * slope))) * 2
    else:
        x = gate.double().clamp_(-_BOUND, torch.inf)
        to_up = F.silu(x).mul_(dy)
        to_gate = torch.ops.aten.silu_backward(dy.double(), x.clamp_(max=_BOUND))
        if up is not None:
            to_gate.mul_(up)
    if dgate is not None:
        dgate.copy_(to_gate)
    if dup is not None:
        dup.copy_(to_up)


def _parts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """silu(x)/d, silu'(x)/d² and d = e^(min(x, 0)/2), with h = e^−|x|/2 and r = 1 / (1 + h²)."""
    bounded = x.clamp(-_BOUND, _BOUND)
    h = (bounded.abs() * -0.5).exp()
    z = h * h
    r = 1 / (1 + z)
    positive = x >= 0
    value = torch.where(positive, x, bounded * h) * r
    slope = r * (1 + bounded * torch.where(positive, z, 1.0) * r)
    return value, slope, torch.where(positive, 1.0, h)
