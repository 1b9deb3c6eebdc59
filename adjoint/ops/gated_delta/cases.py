"""What the gated delta rule is tested, verified and timed on."""

from adjoint.contract.cases import Workload
from adjoint.ops.gated_delta.bad_calls import BAD_CALLS
from adjoint.ops.gated_delta.builds import builds
from adjoint.ops.gated_delta.rule_cases import NORMALIZED, RULE
from adjoint.ops.gated_delta.rule_workloads import WORKLOADS as WHOLE
from adjoint.ops.gated_delta.stage_cases import OTHERS, W_U
from adjoint.ops.gated_delta.step_cases import STEPS
from adjoint.ops.gated_delta.step_workloads import DECODING, ON_A_CPU
from adjoint.ops.gated_delta.w_u_workloads import WORKLOADS as W_U_WORKLOADS

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (RULE, NORMALIZED, *W_U, *OTHERS, *STEPS)

WORKLOADS: tuple[Workload, ...] = (*WHOLE, *W_U_WORKLOADS, *DECODING, ON_A_CPU)
