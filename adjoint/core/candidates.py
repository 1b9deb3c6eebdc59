"""Where families find what `plan` has for them."""

from adjoint.core.plan import Compute, Run, in_pytorch, writing

__all__ = ["Compute", "Run", "in_pytorch", "writing"]
