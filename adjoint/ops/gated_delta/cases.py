"""What the gated delta rule is tested, verified and timed on."""

from adjoint.contract.cases import Workload
from adjoint.ops.gated_delta.bad_calls import BAD_CALLS
from adjoint.ops.gated_delta.builds import builds
from adjoint.ops.gated_delta.rule.cases import NORMALIZED, RULE
from adjoint.ops.gated_delta.rule.workloads import WORKLOADS as WHOLE
from adjoint.ops.gated_delta.stages.cases import OTHERS, W_U
from adjoint.ops.gated_delta.stages.w_u_workloads import WORKLOADS as W_U_WORKLOADS
from adjoint.ops.gated_delta.step.cases import STEPS
from adjoint.ops.gated_delta.step.workloads import DECODING, ON_A_CPU

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (RULE, NORMALIZED, *W_U, *OTHERS, *STEPS)

WORKLOADS: tuple[Workload, ...] = (*WHOLE, *W_U_WORKLOADS, *DECODING, ON_A_CPU)
