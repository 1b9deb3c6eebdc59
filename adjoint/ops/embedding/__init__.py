"""Embedding: lookup and bags, with their gradients."""

from adjoint.ops.embedding.embedding import embedding
from adjoint.ops.embedding.embedding_bag import embedding_bag

__all__ = ["embedding", "embedding_bag"]
