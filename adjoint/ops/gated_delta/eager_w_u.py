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

from adjoint.ops.gated_delta.eager import wide
from adjoint.ops.gated_delta.packing import bounds, chunks_of

NEED_K, NEED_V, NEED_BETA, NEED_DECAY, NEED_T = (1 << bit for bit in range(5))
"""Bits of the gradients a backward computes."""


class _Chunks:
    """k, v, β and T as `[chunks, heads, chunk, ...]`, padded with 0; and β e^G ⊙ k, β ⊙ v as the products take them."""

    def __init__(
        self, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, T: Tensor, cu_seqlens: Tensor | None, raises: bool
    ) -> None:
        self.kind, self.size = wide(v.dtype), T.shape[-1]
        starts, lengths = bounds(k.shape[0], k.shape[1], cu_seqlens, raises)
        places, self.inside = (x.to(v.device) for x in chunks_of(starts, lengths, self.size))
        self.places, self.own = places, places[self.inside]
        self.repeat = v.shape[2] // max(1, k.shape[2])
        self.k = self.gather(k).repeat_interleave(self.repeat, 1)
        self.v, self.T = self.gather(v), self.gather(T)
        self.beta, self.from_start = self.gather(beta).unsqueeze(-1), self.gather(decay).exp_().unsqueeze(-1)
        self.beta_k = (self.k * self.beta).mul_(self.from_start).to(k.dtype).to(self.kind)
        self.beta_v = (self.v * self.beta).to(v.dtype).to(self.kind)

    def gather(self, x: Tensor) -> Tensor:
        """[B, T, heads, ...] -> [chunks, heads, chunk, ...] in the wide type; padding is 0."""
        found = x.flatten(0, 1)[self.places].to(self.kind)
        return found.masked_fill_(~self.inside.view(*self.inside.shape, *(1,) * (found.dim() - 2)), 0).transpose(1, 2)

    def scatter(self, out: Tensor, chunks: Tensor) -> None:
        """The inverse, rounded to the output's dtype; tokens of no sequence become 0."""
        if len(self.own) != out.shape[0] * out.shape[1]:
            out.zero_()
        out.flatten(0, 1)[self.own] = chunks.transpose(1, 2)[self.inside].to(out.dtype)


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
    chunks = _Chunks(k, v, beta, decay, T, cu_seqlens, raises=True)
    chunks.scatter(w, chunks.T @ chunks.beta_k)
    chunks.scatter(u, chunks.T @ chunks.beta_v)


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
    chunks = _Chunks(k, v, beta, decay, T, cu_seqlens, raises=False)
    dw_chunks = torch.zeros_like(chunks.k) if dw is None else chunks.gather(dw)
    du_chunks = torch.zeros_like(chunks.v) if du is None else chunks.gather(du)
    X, Y = chunks.T.mT @ dw_chunks, chunks.T.mT @ du_chunks
    of_keys = (X * chunks.k).sum(-1, keepdim=True).mul_(chunks.from_start)
    dk, dv, dbeta, ddecay, dT = gradients
    if need & NEED_K:
        each = X.mul(chunks.beta).mul_(chunks.from_start)
        chunks.scatter(dk, each.unflatten(1, (-1, chunks.repeat)).sum(2) if chunks.repeat > 1 else each)
    if need & NEED_V:
        chunks.scatter(dv, Y * chunks.beta)
    if need & NEED_BETA:
        chunks.scatter(dbeta, (Y * chunks.v).sum(-1, keepdim=True).add_(of_keys).squeeze(-1))
    if need & NEED_DECAY:
        chunks.scatter(ddecay, (of_keys * chunks.beta).squeeze(-1))
    if need & NEED_T:
        chunks.scatter(dT, dw_chunks @ chunks.beta_k.mT + du_chunks @ chunks.beta_v.mT)
