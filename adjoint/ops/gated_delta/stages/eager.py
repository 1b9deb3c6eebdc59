"""The stages of the gated delta rule in plain PyTorch, chunk by chunk, with their adjoints.

`[chunks, heads, chunk, ...]` is how chunks lie here; `D_ij = e^{G_i−G_j}` for i ≥ j, and `Γ` the last G of a chunk.
"""

import torch
from torch import Tensor

from adjoint.ops.gated_delta.arguments import wide_dtype
from adjoint.ops.gated_delta.inverse import inverse
from adjoint.ops.gated_delta.packing import bounds, chunks_of


class Chunks:
    """Where the chunks of all sequences lie. Rows of a batch are views; packed sequences have a table of places."""

    def __init__(self, like: Tensor, cu_seqlens: Tensor | None, chunk: int, raises: bool = False) -> None:
        self.batch, self.time = like.shape[:2]
        self.size, self.device = chunk, like.device
        self.packed = cu_seqlens is not None
        if cu_seqlens is None:
            self.each = -(-self.time // chunk)
            inside = torch.arange(self.each * chunk, device=like.device) < self.time
            self.inside = inside.view(self.each, chunk).repeat(self.batch, 1)
            return
        self.starts, lengths = bounds(self.batch, self.time, cu_seqlens, raises)
        self.numbers = (lengths + chunk - 1) // chunk
        self.first = torch.cat((self.numbers.new_zeros(1), self.numbers.cumsum(0)))[:-1]
        places, inside = chunks_of(self.starts, lengths, chunk)
        self.places, self.inside = places.to(like.device), inside.to(like.device)

    def gather(self, x: Tensor, kind: torch.dtype, repeat: int = 1) -> Tensor:
        """[B, T, heads, ...] -> [chunks, heads, chunk, ...], each head `repeat` times; padding is 0."""
        rest = x.shape[2:]
        if self.packed:
            found = x.flatten(0, 1)[self.places].to(kind)
            found = found.masked_fill_(~self.inside.view(*self.inside.shape, *(1,) * len(rest)), 0)
        else:
            padded = torch.zeros(self.batch, self.each * self.size, *rest, dtype=kind, device=self.device)
            padded[:, : self.time] = x
            found = padded.view(self.batch * self.each, self.size, *rest)
        found = found.transpose(1, 2)
        return found.repeat_interleave(repeat, 1) if repeat > 1 else found

    def tokens(self, chunks: Tensor, repeat: int = 1) -> Tensor:
        """The inverse, summed over heads that were repeated; 0 for tokens of no sequence."""
        if repeat > 1:
            chunks = chunks.unflatten(1, (-1, repeat)).sum(2)
        moved = chunks.transpose(1, 2)
        if not self.packed:
            return moved.reshape(self.batch, self.each * self.size, *moved.shape[2:])[:, : self.time]
        out = moved.new_zeros(self.batch * self.time, *moved.shape[2:])
        out[self.places[self.inside]] = moved[self.inside]
        return out.unflatten(0, (self.batch, self.time))

    def at(self, step: int) -> tuple[slice | Tensor, slice | Tensor]:
        """The sequences that have a chunk of this number, and which of all chunks it is."""
        if not self.packed:
            return slice(None), slice(step, None, self.each)
        sequences = (self.numbers > step).nonzero()[:, 0]
        return sequences.to(self.device), (self.first[sequences] + step).to(self.device)

    @property
    def steps(self) -> int:
        if not self.packed:
            return self.each
        return int(self.numbers.max()) if len(self.numbers) else 0

    @property
    def last(self) -> Tensor:
        """The place of the last token of each chunk, [chunks, 1, 1]."""
        return (self.inside.sum(-1) - 1)[:, None, None]

    @property
    def state_places(self) -> Tensor:
        """Where the state each chunk begins with is kept: no two share a place."""
        if not self.packed:
            row = torch.arange(self.batch, device=self.device)
            step = torch.arange(self.each, device=self.device)
            return ((row * self.time // self.size + row)[:, None] + step).flatten()
        sequence = torch.repeat_interleave(torch.arange(len(self.starts)), self.numbers)
        step = torch.arange(len(sequence)) - self.first[sequence]
        return (self.starts[sequence] // self.size + sequence + step).to(self.device)


def state_count(tokens: int, sequences: int, chunk: int) -> int:
    """How many places there are for the states that chunks begin with."""
    return tokens // chunk + sequences


def decays(G: Tensor, diagonal: int) -> Tensor:
    """e^{G_i−G_j} for j up to i + diagonal, 0 elsewhere; differences first."""
    size = G.shape[-1]
    future = torch.ones(size, size, dtype=torch.bool, device=G.device).triu(1 + diagonal)
    return (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill_(future, -torch.inf).exp_()


# ------------------------------------------------------------------------------------- cumulative_decay


def cumulative_decay(g: Tensor, cu_seqlens: Tensor | None, chunk: int, outputs: tuple[Tensor, ...]) -> None:
    chunks = Chunks(g, cu_seqlens, chunk, raises=True)
    outputs[0].copy_(chunks.tokens(chunks.gather(g, torch.float64).cumsum(-1)))


def cumulative_decay_backward(g: Tensor, dG: Tensor, cu_seqlens: Tensor | None, chunk: int) -> tuple[Tensor, ...]:
    """dg_t = Σ dG_i over the i ≥ t of its chunk."""
    chunks = Chunks(g, cu_seqlens, chunk)
    return (chunks.tokens(chunks.gather(dG, torch.float64).flip(-1).cumsum(-1).flip(-1)),)


# ------------------------------------------------------------------------------------------------- gram


def gram(
    k: Tensor, beta: Tensor, G: Tensor, cu_seqlens: Tensor | None, chunk: int, outputs: tuple[Tensor, ...]
) -> None:
    """A = β ⊙ (k kᵀ ⊙ D°)"""
    chunks, kind, repeat = (
        Chunks(k, cu_seqlens, chunk, raises=True),
        wide_dtype(k.dtype),
        beta.shape[2] // max(1, k.shape[2]),
    )
    keys = chunks.gather(k, kind)
    products = (keys @ keys.mT).repeat_interleave(repeat, 1)
    strength = chunks.gather(beta, kind).unsqueeze(-1)
    outputs[0].copy_(chunks.tokens(products.mul_(decays(chunks.gather(G, kind), -1)).mul_(strength)))


def gram_backward(
    k: Tensor, beta: Tensor, G: Tensor, dA: Tensor, cu_seqlens: Tensor | None, chunk: int
) -> tuple[Tensor, ...]:
    """N = dA ⊙ D°, E = β ⊙ N:  dk = (E + Eᵀ) k,  dβ = rowsum(N ⊙ k kᵀ),  dG = rowsum − colsum of E ⊙ k kᵀ"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk), wide_dtype(k.dtype), beta.shape[2] // max(1, k.shape[2])
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


def solve_backward(A: Tensor, dT: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, ...]:
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
    chunks, kind, repeat = (
        Chunks(k, cu_seqlens, chunk, raises=True),
        wide_dtype(k.dtype),
        u.shape[2] // max(1, k.shape[2]),
    )
    keys, W, U = chunks.gather(k, kind, repeat), chunks.gather(w, kind), chunks.gather(u, kind)
    to_end, over = _until_end(chunks.gather(G, kind), chunks)
    begins, news, current = _walk(chunks, keys * to_end, W, U, over, state.to(kind).clone())
    values.copy_(chunks.tokens(news))
    states.zero_()
    states[chunks.state_places] = begins
    final.copy_(current)


def _until_end(G: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """e^{Γ−G} by row, and e^Γ, with Γ that of the last token inside; 0 for padding."""
    last = G.gather(-1, chunks.last.expand(*G.shape[:2], 1))
    between = (last - G).masked_fill_(~chunks.inside[:, None], -torch.inf)
    return between.exp_().unsqueeze(-1), last.exp().unsqueeze(-1)


def _walk(
    chunks: Chunks, faded: Tensor, W: Tensor, U: Tensor, over: Tensor, current: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The state each chunk begins with, v' of all chunks, and the last states."""
    begins = current.new_zeros(len(W), *current.shape[1:])
    news = torch.zeros_like(U)
    for step in range(chunks.steps):
        sequences, at = chunks.at(step)
        S = current[sequences]
        begins[at] = S
        new = U[at] - W[at] @ S
        news[at] = new
        current[sequences] = S * over[at] + faded[at].mT @ new
    return begins, news, current


def carry_backward(
    k: Tensor,
    w: Tensor,
    u: Tensor,
    G: Tensor,
    state: Tensor,
    dvalues: Tensor | None,
    dstates: Tensor | None,
    dfinal: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk: int,
) -> tuple[Tensor, ...]:
    """dv' += (e^{Γ−G} ⊙ k) dS⁺:  du = dv',  dw = −dv' Sᵀ,  dk = e^{Γ−G} ⊙ (v' dS⁺ᵀ),  dS = e^Γ dS⁺ − wᵀ dv'"""
    chunks, kind, repeat = Chunks(k, cu_seqlens, chunk), wide_dtype(k.dtype), u.shape[2] // max(1, k.shape[2])
    keys, W, U = chunks.gather(k, kind, repeat), chunks.gather(w, kind), chunks.gather(u, kind)
    to_end, over = _until_end(chunks.gather(G, kind), chunks)
    begins, news, _ = _walk(chunks, keys * to_end, W, U, over, state.to(kind).clone())
    dnew = torch.zeros_like(U) if dvalues is None else chunks.gather(dvalues, kind)
    of_begins = torch.zeros_like(begins)
    if dstates is not None:
        of_begins = dstates[chunks.state_places].to(kind)
    after = torch.zeros_like(begins)
    current = torch.zeros_like(state, dtype=kind) if dfinal is None else dfinal.to(kind).clone()
    for step in reversed(range(chunks.steps)):
        sequences, at = chunks.at(step)
        dS = current[sequences]
        after[at] = dS
        total = dnew[at] + (keys[at] * to_end[at]) @ dS
        dnew[at] = total
        current[sequences] = dS * over[at] - W[at].mT @ total + of_begins[at]
    of_keys = (news @ after.mT) * to_end
    until_end = (of_keys * keys).sum(-1)
    dG = -until_end
    at_end = until_end.sum(-1) + (begins * after).sum((-1, -2)) * over[..., 0, 0]
    dG.scatter_add_(-1, chunks.last.expand(*dG.shape[:2], 1), at_end.unsqueeze(-1))
    return (
        chunks.tokens(of_keys, repeat),
        chunks.tokens(-(dnew @ begins.mT)),
        chunks.tokens(dnew),
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
    found = (Q @ S).mul_(decay.exp().unsqueeze(-1))
    found += (Q @ keys.mT).mul_(decays(decay, 0)) @ chunks.gather(values, kind)
    outputs[0].copy_(chunks.tokens(found.mul_(scale)))


def output_backward(
    q: Tensor,
    k: Tensor,
    values: Tensor,
    states: Tensor,
    G: Tensor,
    do: Tensor,
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
    return values.shape[2] // max(1, keys.shape[2])
