"""The stages of the gated delta rule in plain PyTorch, chunk by chunk, with their adjoints.

`D_ij = e^{G_i−G_j}` for i ≥ j, `D°` the same below the diagonal alone, and `Γ` the last G of a chunk. A forward writes
its outputs; an adjoint, which takes upstream gradients first, gives all gradients.
"""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta.inverse import inverse
from adjoint.ops.gated_delta.stages.in_chunks import Chunks, decays

# ------------------------------------------------------------------------------------- cumulative_decay


def cumulative_decay(g: Tensor, cu_seqlens: Tensor | None, chunk: int, outputs: tuple[Tensor, ...]) -> None:
    chunks = Chunks(g, cu_seqlens, chunk, raises=True)
    outputs[0].copy_(chunks.tokens(chunks.gather(g, torch.float64).cumsum(-1)))


def cumulative_decay_backward(dG: Tensor, g: Tensor, cu_seqlens: Tensor | None, chunk: int) -> tuple[Tensor, ...]:
    """dg_t = Σ dG_i over the i ≥ t of its chunk."""
    chunks = Chunks(g, cu_seqlens, chunk)
    return (chunks.tokens(chunks.gather(dG, torch.float64).flip(-1).cumsum(-1).flip(-1)),)


# ------------------------------------------------------------------------------------------------- gram


def gram(
    k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int, outputs: tuple[Tensor, ...]
) -> None:
    """A = β ⊙ (k kᵀ ⊙ D°)"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk, raises=True), wide_dtype(k.dtype), _repeat(beta, k)
    keys = chunks.gather(k, kind)
    products = (keys @ keys.mT).repeat_interleave(repeat, 1)
    strength = chunks.gather(beta, kind).unsqueeze(-1)
    outputs[0].copy_(chunks.tokens(products.mul_(decays(chunks.gather(G, kind), -1)).mul_(strength)))


def gram_backward(
    dA: Tensor, k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    """N = dA ⊙ D°, E = β ⊙ N:  dk = (E + Eᵀ) k,  dβ = rowsum(N ⊙ k kᵀ),  dG = rowsum − colsum of E ⊙ k kᵀ"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk), wide_dtype(k.dtype), _repeat(beta, k)
    keys = chunks.gather(k, kind, repeat)
    strength = chunks.gather(beta, kind).unsqueeze(-1)
    N = chunks.gather(dA, kind) * decays(chunks.gather(G, kind), -1)
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
    """T = (I + A)⁻¹ of what stands below the diagonal."""
    chunks = Chunks(A, cu_seqlens, A.shape[-1], raises=True)
    outputs[0].copy_(chunks.tokens(_solved(A, chunks)))


def solve_backward(dT: Tensor, A: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
    """dA = −Tᵀ dT Tᵀ, below the diagonal."""
    chunks = Chunks(A, cu_seqlens, A.shape[-1])
    T = _solved(A, chunks)
    return (chunks.tokens((T.mT @ chunks.gather(dT, A.dtype) @ T.mT).neg_().tril_(-1)),)


# ------------------------------------------------------------------------------------------------ carry


def carry(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    G: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    outputs: tuple[Tensor, ...],
) -> None:
    """v' = u − w S,   S⁺ = e^Γ S + (e^{Γ−G} ⊙ k)ᵀ v', from chunk to chunk."""
    values, states, final = outputs
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk, raises=True), wide_dtype(k.dtype), _repeat(u, k)
    keys, W, U = chunks.gather(k, kind, repeat), chunks.gather(w, kind), chunks.gather(u, kind)
    to_end, over = _until_end(chunks.gather(G, kind), chunks)
    begins, new_values, current = _scan_states(chunks, keys * to_end, W, U, over, state.to(kind).clone())
    values.copy_(chunks.tokens(new_values))
    states.zero_()
    states[chunks.state_places] = begins
    final.copy_(current)


