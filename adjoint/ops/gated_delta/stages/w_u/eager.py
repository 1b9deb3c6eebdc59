"""`recompute_w_u` in plain PyTorch: all chunks of all heads in one batched product each.

    w = T (β e^G ⊙ k),   u = T (β ⊙ v)

Adjoint, operands dw and du:

    X  = Tᵀ dw,   Y = Tᵀ du
    dk = β e^G ⊙ X, summed over the value heads of a key head,   dv = β ⊙ Y
    dβ = rowsum(Y ⊙ v) + e^G rowsum(X ⊙ k),   dG = β e^G rowsum(X ⊙ k)
    dT = dw (β e^G ⊙ k)ᵀ + du (β ⊙ v)ᵀ
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta.stages.in_chunks import Chunks
from adjoint.ops.gated_delta.stages.w_u.guarantee import NEED_BETA, NEED_DECAY, NEED_K, NEED_T, NEED_V


class _Operands:
    """The inputs by chunks, and the operands of the products, β e^G ⊙ k and β ⊙ v."""

    def __init__(self, inputs: Sequence[Any], raises: bool = False) -> None:
        k, v, beta, G, T, cu_seqlens = inputs
        chunks = self.chunks = Chunks(k, cu_seqlens, T.shape[-1], raises)
        kind = self.kind = wide_dtype(v.dtype)
        self.repeat = v.shape[2] // max(1, k.shape[2])
        self.k, self.v, self.T = chunks.gather(k, kind, self.repeat), chunks.gather(v, kind), chunks.gather(T, kind)
        self.beta = chunks.gather(beta, kind).unsqueeze(-1)
        self.from_start = chunks.gather(G, kind).exp().unsqueeze(-1)
        self.beta_k = (self.k * self.beta).mul_(self.from_start).to(k.dtype).to(kind)
        self.beta_v = (self.v * self.beta).to(v.dtype).to(kind)


def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    x = _Operands(arguments, raises=True)
    for result, operand in zip(outputs, (x.beta_k, x.beta_v), strict=True):
        result.copy_(x.chunks.tokens(x.T @ operand))


def backward(arguments: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """Writes the gradients of k, v, beta, G and T that are in the mask `need`."""
    dw, du, *inputs, need = arguments
    x = _Operands(inputs)
    chunks = x.chunks
    dw = torch.zeros_like(x.k) if dw is None else chunks.gather(dw, x.kind)
    du = torch.zeros_like(x.v) if du is None else chunks.gather(du, x.kind)
    X, Y = x.T.mT @ dw, x.T.mT @ du
    of_keys = (X * x.k).sum(-1, keepdim=True).mul_(x.from_start)
    dk, dv, dbeta, dG, dT = gradients
    if need & NEED_K:
        dk.copy_(chunks.tokens(X.mul(x.beta).mul_(x.from_start), x.repeat))
    if need & NEED_V:
        dv.copy_(chunks.tokens(Y * x.beta))
    if need & NEED_BETA:
        dbeta.copy_(chunks.tokens((Y * x.v).sum(-1, keepdim=True).add_(of_keys).squeeze(-1)))
    if need & NEED_DECAY:
        dG.copy_(chunks.tokens((of_keys * x.beta).squeeze(-1)))
    if need & NEED_T:
        dT.copy_(chunks.tokens(dw @ x.beta_k.mT + du @ x.beta_v.mT))
