"""Where families find what `launch` has for them."""

from adjoint.core.launch import refuse_capture, run_concurrently

__all__ = ["refuse_capture", "run_concurrently"]
