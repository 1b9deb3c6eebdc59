"""Thin modules over the ops: torch's parameters where torch has the module, and nothing but the call."""

from adjoint.nn.activation import SiLU, SwiGLU
from adjoint.nn.embedding import Embedding, EmbeddingBag
from adjoint.nn.loss import LinearCrossEntropy
from adjoint.nn.moe import SparseMoE, fuse_experts
from adjoint.nn.norm import GatedRMSNorm, RMSNorm

__all__ = [
    "Embedding",
    "EmbeddingBag",
    "GatedRMSNorm",
    "LinearCrossEntropy",
    "RMSNorm",
    "SiLU",
    "SparseMoE",
    "SwiGLU",
    "fuse_experts",
]
