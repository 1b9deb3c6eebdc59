"""What the family is tested, verified and timed on."""

from adjoint.ops.moe import experts_cases
from adjoint.ops.moe.bad_calls import BAD_CALLS
from adjoint.ops.moe.builds import builds

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (*experts_cases.SUBJECTS,)
WORKLOADS = (*experts_cases.WORKLOADS,)
