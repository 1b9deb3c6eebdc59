"""Embedding: lookup and bags, with their gradients."""

from adjoint.ops.embedding.bag import embedding_bag
from adjoint.ops.embedding.embedding import embedding

__all__ = ["embedding", "embedding_bag"]
