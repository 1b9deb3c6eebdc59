"""`SiLU`, `SwiGLU` and `SigmoidGate` as modules."""

from jaxtyping import Float
from torch import Tensor, nn

from adjoint.core.errors import ArgumentError
from adjoint.core.preference import Preference
from adjoint.ops.activation import sigmoid_gate, silu, swiglu
from adjoint.ops.activation.packing import ORDERS
from adjoint.ops.activation.swiglu import Order


class SiLU(nn.Module):
    """y = x·σ(x), by `adjoint.silu`.

    Args:
        reuse_inputs: the backward writes the gradient over the input.
        preference: narrows the choice of plans.

    >>> import torch
    >>> SiLU()(torch.tensor([0.0, 1.0]))
    tensor([0.0000, 0.7311])
    """

    def __init__(self, *, reuse_inputs: bool = False, preference: Preference | None = None) -> None:
        super().__init__()
        self.reuse_inputs = reuse_inputs
        self.preference = preference

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return silu(x, reuse_inputs=self.reuse_inputs, preference=self.preference)

    def extra_repr(self) -> str:
        return _options(self.reuse_inputs, self.preference)


class SwiGLU(nn.Module):
    """y = silu(gate)·up, by `adjoint.swiglu`, from two tensors or from one packed tensor.

    Args:
        order: the order of gate and up in a packed tensor; it has no effect on two tensors.
        reuse_inputs: the backward writes the gradients over the inputs.
        preference: narrows the choice of plans.

    Raises:
        ArgumentError: the order is unknown.

    >>> import torch
    >>> SwiGLU()(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    tensor([2.1932, 7.0464])
    >>> SwiGLU(order="up_gate")(torch.tensor([3.0, 4.0, 1.0, 2.0]))
    tensor([2.1932, 7.0464])
    """

    def __init__(
        self, order: Order = "gate_up", *, reuse_inputs: bool = False, preference: Preference | None = None
    ) -> None:
        super().__init__()
        if order not in ORDERS:
            raise ArgumentError(f"SwiGLU: order must be one of {', '.join(map(repr, ORDERS))}, got {order!r}")
        self.order = order
        self.reuse_inputs = reuse_inputs
        self.preference = preference

    def forward(
        self, gate: Float[Tensor, "*shape"], up: Float[Tensor, "*shape"] | None = None
    ) -> Float[Tensor, "*shape"]:
        order = self.order if up is None else None
        return swiglu(gate, up, order=order, reuse_inputs=self.reuse_inputs, preference=self.preference)

    def extra_repr(self) -> str:
        return ", ".join(filter(None, (f"order={self.order!r}", _options(self.reuse_inputs, self.preference))))


class SigmoidGate(nn.Module):
    """y = x·σ(gate), by `adjoint.sigmoid_gate`.

    Args:
        reuse_inputs: the backward writes the gradients over the inputs.
        preference: narrows the choice of plans.

    >>> import torch
    >>> SigmoidGate()(torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0]))
    tensor([1.0000, 1.4621])
    """

    def __init__(self, *, reuse_inputs: bool = False, preference: Preference | None = None) -> None:
        super().__init__()
        self.reuse_inputs = reuse_inputs
        self.preference = preference

    def forward(self, x: Float[Tensor, "*shape"], gate: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return sigmoid_gate(x, gate, reuse_inputs=self.reuse_inputs, preference=self.preference)

    def extra_repr(self) -> str:
        return _options(self.reuse_inputs, self.preference)


def _options(reuse_inputs: bool, preference: Preference | None) -> str:
    """The options that differ from the defaults, as they are written in a call."""
    options = ["reuse_inputs=True"] * reuse_inputs + [f"preference={preference!r}"] * (preference is not None)
    return ", ".join(options)
