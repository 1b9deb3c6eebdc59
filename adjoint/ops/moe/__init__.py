"""Mixture of experts: routing, its losses, and the layers around it."""

from adjoint.ops.moe.losses import load_balancing_loss, z_loss
from adjoint.ops.moe.route import route

__all__ = ["load_balancing_loss", "route", "z_loss"]
