"""Cases (being written)."""

from adjoint.ops.indexing.builds import builds

SUBJECTS = ()
BAD_CALLS = ()
WORKLOADS = ()
__all__ = ["BAD_CALLS", "SUBJECTS", "WORKLOADS", "builds"]
