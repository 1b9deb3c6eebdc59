"""Embedding: lookup and bags, with their gradients."""

from adjoint.ops.embedding.embedding import embedding

__all__ = ["embedding"]
