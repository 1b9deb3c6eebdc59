"""The rotary position embedding, with its gradients."""

from adjoint.ops.rotary.rotary import rotary

__all__ = ["rotary"]
