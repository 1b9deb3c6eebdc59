"""Mixture of experts."""

from adjoint.ops.moe.experts import experts

__all__ = ["experts"]
