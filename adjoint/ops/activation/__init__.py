"""Activations: `silu`, `swiglu` and `sigmoid_gate`, with their gradients."""

from adjoint.ops.activation.sigmoid_gate import sigmoid_gate
from adjoint.ops.activation.silu import silu
from adjoint.ops.activation.swiglu import swiglu

__all__ = ["sigmoid_gate", "silu", "swiglu"]
