"""The gated delta rule in plain PyTorch, by chunks, in both directions.

One chunk of one value head, with `G` the running sum of g, `D_ij = e^{G_i−G_j}` for i ≥ j, and `S` the state it
begins with:

    A  = β ⊙ (k kᵀ ⊙ D°)          D° without its diagonal
    T  = (I + A)⁻¹
    r  = v − e^G ⊙ (k S)
    v' = T (β ⊙ r)
    o  = scale·(e^G ⊙ (q S) + (q kᵀ ⊙ D) v')
    S⁺ = e^Γ S + (e^{Γ−G} ⊙ k)ᵀ v'

This is the form in which w and u never exist: the cancellation in r happens before anything is rounded again. Its
adjoint, given do and dS⁺, is

    dv' = scale·(q kᵀ ⊙ D)ᵀ do + (e^{Γ−G} ⊙ k) dS⁺
    Y   = Tᵀ dv'                  adjoint of β ⊙ r
    dv  = β ⊙ Y                   adjoint of r as well
    dS  = e^Γ dS⁺ + scale·(e^G ⊙ q)ᵀ do − kᵀ (e^G ⊙ dv)
    M   = scale·(do v'ᵀ) ⊙ D,   N = −(Y v'ᵀ) ⊙ D°
    dq  = scale·e^G ⊙ (do Sᵀ) + M k
    dk  = Mᵀ q + e^{Γ−G} ⊙ (v' dS⁺ᵀ) − e^G ⊙ (dv Sᵀ) + (E + Eᵀ) k,   E = β ⊙ N
    dβ  = rowsum(Y ⊙ r) + rowsum(N ⊙ k kᵀ)

and dg_t sums what was multiplied with a decay that token t is part of (`_passing`). Products run over all chunks of
all heads of a block at once; only the state goes from chunk to chunk. All of it is computed in float32, float64 for
float64; the running sum of g in float64.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta.arguments import (
    EPSILON,
    NEED_BETA,
    NEED_G,
    NEED_K,
    NEED_Q,
    NEED_STATE,
    POSITIVE_GATE,
    RESET,
    report_values,
)
from adjoint.ops.gated_delta.packing import Group, Tokens, bounds, groups

# --------------------------------------------------------------------------------------------- one block


class _Inputs(NamedTuple):
    """The op's tensors on the flat token axis: q, k [tokens, Hg, K], v [tokens, H, V], g, beta [tokens, H]."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float
    normalize: bool

    @staticmethod
    def of(tokens: list[Tensor], scale: float, normalize: bool) -> "_Inputs":
        q, k, v, g, beta = (x.flatten(0, 1) for x in tokens)
        return _Inputs(q, k, v, g, beta, scale, normalize)

    @property
    def kind(self) -> torch.dtype:
        """The type everything is computed in."""
        return wide_dtype(self.v.dtype)

    def heads(self, group: Group) -> slice:
        """The value heads of a group's key heads."""
        repeat = self.v.shape[1] // max(1, self.q.shape[1])
        return slice(group.first_head * repeat, (group.first_head + group.heads) * repeat)


