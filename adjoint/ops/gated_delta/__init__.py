"""The gated delta rule, whole and by stage, with its gradients."""

from adjoint.ops.gated_delta.rule import gated_delta_rule

__all__ = ["gated_delta_rule"]
