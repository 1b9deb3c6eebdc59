"""The problems the mixture-of-experts family is tested, verified and timed on."""

from adjoint.ops.moe import combine_cases, dispatch_cases, experts_cases
from adjoint.ops.moe.bad_calls import BAD_CALLS
from adjoint.ops.moe.builds import builds

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (
    *dispatch_cases.SUBJECTS,
    *combine_cases.SUBJECTS,
    *experts_cases.SUBJECTS,
)

WORKLOADS = (
    *dispatch_cases.WORKLOADS,
    *combine_cases.WORKLOADS,
    *experts_cases.WORKLOADS,
)
