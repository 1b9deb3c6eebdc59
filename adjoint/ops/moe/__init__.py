"""Mixture of experts: routing and its losses, rows to their experts and back, and the layer between, with gradients."""

from adjoint.ops.moe.combine import combine
from adjoint.ops.moe.dispatch import dispatch
from adjoint.ops.moe.experts import experts
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.losses import load_balancing_loss, z_loss
from adjoint.ops.moe.route import route

__all__ = ["Layout", "combine", "dispatch", "experts", "load_balancing_loss", "route", "z_loss"]


def __dir__() -> list[str]:
    return __all__