def _until_end(G: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """e^{Γ−G} by row, and e^Γ, with Γ that of the last token inside; 0 for padding."""
    last = G.gather(-1, chunks.last.expand(*G.shape[:2], 1))
    between = (last - G).masked_fill_(~chunks.inside[:, None], -torch.inf)
    return between.exp_().unsqueeze(-1), last.exp().unsqueeze(-1)


def _scan_states(
    chunks: Chunks, faded: Tensor, W: Tensor, U: Tensor, over: Tensor, current: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The state each chunk begins with, v' of all chunks, and the last states."""
    begins = current.new_zeros(len(W), *current.shape[1:])
    new_values = torch.zeros_like(U)
    for step in range(chunks.steps):
        sequences, at = chunks.at(step)
        S = current[sequences]
        begins[at] = S
        values = U[at] - W[at] @ S
        new_values[at] = values
        current[sequences] = S * over[at] + faded[at].mT @ values
    return begins, new_values, current


def carry_backward(
    dvalues: Tensor | None,
    dstates: Tensor | None,
    dfinal: Tensor | None,
    k: Tensor,
    w: Tensor,
    u: Tensor,
    G: Tensor,
    state: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
) -> tuple[Tensor, ...]:
    """dv' += (e^{Γ−G} ⊙ k) dS⁺:  du = dv',  dw = −dv' Sᵀ,  dk = e^{Γ−G} ⊙ (v' dS⁺ᵀ),  dS = e^Γ dS⁺ − wᵀ dv'"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk), wide_dtype(k.dtype), _repeat(u, k)
    keys, W, U = chunks.gather(k, kind, repeat), chunks.gather(w, kind), chunks.gather(u, kind)
    to_end, over = _until_end(chunks.gather(G, kind), chunks)
    begins, new_values, _ = _scan_states(chunks, keys * to_end, W, U, over, state.to(kind).clone())
    dnew_values = torch.zeros_like(U) if dvalues is None else chunks.gather(dvalues, kind)
    of_begins = torch.zeros_like(begins)
    if dstates is not None:
        of_begins = dstates[chunks.state_places].to(kind)
    after = torch.zeros_like(begins)
    current = torch.zeros_like(state, dtype=kind) if dfinal is None else dfinal.to(kind).clone()
    for step in reversed(range(chunks.steps)):
        sequences, at = chunks.at(step)
        dS = current[sequences]
        after[at] = dS
        total = dnew_values[at] + (keys[at] * to_end[at]) @ dS
        dnew_values[at] = total
        current[sequences] = dS * over[at] - W[at].mT @ total + of_begins[at]
    of_keys = (new_values @ after.mT) * to_end
    until_end = (of_keys * keys).sum(-1)
    dG = -until_end
    at_end = until_end.sum(-1) + (begins * after).sum((-1, -2)) * over[..., 0, 0]
    dG.scatter_add_(-1, chunks.last.expand(*dG.shape[:2], 1), at_end.unsqueeze(-1))
    return (
        chunks.tokens(of_keys, repeat),
        chunks.tokens(-(dnew_values @ begins.mT)),
        chunks.tokens(dnew_values),
        chunks.tokens(dG),
        current,
    )


# ----------------------------------------------------------------------------------------------- output


def output(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    states: Tensor,
    G: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    scale: float,
    outputs: tuple[Tensor, ...],
) -> None:
    """o = scale·(e^G ⊙ (q S) + (q kᵀ ⊙ D) v')"""
    chunks, kind, repeat = Chunks(q, cu_seqlens, chunk, raises=True), wide_dtype(q.dtype), _repeat(values, q)
    Q, keys, decay = chunks.gather(q, kind, repeat), chunks.gather(k, kind, repeat), chunks.gather(G, kind)
    S = states[chunks.state_places]
    out = (Q @ S).mul_(decay.exp().unsqueeze(-1))
    out += (Q @ keys.mT).mul_(decays(decay, 0)) @ chunks.gather(values, kind)
    outputs[0].copy_(chunks.tokens(out.mul_(scale)))


def output_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    values: Tensor,
    states: Tensor,
    G: Tensor,
    cu_seqlens: Tensor | None,
    chunk: int,
    scale: float,
) -> tuple[Tensor, ...]:
    """M = scale·(do v'ᵀ) ⊙ D:  dq = scale·e^G ⊙ (do Sᵀ) + M k,  dk = Mᵀ q,  dv' = scale·(q kᵀ ⊙ D)ᵀ do,
    dS = scale·(e^G ⊙ q)ᵀ do,  dG = scale·e^G·(q·(S do)) + rowsum − colsum of M ⊙ q kᵀ"""
    chunks, kind, repeat = Chunks(q, cu_seqlens, chunk), wide_dtype(q.dtype), _repeat(values, q)
    Q, keys, decay = chunks.gather(q, kind, repeat), chunks.gather(k, kind, repeat), chunks.gather(G, kind)
    S = states[chunks.state_places]
    from_start, between = decay.exp().unsqueeze(-1), decays(decay, 0)
    upstream = chunks.gather(do, kind) * scale
    scores = Q @ keys.mT
    M = (upstream @ chunks.gather(values, kind).mT).mul_(between)
    dq = (upstream @ S.mT).mul_(from_start)
    through = (M * scores).tril_(-1)
    dG = (Q * dq).sum(-1) + through.sum(-1) - through.sum(-2)
    dstates = torch.zeros_like(states)
    dstates[chunks.state_places] = (Q * from_start).mT @ upstream
    return (
        chunks.tokens(dq + M @ keys, repeat),
        chunks.tokens(M.mT @ Q, repeat),
        chunks.tokens((scores * between).mT @ upstream),
        dstates,
        chunks.tokens(dG),
    )


def _repeat(values: Tensor, keys: Tensor) -> int:
    """Value heads of a key head."""
    return values.shape[2] // max(1, keys.shape[2])
