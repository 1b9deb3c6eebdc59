"""Losses of a language model: `cross_entropy` of logits."""

from adjoint.ops.loss.cross_entropy import cross_entropy

__all__ = ["cross_entropy"]
