"""The problems the mixture-of-experts family is tested, verified and timed on."""

from adjoint.ops.moe import losses_cases, route_cases
from adjoint.ops.moe.bad_calls import BAD_CALLS
from adjoint.ops.moe.builds import builds

__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]

SUBJECTS = (
    *route_cases.SUBJECTS,
    *losses_cases.SUBJECTS,
)

WORKLOADS = (*route_cases.WORKLOADS,)