class _Block:
    """Some chunks, `[steps, lanes, chunk, ...]`; a lane is a sequence and a value head."""

    def __init__(self, inputs: _Inputs, group: Group, segment: int) -> None:
        tokens = self.tokens = Tokens(group, segment, inputs.v.device)
        self.steps, self.scale, kind = tokens.steps, inputs.scale, inputs.kind
        self.key_heads = slice(group.first_head, group.first_head + group.heads)
        self.heads = inputs.heads(group)
        self.repeat = (self.heads.stop - self.heads.start) // group.heads
        q, k = (tokens.gather(x[:, self.key_heads], kind) for x in (inputs.q, inputs.k))
        self.q_norm = self.k_norm = None
        if inputs.normalize:
            q, self.q_norm = _normalize(q)
            k, self.k_norm = _normalize(k)
        self.kk, self.qk = self._each_head(k @ k.mT), self._each_head(q @ k.mT)
        self.q, self.k = self._each_head(q), self._each_head(k)
        self.v = tokens.gather(inputs.v[:, self.heads], kind).flatten(1, 2)
        self.beta = tokens.gather(inputs.beta[:, self.heads], kind).flatten(1, 2).unsqueeze(-1)
        # The running sum in float64: differences of long sums in float32 would lose the digits of short decays.
        # A reset is not in it: what crosses one is 0, and the tokens after it have their own small sums.
        g = tokens.gather(inputs.g[:, self.heads], torch.float64).flatten(1, 2)
        is_reset = g < RESET[kind]
        resets = is_reset.cumsum(-1, dtype=torch.int8)
        log_decay = g.masked_fill_(is_reset, 0).cumsum(-1)
        from_start, chunk_decay = log_decay.exp().masked_fill_(resets > 0, 0), log_decay[..., -1].exp()
        to_end = (log_decay[..., -1:] - log_decay).exp_().masked_fill_(resets != resets[..., -1:], 0)
        self.from_start, self.to_end = from_start.unsqueeze(-1).to(kind), to_end.unsqueeze(-1).to(kind)
        self.chunk_decay = chunk_decay.masked_fill_(resets[..., -1] > 0, 0)[..., None, None].to(kind)
        self.decay = _decays(log_decay, resets, kind)
        self.T = inverse((self.kk * self.decay).mul_(self.beta).tril_(-1)).view_as(self.decay)

    def _each_head(self, x: Tensor) -> Tensor:
        """[steps, sequences, key heads, ...] -> [steps, lanes, ...]: every value head reads its key head."""
        if self.repeat == 1:
            return x.flatten(1, 2)
        return x.unsqueeze(3).expand(*x.shape[:3], self.repeat, *x.shape[3:]).flatten(1, 3)

    def _each_key_head(self, x: Tensor) -> Tensor:
        """The adjoint: sums over the value heads that share a key head."""
        x = x.view(self.steps, self.tokens.number, -1, self.repeat, *x.shape[2:])
        return x.sum(3) if self.repeat > 1 else x.squeeze(3)

    def by_sequence(self, x: Tensor) -> Tensor:
        """[steps, lanes, ...] -> [steps, sequences, value heads, ...]"""
        return x.unflatten(1, (self.tokens.number, -1))

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs of all chunks, and the state after them."""
        scores = self.qk * self.decay
        out = torch.empty_like(self.v)
        for s in range(self.steps):
            _, new_values = self._new_values(s, state)
            seen = torch.bmm(self.q[s], state).mul_(self.from_start[s])
            torch.baddbmm(seen, scores[s], new_values, beta=self.scale, alpha=self.scale, out=out[s])
            state = self._next(s, state, new_values)
        return out, state

    def _new_values(self, s: int, state: Tensor) -> tuple[Tensor, Tensor]:
        """e^G ⊙ (k S) and v'."""
        predicted = torch.bmm(self.k[s], state).mul_(self.from_start[s])
        return predicted, torch.bmm(self.T[s], (self.v[s] - predicted).mul_(self.beta[s]))

    def _next(self, s: int, state: Tensor, new_values: Tensor) -> Tensor:
        return torch.baddbmm(state * self.chunk_decay[s], (self.k[s] * self.to_end[s]).mT, new_values)

    def backward(
        self, state: Tensor, dstate: Tensor, dout: Tensor | None, need: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of the state the block begins with, by lane, and those of its inputs that are needed and not 0,
        as `[steps, sequences, heads, chunk, ...]`."""
        shape = (self.steps, *state.shape)
        states, dstates = state.new_empty(shape), state.new_empty(shape)
        predicted, new_values, dnew, Y = (torch.empty_like(self.v) for _ in range(4))
        for s in range(self.steps):
            states[s] = state
            predicted[s], new_values[s] = self._new_values(s, state)
            state = self._next(s, state, new_values[s])
        if dout is None:
            dnew.zero_()
        else:
            dout = dout * self.scale
            torch.matmul((self.qk * self.decay).mT, dout, out=dnew)
        for s in reversed(range(self.steps)):
            dstates[s] = dstate
            dnew[s].baddbmm_(self.k[s] * self.to_end[s], dstate)
            torch.bmm(self.T[s].mT, dnew[s], out=Y[s])
            dstate = dstate * self.chunk_decay[s]
            if dout is not None:
                dstate.baddbmm_((self.q[s] * self.from_start[s]).mT, dout[s])
            dstate.baddbmm_(self.k[s].mT, Y[s] * (self.beta[s] * self.from_start[s]), alpha=-1)
        dv = Y * self.beta
        gradients = {"v": self.by_sequence(dv)}
        if not need & (NEED_Q | NEED_K | NEED_G | NEED_BETA):
            return dstate, gradients
        N = torch.matmul(Y, new_values.mT).mul_(self.decay).neg_().tril_(-1)
        of_grams = N * self.kk
        if need & NEED_BETA:
            gradients["beta"] = self.by_sequence((Y * (self.v - predicted)).sum(-1).add_(of_grams.sum(-1)))
        if not need & (NEED_Q | NEED_K | NEED_G):
            return dstate, gradients
        of_state = torch.matmul(new_values, dstates.mT).mul_(self.to_end)
        through_decay = of_grams.mul_(self.beta)
        since_start = (dv * predicted).sum(-1).neg_()
        if dout is not None:
            M = torch.matmul(dout, new_values.mT).mul_(self.decay)
            dq = torch.matmul(dout, states.mT).mul_(self.from_start)
            if need & NEED_G:
                through_decay.add_((M * self.qk).tril_(-1))
                since_start.add_((self.q * dq).sum(-1))
            if need & NEED_Q:
                dq += torch.matmul(M, self.k)
                gradients["q"] = self._unnormalized(dq, self.q, self.q_norm)
        if need & NEED_G:
            until_end = (self.k * of_state).sum(-1)
            through_state = (states * dstates).sum((-1, -2)) * self.chunk_decay[..., 0, 0]
            dg = _passing(through_decay, since_start, until_end).add_(through_state.unsqueeze(-1))
            gradients["g"] = self.by_sequence(dg)
        if need & NEED_K:
            dk = of_state.sub_(torch.matmul(dv * self.from_start, states.mT))
            E = N.mul_(self.beta)
            dk += torch.matmul(E + E.mT, self.k)
            if dout is not None:
                dk += torch.matmul(M.mT, self.q)
            gradients["k"] = self._unnormalized(dk, self.k, self.k_norm)
        return dstate, gradients

    def _unnormalized(self, dy: Tensor, y: Tensor, norm: Tensor | None) -> Tensor:
        """The gradient of q or k for one of what was normalised; y = x·norm, so dx = norm·(dy − y (y·dy))."""
        total = self._each_key_head(dy)
        if norm is None:
            return total
        y = y.view(self.steps, self.tokens.number, -1, self.repeat, *y.shape[2:])[:, :, :, 0]
        return total.sub_(y * (y * total).sum(-1, keepdim=True)).mul_(norm)


_VANISHES = {torch.float32: -104.0, torch.float64: -746.0}
"""The exponential of this, and of what is below, is nearer to 0 than to the smallest number of a type."""


def _decays(log_decay: Tensor, resets: Tensor, kind: torch.dtype) -> Tensor:
    """e^{G_i−G_j} for i ≥ j, 0 above the diagonal and across a reset, which `resets` counts; differences first, of sums
    in two parts where one is not enough.

    What has no place, or vanishes, is left out of the exponential: MKL's takes up to 14 times as long for such numbers.
    """
    high = log_decay.to(kind)
    between = high.unsqueeze(-1) - high.unsqueeze(-2)
    if kind != torch.float64:
        low = (log_decay - high).to(kind)
        between.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))
    remains = between.tril_().clone().gt_(_VANISHES[kind])
    decay = F.threshold(between, _VANISHES[kind], 0.0, inplace=True).exp_().mul_(remains).tril_()
    if decay.is_cpu and not resets.any():  # elsewhere nobody waits for that
        return decay
    return decay.masked_fill_(resets.unsqueeze(-1) != resets.unsqueeze(-2), 0)


def _passing(between: Tensor, since_start: Tensor, until_end: Tensor) -> Tensor:
    """The gradient of each g_t: what was multiplied with a decay that token t is part of.

    That is e^{G_i−G_j} for j < t ≤ i, e^{G_i} for t ≤ i and e^{Γ−G_j} for j < t. The same sums through dG, whose terms
    cancel again when they are added up, would lose the digits of a gradient that decay leaves small.
    """
    later = between.flip(-2).cumsum(-2).flip(-2).tril_(-1).sum(-1)
    later.add_(since_start.flip(-1).cumsum(-1).flip(-1))
    later[..., 1:].add_(until_end[..., :-1].cumsum(-1))
    return later


def _normalize(x: Tensor) -> tuple[Tensor, Tensor]:
    norm = x.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    return x * norm, norm


# ----------------------------------------------------------------------------------------- chunk inverse

_SUBSTITUTED = 16
"""Rows of a diagonal block that is inverted row by row; larger ones are put together from these."""


def inverse(A: Tensor) -> Tensor:
    """(I + A)⁻¹ of strictly lower triangular matrices [..., C, C], C a power of two.

    Diagonal blocks by substitution, then pairs of blocks into one of twice the size:
    the inverse of [[X, 0], [Z, Y]] is [[X⁻¹, 0], [−Y⁻¹ Z X⁻¹, Y⁻¹]].
    """
    size = A.shape[-1]
    A = A.reshape(-1, size, size)
    width = min(size, _SUBSTITUTED)
    blocks = [slice(begin, begin + width) for begin in range(0, size, width)]
    T = torch.zeros_like(A)
    T.diagonal(dim1=1, dim2=2).fill_(1)
    diagonal, inverses = (torch.cat([X[:, at, at] for at in blocks]) for X in (A, T))
    for i in range(1, width):
        inverses[:, i, :i] = torch.bmm(diagonal[:, i : i + 1, :i], inverses[:, :i, :i]).neg_()[:, 0]
    for number, at in enumerate(blocks):
        T[:, at, at] = inverses[number * len(A) : (number + 1) * len(A)]
    while width < size:
        for begin in range(0, size, 2 * width):
            upper, lower = slice(begin, begin + width), slice(begin + width, begin + 2 * width)
            joined = torch.bmm(torch.bmm(T[:, lower, lower], A[:, lower, upper]), T[:, upper, upper])
            T[:, lower, upper] = joined.neg_()
        width *= 2
    return T


# ------------------------------------------------------------------------------------------- the whole op


def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    """Writes the outputs; the final states, and those between segments, where they are needed."""
    *tokens, initial_state, cu_seqlens, scale, normalize, output_final_state, checking, keep = arguments
    (q, k, v, g, beta), (out, final_state, saved) = tokens, outputs
    report(POSITIVE_GATE, g, g > 0)
    if checking:
        report_values(k, g, beta, normalize)
    starts, lengths = bounds(q.shape[0], q.shape[1], cu_seqlens, raises=True)
    if output_final_state:
        _set(final_state, initial_state)
    if keep:
        saved.zero_()
    if cu_seqlens is not None or not q.numel():  # tokens that belong to no sequence, keys of no size
        out.zero_()
    if not (q.numel() and v.numel()):
        return
    inputs, flat_out = _Inputs.of(tokens, scale, normalize), out.flatten(0, 1)
    for group in groups(starts, lengths, q.shape[2], v.shape[2]):
        states = _States(inputs, group, initial_state)
        for segment in range(group.segments):
            block = _Block(inputs, group, segment)
            state = states.active(block)
            if keep and segment:
                saved[group.saved(segment, saved.device), block.heads] = states.by_sequence(state)
            chunks, state = block.forward(state)
            states.update(state)
            block.tokens.scatter(flat_out[:, block.heads], block.by_sequence(chunks))
        if output_final_state:
            final_state[group.numbers(v.device), states.heads] = states.all


def backward(arguments: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """Writes the gradients of q, k, v, g, beta and the initial states, those that `need` asks for."""
    do, dfinal, *tokens, initial_state, cu_seqlens, saved, scale, normalize, need = arguments
    (q, _, v, _, _), dinitial = tokens, gradients[5]
    starts, lengths = bounds(q.shape[0], q.shape[1], cu_seqlens, raises=False)
    names = ("q", "k", "v", "g", "beta")
    targets = {name: gradients[bit].flatten(0, 1).zero_() for bit, name in enumerate(names) if need >> bit & 1}
    if need & NEED_STATE:
        _set(dinitial, dfinal)
    if not (q.numel() and v.numel()):
        return
    inputs = _Inputs.of(tokens, scale, normalize)
    flat_do = None if do is None else do.flatten(0, 1)
    for group in groups(starts, lengths, q.shape[2], v.shape[2]):
        initial_states, dstates = _States(inputs, group, initial_state), _States(inputs, group, dfinal)
        for segment in reversed(range(group.segments)):
            block = _Block(inputs, group, segment)
            if segment:
                state = saved[group.saved(segment, saved.device), block.heads].to(inputs.kind).flatten(0, 1)
            else:
                state = initial_states.active(block)
            upstream = None
            if flat_do is not None:
                upstream = block.tokens.gather(flat_do[:, block.heads], inputs.kind).flatten(1, 2)
            dstate, parts = block.backward(state, dstates.active(block), upstream, need)
            dstates.update(dstate)
            for name in targets.keys() & parts.keys():
                heads = block.key_heads if name in ("q", "k") else block.heads
                block.tokens.scatter(targets[name][:, heads], parts[name])
        if need & NEED_STATE:
            dinitial[group.numbers(v.device), dstates.heads] = dstates.all


def _set(target: Tensor, source: Tensor | None) -> None:
    if source is None:
        target.zero_()
    else:
        target.copy_(source)


class _States:
    """The states of a group's sequences and heads, as they go from segment to segment."""

    def __init__(self, inputs: _Inputs, group: Group, states: Tensor | None) -> None:
        self.heads, device = inputs.heads(group), inputs.v.device
        if states is None:
            shape = (len(group.sequences), self.heads.stop - self.heads.start, inputs.q.shape[-1], inputs.v.shape[-1])
            self.all = torch.zeros(shape, dtype=inputs.kind, device=device)
        else:
            self.all = states[group.numbers(device)][:, self.heads].to(inputs.kind, copy=True).contiguous()

    def active(self, block: _Block) -> Tensor:
        """The states of the sequences that reach a block, by lane."""
        return self.all[: block.tokens.number].flatten(0, 1)

    def by_sequence(self, lanes: Tensor) -> Tensor:
        return lanes.unflatten(0, (-1, self.all.shape[1]))

    def update(self, lanes: Tensor) -> None:
        self.all[: len(lanes) // max(1, self.all.shape[1])] = self.by_sequence(lanes)
