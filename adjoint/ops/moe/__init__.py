"""Mixture of experts: rows to their experts and back, and the layer between, with their gradients."""

from adjoint.ops.moe.combine import combine
from adjoint.ops.moe.dispatch import dispatch
from adjoint.ops.moe.experts import experts
from adjoint.ops.moe.layout import Layout

__all__ = ["Layout", "combine", "dispatch", "experts"]
