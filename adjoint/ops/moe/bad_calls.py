"""Calls of the family that must raise, and what their errors must say."""

from adjoint.ops.moe import dispatch_bad_calls, experts_bad_calls

BAD_CALLS = (*dispatch_bad_calls.BAD_CALLS, *experts_bad_calls.BAD_CALLS)
