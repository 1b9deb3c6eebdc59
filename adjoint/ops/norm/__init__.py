"""Norms over the last axis: `rms_norm`, `gated_rms_norm` and `l2_norm`, with their gradients."""

from adjoint.ops.norm.gated_rms_norm import gated_rms_norm
from adjoint.ops.norm.l2_norm import l2_norm
from adjoint.ops.norm.rms_norm import rms_norm

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]
