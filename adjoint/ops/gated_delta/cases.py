"""What the gated delta rule is tested, verified and timed on."""

from adjoint.ops.gated_delta.bad_calls import BAD_CALLS
from adjoint.ops.gated_delta.builds import builds
from adjoint.ops.gated_delta.rule_cases import NORMALIZED, RULE
from adjoint.ops.gated_delta.rule_workloads import WORKLOADS
from adjoint.ops.gated_delta.stage_cases import OTHERS, W_U
from adjoint.ops.gated_delta.step_cases import STEPS

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (RULE, NORMALIZED, *W_U, *OTHERS, *STEPS)
