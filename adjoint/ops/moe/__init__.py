"""Mixture of experts: rows to their experts and back, with their gradients."""

from adjoint.ops.moe.combine import combine
from adjoint.ops.moe.dispatch import dispatch
from adjoint.ops.moe.layout import Layout

__all__ = ["Layout", "combine", "dispatch"]
