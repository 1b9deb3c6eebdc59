"""Thin modules over the ops: no parameters of their own, nothing but the call."""

from adjoint.nn.activation import SiLU, SwiGLU

__all__ = ["SiLU", "SwiGLU"]
