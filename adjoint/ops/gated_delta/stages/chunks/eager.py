"""The stages of the gated delta rule in plain PyTorch, chunk by chunk, with their adjoints.

`D_ij = e^{G_i−G_j}` for i ≥ j, `D°` the same below the diagonal alone, and `Γ` the last G of a chunk. A forward writes
its outputs; an adjoint, which takes upstream gradients first, gives all gradients.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.rule.eager import inverse
from adjoint.ops.gated_delta.stages.in_chunks import Chunks

# ------------------------------------------------------------------------------------- cumulative_decay


def cumulative_decay(g: Tensor, cu_seqlens: Tensor | None, chunk: int, outputs: tuple[Tensor, ...]) -> None:
    """G_t = Σ g_j over the j ≤ t of the chunk, where a g that resets the state counts as RESET."""
    chunks = Chunks(g, cu_seqlens, chunk, raises=True)
    bounded = chunks.gather(g, torch.float64).clamp_min_(RESET[wide_dtype(g.dtype)])
    outputs[0].copy_(chunks.tokens(bounded.cumsum(-1)))


def cumulative_decay_backward(dG: Tensor, g: Tensor, cu_seqlens: Tensor | None, chunk: int) -> tuple[Tensor, ...]:
    """dg_t = Σ dG_i over the i ≥ t of the chunk; 0 where g resets the state."""
    chunks = Chunks(g, cu_seqlens, chunk)
    dg = chunks.tokens(chunks.gather(dG, torch.float64).flip(-1).cumsum(-1).flip(-1))
    return (dg.masked_fill(g < RESET[wide_dtype(g.dtype)], 0),)


# ------------------------------------------------------------------------------------------------- gram


def gram(
    k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int, outputs: tuple[Tensor, ...]
) -> None:
    """A = β ⊙ (k kᵀ ⊙ D°)"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk, raises=True), wide_dtype(k.dtype), _repeat(beta, k)
    keys = chunks.gather(k, kind)
    products = (keys @ keys.mT).repeat_interleave(repeat, 1)
    strength = chunks.gather(beta, kind).unsqueeze(-1)
    outputs[0].copy_(chunks.tokens(products.mul_(chunks.decays(chunks.gather(G, kind), -1)).mul_(strength)))


