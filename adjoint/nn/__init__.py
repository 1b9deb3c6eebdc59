"""Thin modules over the ops: torch's parameters where torch has the module, and nothing but the call."""

from adjoint.nn.activation import SiLU, SwiGLU
from adjoint.nn.embedding import Embedding, EmbeddingBag

__all__ = ["Embedding", "EmbeddingBag", "SiLU", "SwiGLU"]
