"""What the step and the stages are tested, verified and timed on."""

from adjoint.contract.cases import Workload
from adjoint.ops.gated_delta.bad_calls import BAD_CALLS
from adjoint.ops.gated_delta.builds import builds
from adjoint.ops.gated_delta.stages.cases import OTHERS, W_U
from adjoint.ops.gated_delta.stages.w_u_workloads import WORKLOADS as W_U_WORKLOADS
from adjoint.ops.gated_delta.step.cases import STEPS
from adjoint.ops.gated_delta.step.workloads import DECODING

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (*W_U, *OTHERS, *STEPS)

WORKLOADS: tuple[Workload, ...] = (*W_U_WORKLOADS, *DECODING)
