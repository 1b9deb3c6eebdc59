"""Calls of the family that must raise, and what their errors must say."""

from adjoint.ops.moe import route_bad_calls

BAD_CALLS = (*route_bad_calls.BAD_CALLS,)
