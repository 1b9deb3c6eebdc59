"""`recompute_w_u` in plain PyTorch: all chunks of all heads in one batched product each.

    w = T (β e^G ⊙ k),   u = T (β ⊙ v)

Adjoint, given dw and du:

    X  = Tᵀ dw,   Y = Tᵀ du
    dk = β e^G ⊙ X, summed over the value heads of a key head,   dv = β ⊙ Y
    dβ = rowsum(Y ⊙ v) + e^G rowsum(X ⊙ k),   dG = β e^G rowsum(X ⊙ k)
    dT = dw (β e^G ⊙ k)ᵀ + du (β ⊙ v)ᵀ
"""

import torch
from torch import Tensor

from adjoint.ops.gated_delta.arguments import wide_dtype
from adjoint.ops.gated_delta.stages.eager import Chunks

NEED_K, NEED_V, NEED_BETA, NEED_DECAY, NEED_T = (1 << bit for bit in range(5))
"""Bits of the gradients a backward computes."""


class _Operands:
    """The inputs by chunks, and β e^G ⊙ k, β ⊙ v as the products take them."""

    def __init__(
        self, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, T: Tensor, cu_seqlens: Tensor | None, raises: bool
    ) -> None:
        chunks = self.chunks = Chunks(k, cu_seqlens, T.shape[-1], raises)
        kind = self.kind = wide_dtype(v.dtype)
        self.repeat = v.shape[2] // max(1, k.shape[2])
        self.k, self.v, self.T = chunks.gather(k, kind, self.repeat), chunks.gather(v, kind), chunks.gather(T, kind)
        self.beta = chunks.gather(beta, kind).unsqueeze(-1)
        self.from_start = chunks.gather(decay, kind).exp().unsqueeze(-1)
        self.beta_k = (self.k * self.beta).mul_(self.from_start).to(k.dtype).to(kind)
        self.beta_v = (self.v * self.beta).to(v.dtype).to(kind)


@torch.no_grad()
def forward(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    T: Tensor,
    cu_seqlens: Tensor | None,
    w: Tensor,
    u: Tensor,
) -> None:
    given = _Operands(k, v, beta, decay, T, cu_seqlens, raises=True)
    w.copy_(given.chunks.tokens(given.T @ given.beta_k))
    u.copy_(given.chunks.tokens(given.T @ given.beta_v))


@torch.no_grad()
def backward(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    T: Tensor,
    dw: Tensor | None,
    du: Tensor | None,
    cu_seqlens: Tensor | None,
    need: int,
    gradients: tuple[Tensor, ...],
) -> None:
    """Writes the gradients of k, v, beta, decay and T, those that `need` asks for."""
    given = _Operands(k, v, beta, decay, T, cu_seqlens, raises=False)
    chunks = given.chunks
    dw_chunks = torch.zeros_like(given.k) if dw is None else chunks.gather(dw, given.kind)
    du_chunks = torch.zeros_like(given.v) if du is None else chunks.gather(du, given.kind)
    X, Y = given.T.mT @ dw_chunks, given.T.mT @ du_chunks
    of_keys = (X * given.k).sum(-1, keepdim=True).mul_(given.from_start)
    dk, dv, dbeta, ddecay, dT = gradients
    if need & NEED_K:
        dk.copy_(chunks.tokens(X.mul(given.beta).mul_(given.from_start), given.repeat))
    if need & NEED_V:
        dv.copy_(chunks.tokens(Y * given.beta))
    if need & NEED_BETA:
        dbeta.copy_(chunks.tokens((Y * given.v).sum(-1, keepdim=True).add_(of_keys).squeeze(-1)))
    if need & NEED_DECAY:
        ddecay.copy_(chunks.tokens((of_keys * given.beta).squeeze(-1)))
    if need & NEED_T:
        dT.copy_(chunks.tokens(dw_chunks @ given.beta_k.mT + du_chunks @ given.beta_v.mT))
