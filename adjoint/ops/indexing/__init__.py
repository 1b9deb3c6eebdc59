"""Indexing along an axis, with its gradient."""

from adjoint.ops.indexing.take_along_axis import take_along_axis

__all__ = ["take_along_axis"]
