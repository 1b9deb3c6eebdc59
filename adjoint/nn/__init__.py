"""Thin modules over the ops. They have torch's parameters if torch has the module, and only call the op."""

from adjoint.nn.activation import SigmoidGate, SiLU, SwiGLU
from adjoint.nn.attention import GatedAttention
from adjoint.nn.conv import CausalConv1d
from adjoint.nn.embedding import Embedding, EmbeddingBag
from adjoint.nn.gated_delta_net import GatedDeltaNet
from adjoint.nn.loss import LinearCrossEntropy
from adjoint.nn.mlp import DenseMLP
from adjoint.nn.moe import SparseMoE, fuse_experts
from adjoint.nn.norm import GatedRMSNorm, RMSNorm
from adjoint.nn.rotary import Rotary

__all__ = [
    "CausalConv1d",
    "DenseMLP",
    "Embedding",
    "EmbeddingBag",
    "GatedAttention",
    "GatedDeltaNet",
    "GatedRMSNorm",
    "LinearCrossEntropy",
    "RMSNorm",
    "Rotary",
    "SiLU",
    "SigmoidGate",
    "SparseMoE",
    "SwiGLU",
    "fuse_experts",
]


def __dir__() -> list[str]:
    return __all__