def gram_backward(
    dA: Tensor, k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    """N = dA ⊙ D°, E = β ⊙ N:  dk = (E + Eᵀ) k,  dβ = rowsum(N ⊙ k kᵀ),  dG = rowsum − colsum of E ⊙ k kᵀ"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk), wide_dtype(k.dtype), _repeat(beta, k)
    keys = chunks.gather(k, kind, repeat)
    strength = chunks.gather(beta, kind).unsqueeze(-1)
    N = chunks.gather(dA, kind) * chunks.decays(chunks.gather(G, kind), -1)
    through = N * (keys @ keys.mT)
    dbeta = through.sum(-1)
    through.mul_(strength)
    E = N.mul_(strength)
    return (
        chunks.tokens((E + E.mT) @ keys, repeat),
        chunks.tokens(dbeta),
        chunks.tokens(through.sum(-1) - through.sum(-2)),
    )


# ------------------------------------------------------------------------------------------------ solve


def _solved(A: Tensor, chunks: Chunks) -> Tensor:
    lower = chunks.gather(A, A.dtype).tril(-1)
    return inverse(lower).view_as(lower)


def solve(A: Tensor, cu_seqlens: Tensor | None, outputs: tuple[Tensor, ...]) -> None:
    """T = (I + A)⁻¹, where only elements of A below the diagonal count."""
    chunks = Chunks(A, cu_seqlens, A.shape[-1], raises=True)
    outputs[0].copy_(chunks.tokens(_solved(A, chunks)))


def solve_backward(dT: Tensor, A: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """dA = −Tᵀ dT Tᵀ, below the diagonal."""
    chunks = Chunks(A, cu_seqlens, A.shape[-1])
    T = _solved(A, chunks)
    return (chunks.tokens((T.mT @ chunks.gather(dT, A.dtype) @ T.mT).neg_().tril_(-1)),)


# ------------------------------------------------------------------------------------------------ carry


class _Carry:
    """The inputs of `carry` by chunks, the state at the beginning of each chunk, v' of all chunks, and the last
    states."""

    def __init__(self, inputs: Sequence[Any], raises: bool = False) -> None:
        k, w, u, G, state, cu_seqlens, chunk = inputs
        chunks, kind = Chunks(k, cu_seqlens, chunk, raises), wide_dtype(k.dtype)
        self.chunks, self.kind, self.repeat = chunks, kind, _repeat(u, k)
        self.keys, self.W, U = chunks.gather(k, kind, self.repeat), chunks.gather(w, kind), chunks.gather(u, kind)
        self.to_end, self.over = _until_end(chunks.gather(G, kind), chunks)
        self.faded = self.keys * self.to_end
        self.final = state.to(kind).clone()
        self.begins = self.final.new_zeros(len(U), *state.shape[1:])
        self.values = torch.zeros_like(U)
        for step in range(chunks.steps):
            sequences, at = chunks.at(step)
            S = self.final[sequences]
            self.begins[at] = S
            values = self.values[at] = U[at] - self.W[at] @ S
            self.final[sequences] = S * self.over[at] + self.faded[at].mT @ values


def _until_end(G: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """e^{Γ−G} by row, and e^Γ, where Γ is G of the chunk's last token inside the sequence; 0 for padding."""
    last = G.gather(-1, chunks.last.expand(*G.shape[:2], 1))
    between = (last - G).masked_fill_(~chunks.inside[:, None], -torch.inf)
    return between.exp_().unsqueeze(-1), last.exp().unsqueeze(-1)


def carry(*arguments: Any) -> None:
    """v' = u − w S,   S⁺ = e^Γ S + (e^{Γ−G} ⊙ k)ᵀ v', from chunk to chunk."""
    *inputs, (values, states, final) = arguments
    c = _Carry(inputs, raises=True)
    values.copy_(c.chunks.tokens(c.values))
    states.zero_()
    states[c.chunks.state_places] = c.begins
    final.copy_(c.final)


def carry_backward(
    dvalues: Tensor | None, dstates: Tensor | None, dfinal: Tensor | None, *inputs: Any
) -> tuple[Tensor, ...]:
    """dv' += (e^{Γ−G} ⊙ k) dS⁺:  du = dv',  dw = −dv' Sᵀ,  dk = e^{Γ−G} ⊙ (v' dS⁺ᵀ),  dS = e^Γ dS⁺ − wᵀ dv'"""
    c = _Carry(inputs)
    chunks, kind = c.chunks, c.kind
    dnew_values = torch.zeros_like(c.values) if dvalues is None else chunks.gather(dvalues, kind)
    of_begins = torch.zeros_like(c.begins) if dstates is None else dstates[chunks.state_places].to(kind)
    after = torch.zeros_like(c.begins)
    current = torch.zeros_like(c.final) if dfinal is None else dfinal.to(kind).clone()
    for step in reversed(range(chunks.steps)):
        sequences, at = chunks.at(step)
        dS = current[sequences]
        after[at] = dS
        total = dnew_values[at] + c.faded[at] @ dS
        dnew_values[at] = total
        current[sequences] = dS * c.over[at] - c.W[at].mT @ total + of_begins[at]
    of_keys = (c.values @ after.mT) * c.to_end
    until_end = (of_keys * c.keys).sum(-1)
    dG = -until_end
    at_end = until_end.sum(-1) + (c.begins * after).sum((-1, -2)) * c.over[..., 0, 0]
    dG.scatter_add_(-1, chunks.last.expand(*dG.shape[:2], 1), at_end.unsqueeze(-1))
    dk, dw = chunks.tokens(of_keys, c.repeat), chunks.tokens(-(dnew_values @ c.begins.mT))
    return dk, dw, chunks.tokens(dnew_values), chunks.tokens(dG), current


# ----------------------------------------------------------------------------------------------- output


class _Output:
    """The inputs of `output` by chunks, with e^G, D, and the state at the beginning of each chunk."""

    def __init__(self, inputs: Sequence[Any], raises: bool = False) -> None:
        q, k, values, states, G, cu_seqlens, chunk = inputs
        chunks, kind = Chunks(q, cu_seqlens, chunk, raises), wide_dtype(q.dtype)
        self.chunks, self.kind, self.repeat = chunks, kind, _repeat(values, q)
        self.q, self.k = chunks.gather(q, kind, self.repeat), chunks.gather(k, kind, self.repeat)
        self.values, self.states = chunks.gather(values, kind), states[chunks.state_places]
        decay = chunks.gather(G, kind)
        self.from_start, self.between = decay.exp().unsqueeze(-1), chunks.decays(decay, 0)


def output(*arguments: Any) -> None:
    """o = scale·(e^G ⊙ (q S) + (q kᵀ ⊙ D) v')"""
    *inputs, scale, outputs = arguments
    x = _Output(inputs, raises=True)
    out = (x.q @ x.states).mul_(x.from_start)
    out += (x.q @ x.k.mT).mul_(x.between) @ x.values
    outputs[0].copy_(x.chunks.tokens(out.mul_(scale)))


def output_backward(do: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    """M = scale·(do v'ᵀ) ⊙ D:  dq = scale·e^G ⊙ (do Sᵀ) + M k,  dk = Mᵀ q,  dv' = scale·(q kᵀ ⊙ D)ᵀ do,
    dS = scale·(e^G ⊙ q)ᵀ do,  dG = scale·e^G·(q·(S do)) + rowsum − colsum of M ⊙ q kᵀ"""
    *inputs, scale = arguments
    x, states = _Output(inputs), inputs[3]
    chunks, upstream = x.chunks, x.chunks.gather(do, x.kind) * scale
    scores = x.q @ x.k.mT
    M = (upstream @ x.values.mT).mul_(x.between)
    dq = (upstream @ x.states.mT).mul_(x.from_start)
    through = (M * scores).tril_(-1)
    dG = (x.q * dq).sum(-1) + through.sum(-1) - through.sum(-2)
    dstates = torch.zeros_like(states)
    dstates[chunks.state_places] = (x.q * x.from_start).mT @ upstream
    dq, dk = chunks.tokens(dq + M @ x.k, x.repeat), chunks.tokens(M.mT @ x.q, x.repeat)
    return dq, dk, chunks.tokens((scores * x.between).mT @ upstream), dstates, chunks.tokens(dG)


def _repeat(values: Tensor, keys: Tensor) -> int:
    """The number of value heads for each key head."""
    return values.shape[2] // max(1, keys.shape[2])
