"""Losses of a language model: `cross_entropy` of logits, and `linear_cross_entropy`, which never holds all of them."""

from adjoint.ops.loss.cross_entropy import cross_entropy
from adjoint.ops.loss.linear_cross_entropy import linear_cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy"]
