"""The checks every op goes through, in CI and on the user's own machine.

`jobs()` lists them for a device; each job runs one check on one op, dtype and backend, and returns rows. An op is
covered by its `cases.py`, and needs nothing more.
"""

from adjoint.verify.listing.jobs import Job, available_backends, jobs, subjects
from adjoint.verify.run import Row

__all__ = ["Job", "Row", "available_backends", "jobs", "subjects"]
