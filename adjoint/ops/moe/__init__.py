"""Mixture of experts: routing, its losses, and the layers around it."""

from adjoint.ops.moe.route import route

__all__ = ["route"]
