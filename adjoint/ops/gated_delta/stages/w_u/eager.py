"""`recompute_w_u` in plain PyTorch: all chunks of all heads in one batched product each.

    w = T (β e^G ⊙ k),   u = T (β ⊙ v)

Adjoint, operands dw and du:

    X  = Tᵀ dw,   Y = Tᵀ du
    dk = β e^G ⊙ X, summed over the value heads of a key head,   dv = β ⊙ Y
    dβ = rowsum(Y ⊙ v) + e^G rowsum(X ⊙ k),   dG = β e^G rowsum(X ⊙ k)
    dT = dw (β e^G ⊙ k)ᵀ + du (β ⊙ v)ᵀ
"""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta.stages.in_chunks import Chunks
from adjoint.ops.gated_delta.stages.w_u.parts import NEED_BETA, NEED_DECAY, NEED_K, NEED_T, NEED_V


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
    operands = _Operands(k, v, beta, decay, T, cu_seqlens, raises=True)
    w.copy_(operands.chunks.tokens(operands.T @ operands.beta_k))
    u.copy_(operands.chunks.tokens(operands.T @ operands.beta_v))


@torch.no_grad()
def backward(
    dw: Tensor | None,
    du: Tensor | None,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    T: Tensor,
    cu_seqlens: Tensor | None,
    need: int,
    gradients: tuple[Tensor, ...],
) -> None:
    """Writes the gradients of k, v, beta, decay and T, those that `need` asks for."""
    operands = _Operands(k, v, beta, decay, T, cu_seqlens, raises=False)
    chunks = operands.chunks
    dw_chunks = torch.zeros_like(operands.k) if dw is None else chunks.gather(dw, operands.kind)
    du_chunks = torch.zeros_like(operands.v) if du is None else chunks.gather(du, operands.kind)
    X, Y = operands.T.mT @ dw_chunks, operands.T.mT @ du_chunks
    of_keys = (X * operands.k).sum(-1, keepdim=True).mul_(operands.from_start)
    dk, dv, dbeta, ddecay, dT = gradients
    if need & NEED_K:
        dk.copy_(chunks.tokens(X.mul(operands.beta).mul_(operands.from_start), operands.repeat))
    if need & NEED_V:
        dv.copy_(chunks.tokens(Y * operands.beta))
    if need & NEED_BETA:
        dbeta.copy_(chunks.tokens((Y * operands.v).sum(-1, keepdim=True).add_(of_keys).squeeze(-1)))
    if need & NEED_DECAY:
        ddecay.copy_(chunks.tokens((of_keys * operands.beta).squeeze(-1)))
    if need & NEED_T:
        dT.copy_(chunks.tokens(dw_chunks @ operands.beta_k.mT + du_chunks @ operands.beta_v.mT))
