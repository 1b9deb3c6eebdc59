"""Activations: `silu` and `swiglu`, with their gradients."""

from adjoint.ops.activation.silu import silu
from adjoint.ops.activation.swiglu import swiglu

__all__ = ["silu", "swiglu"]
