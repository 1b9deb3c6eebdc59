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
        self.kk, self.qk = k @ k.mT, q @ k.mT
        self.q, self.k = self._each_head(q), self._each_head(k)
        self.v = tokens.gather(inputs.v[:, self.heads], kind).flatten(1, 2)
        self.beta = tokens.gather(inputs.beta[:, self.heads], kind).flatten(1, 2).unsqueeze(-1)
        # The running sum in float64: differences of long sums in float32 would lose the digits of short decays.
        # A reset is not in it: what crosses one is 0, and the tokens after it have their own small sums.
        g = tokens.gather(inputs.g[:, self.heads], torch.float64).flatten(1, 2)
        is_reset = g < RESET[kind]
        resets = None
        if not g.is_cpu or is_reset.any():  # elsewhere nobody waits for that
            resets = is_reset.cumsum(-1, dtype=torch.int8)
            g.masked_fill_(is_reset, 0)
        log_decay = g.cumsum(-1)
        end = log_decay[..., -1:]
        from_start, to_end, chunk_decay = log_decay.exp(), (end - log_decay).exp_(), end.exp()
        if resets is not None:
            from_start.masked_fill_(resets > 0, 0)
            to_end.masked_fill_(resets != resets[..., -1:], 0)
            chunk_decay.masked_fill_(resets[..., -1:] > 0, 0)
        self.from_start, self.to_end, self.chunk_decay = (
            x.unsqueeze(-1).to(kind) for x in (from_start, to_end, chunk_decay)
        )
        self.decay = _decays(log_decay, resets, kind)
        self.T = inverse(self._times(self.kk, self.decay).mul_(self.beta).tril_(-1)).view_as(self.decay)
        self.k_to_end = self.k * self.to_end

    @property
    def chunks(self) -> list["_Chunk"]:
        parts = (self.q, self.k, self.k_to_end, self.v, self.beta, self.from_start, self.chunk_decay, self.T)
        return [_Chunk(*chunk) for chunk in zip(*parts, strict=True)]

    def _each_head(self, x: Tensor) -> Tensor:
        """[steps, sequences, key heads, ...] -> [steps, lanes, ...]: every value head reads its key head."""
        if self.repeat == 1:
            return x.flatten(1, 2)
        return x.unsqueeze(3).expand(*x.shape[:3], self.repeat, *x.shape[3:]).flatten(1, 3)

    def _times(self, gram: Tensor, x: Tensor) -> Tensor:
        """gram ⊙ x: the products of a key head's tokens, and a matrix of each value head that reads it."""
        return (x.view(*gram.shape[:3], self.repeat, *gram.shape[3:]) * gram.unsqueeze(3)).view_as(x)

    def _each_key_head(self, x: Tensor) -> Tensor:
        """The adjoint: sums over the value heads that share a key head."""
        x = x.view(self.steps, self.tokens.number, -1, self.repeat, *x.shape[2:])
        return x.sum(3) if self.repeat > 1 else x.squeeze(3)

    def by_sequence(self, x: Tensor) -> Tensor:
        """[steps, lanes, ...] -> [steps, sequences, value heads, ...]"""
        return x.unflatten(1, (self.tokens.number, -1))

    def forward(self, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The outputs of all chunks, and the state after them; from a state of zeros, where none is given."""
        out = torch.empty_like(self.v)
        for chunk, scores, into in zip(self.chunks, self._times(self.qk, self.decay), out, strict=True):
            new_values = chunk.new_values(None if state is None else chunk.predicted(state))
            seen = into if state is None else torch.bmm(chunk.q, state).mul_(chunk.from_start)
            share = 0 if state is None else self.scale
            torch.baddbmm(seen, scores, new_values, beta=share, alpha=self.scale, out=into)
            state = chunk.next(state, new_values)
        assert state is not None
        return out, state

    def backward(
        self, state: Tensor | None, dstate: Tensor, dout: Tensor | None, need: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The gradient of the state the block begins with, by lane, and those of its inputs that are needed and not 0,
        as `[steps, sequences, heads, chunk, ...]`."""
        shape, chunks = (self.steps, *dstate.shape), self.chunks
        states, dstates = dstate.new_empty(shape), dstate.new_empty(shape)
        predicted, new_values, dnew, Y = (torch.empty_like(self.v) for _ in range(4))
        for s, (chunk, start, of_keys, values) in enumerate(zip(chunks, states, predicted, new_values, strict=True)):
            if state is None:
                start.zero_()
                of_keys.zero_()
                chunk.new_values(None, values)
            else:
                start.copy_(state)
                chunk.new_values(chunk.predicted(state, of_keys), values)
            if s + 1 < self.steps:
                state = chunk.next(state, values)
        if dout is None:
            dnew.zero_()
        else:
            dout = dout * self.scale
            torch.matmul(self._times(self.qk, self.decay).mT, dout, out=dnew)
            from_outputs = (self.q * self.from_start).mT.unbind()
        from_start = self.beta * self.from_start
        for s in reversed(range(self.steps)):
            chunk, dvalues = chunks[s], dnew[s]
            dstates[s] = dstate
            dvalues.baddbmm_(chunk.k_to_end, dstate)
            of_values = torch.bmm(chunk.T.mT, dvalues, out=Y[s])
            dstate = dstate * chunk.chunk_decay
            if dout is not None:
                dstate.baddbmm_(from_outputs[s], dout[s])
            dstate.baddbmm_(chunk.k.mT, of_values * from_start[s], alpha=-1)
        dv = Y * self.beta
        gradients = {"v": self.by_sequence(dv)}
        if not need & (NEED_Q | NEED_K | NEED_G | NEED_BETA):
            return dstate, gradients
        N = torch.matmul(Y, new_values.mT).mul_(self.decay).neg_().tril_(-1)
        of_grams = self._times(self.kk, N)
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
                through_decay.add_(self._times(self.qk, M).tril_(-1))
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


class _Chunk(NamedTuple):
    """One chunk of all lanes: [lanes, chunk, ...], and what a state is multiplied with, [lanes, 1, 1]."""

    q: Tensor
    k: Tensor
    k_to_end: Tensor
    v: Tensor
    beta: Tensor
    from_start: Tensor
    chunk_decay: Tensor
    T: Tensor

    def predicted(self, state: Tensor, out: Tensor | None = None) -> Tensor:
        """e^G ⊙ (k S)"""
        return torch.bmm(self.k, state, out=out).mul_(self.from_start)  # type: ignore[arg-type]

    def new_values(self, predicted: Tensor | None, out: Tensor | None = None) -> Tensor:
        """v', where nothing is predicted from a state of zeros."""
        residual = self.v * self.beta if predicted is None else (self.v - predicted).mul_(self.beta)
        return torch.bmm(self.T, residual, out=out)  # type: ignore[arg-type]

    def next(self, state: Tensor | None, new_values: Tensor) -> Tensor:
        """The state after the chunk."""
        if state is None:
            return torch.bmm(self.k_to_end.mT, new_values)
        return torch.baddbmm(state * self.chunk_decay, self.k_to_end.mT, new_values)


_VANISHES = {torch.float32: -104.0, torch.float64: -746.0}
"""The exponential of this, and of what is below, is nearer to 0 than to the smallest number of a type."""


def _decays(log_decay: Tensor, resets: Tensor | None, kind: torch.dtype) -> Tensor:
    """e^{G_i−G_j} for i ≥ j, 0 above the diagonal and across a reset, which `resets` counts where there may be any;
    differences first, of sums in two parts where one is not enough.

    What has no place, or vanishes, is left out of the exponential: MKL's takes up to 14 times as long for such numbers.
    """
    high = log_decay.to(kind)
    between = high.unsqueeze(-1) - high.unsqueeze(-2)
    if kind != torch.float64:
        low = (log_decay - high).to(kind)
        between.add_(low.unsqueeze(-1)).sub_(low.unsqueeze(-2))
    remains = between.tril_().clone().gt_(_VANISHES[kind])
    decay = F.threshold(between, _VANISHES[kind], 0.0, inplace=True).exp_().mul_(remains).tril_()
    if resets is None:
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
    T = torch.zeros_like(A)
    _blocks(T, width).copy_(_inverse_by_substitution(_blocks(A, width)))
    while width < size:
        inverses, below, into = _blocks(T, width), _blocks(A, width, -1), _blocks(T, width, -1)
        for i in range(0, size // width, 2):
            torch.neg(torch.bmm(torch.bmm(inverses[i + 1], below[i]), inverses[i]), out=into[i])
        width *= 2
    return T


def _blocks(x: Tensor, width: int, below: int = 0) -> Tensor:
    """The blocks on the diagonal of matrices [n, C, C], or so many below it: a view, [blocks, n, width, width]."""
    count = x.shape[-1] // width
    return x.view(len(x), count, width, count, width).diagonal(below, 1, 3).movedim(-1, 0)


def _inverse_by_substitution(A: Tensor) -> Tensor:
    """(I + A)⁻¹ of small matrices, row by row: T_i = I_i − A_i T."""
    width = A.shape[-1]
    unit = torch.eye(width, dtype=A.dtype, device=A.device).expand_as(A)
    if A.is_cpu:  # BLAS substitutes, too: the columns of Tᵀ (I + A)ᵀ = I one after the other
        return torch.linalg.solve_triangular(A.mT, unit, upper=True, left=False, unitriangular=True).mT
    T = unit.clone()
    for i in range(1, width):
        T[..., i, :i] = torch.matmul(A[..., i : i + 1, :i], T[..., :i, :i]).neg_()[..., 0, :]
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
            start = states.active(block) if segment or initial_state is not None else None
            if keep and start is not None and segment:
                saved[group.saved(segment, saved.device), block.heads] = states.by_sequence(start)
            chunks, end = block.forward(start)
            states.update(end)
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
                state = None if initial_state is None else initial_states.active(block)
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
