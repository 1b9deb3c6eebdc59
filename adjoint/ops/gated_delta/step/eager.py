"""`gated_delta_step` in plain PyTorch: a few tokens, one after the other, all rows and heads at once.

    Z = e^g S,   e = v − Zᵀk,   S⁺ = Z + k ⊗ β e,   o = scale·S⁺ᵀq

Adjoint, given do and dS⁺:

    dS⁺ += scale·q ⊗ do,   dq = scale·S⁺ do
    de = β·dS⁺ᵀk,   dβ = e·(dS⁺ᵀk),   dv = de,   dk = dS⁺ (β e) − Z de
    dZ = dS⁺ − k ⊗ de,   dg = ⟨Z, dZ⟩,   dS = e^g dZ
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.problem import wide_dtype
from adjoint.device.sequences import out_of_range, repeated, skipped_rows
from adjoint.ops.gated_delta.arguments import (
    EPSILON,
    NEED_STATE,
    POSITIVE_GATE,
    STATE_INDEX_OUT_OF_RANGE,
    STATE_INDEX_REPEATED,
    report_values,
)


class _Tokens(NamedTuple):
    """The tokens in the wide type, with q and k for every value head, and the factors that normalised these."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None

    @staticmethod
    def of(inputs: list[Tensor], normalize: bool) -> "_Tokens":
        kind = wide_dtype(inputs[0].dtype)
        q, k, v, g, beta = (x.to(kind) for x in inputs)
        repeat = v.shape[2] // max(1, q.shape[2])
        q_norm = k_norm = None
        if normalize:
            q_norm, k_norm = (x.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_() for x in (q, k))
            q, k = q * q_norm, k * k_norm
        return _Tokens(q.repeat_interleave(repeat, 2), k.repeat_interleave(repeat, 2), v, g, beta, q_norm, k_norm)


class _Rows(NamedTuple):
    """The state that each row reads, and the rows that are skipped."""

    places: Tensor | None
    skipped: Tensor | None

    @staticmethod
    def of(state_indices: Tensor | None, states: int) -> "_Rows":
        skipped = skipped_rows(state_indices, states)
        if state_indices is None or skipped is None:
            return _Rows(None, None)
        return _Rows(torch.where(skipped, 0, state_indices).long(), skipped)

    def read(self, state: Tensor, kind: torch.dtype) -> Tensor:
        """The state of each row. If there are no states, all rows are skipped and have zeros."""
        if self.places is None:
            return state.to(kind)
        if len(state) == 0:
            return state.new_zeros(len(self.places), *state.shape[1:], dtype=kind)
        return state[self.places].to(kind)

    def clear_skipped(self, *tensors: Tensor) -> None:
        """Sets the results of skipped rows to 0."""
        if self.skipped is not None:
            for tensor in tensors:
                tensor.masked_fill_(self.skipped.view(-1, *(1,) * (tensor.dim() - 1)), 0)


def _advance(tokens: _Tokens, t: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Z, e and S⁺ of token t."""
    decayed = state * tokens.g[:, t].exp()[..., None, None]
    error = tokens.v[:, t] - torch.einsum("bhkv,bhk->bhv", decayed, tokens.k[:, t])
    return decayed, error, decayed + tokens.k[:, t, :, :, None] * (error * tokens.beta[:, t, :, None])[:, :, None]


def forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], in_place: bool = False) -> None:
    """Writes the outputs and the states: the last one of each row, or all of them; in place, into the pool."""
    *inputs, state, state_indices, scale, normalize, all_states, checking = arguments
    out, states = outputs
    (_, k, _, g, beta), time = inputs, out.shape[1]
    report(POSITIVE_GATE, g, g > 0)
    if state_indices is not None:
        report(STATE_INDEX_OUT_OF_RANGE, state_indices, out_of_range(state_indices, len(state)))
        if checking:
            report(STATE_INDEX_REPEATED, state_indices, repeated(state_indices))
    if checking:
        report_values(k, g, beta, normalize, skipped_rows(state_indices, len(state)))
    rows, tokens = _Rows.of(state_indices, len(state)), _Tokens.of(inputs, normalize)
    current = rows.read(state, tokens.v.dtype)
    for t in range(time):
        _, _, current = _advance(tokens, t, current)
        out[:, t] = torch.einsum("bhkv,bhk->bhv", current, tokens.q[:, t]).mul_(scale)
        if all_states:
            states[:, t] = current
    rows.clear_skipped(out)
    if not all_states and not in_place:
        states.copy_(current)
    if all_states or not in_place:
        rows.clear_skipped(states)
    if in_place:
        if rows.places is None or rows.skipped is None:
            state.copy_(current)
        else:
            state[rows.places[~rows.skipped]] = current[~rows.skipped].to(state.dtype)


def backward(arguments: tuple[Any, ...], gradients: tuple[Tensor, ...]) -> None:
    """Writes the gradients of q, k, v, g, beta and the pool of states that are in the mask `need`."""
    do, dstates, *inputs, state, state_indices, scale, normalize, all_states, need = arguments
    rows, tokens = _Rows.of(state_indices, len(state)), _Tokens.of(inputs, normalize)
    kind, time = tokens.v.dtype, tokens.v.shape[1]
    history = []
    current = rows.read(state, kind)
    for t in range(time):
        history.append(_advance(tokens, t, current))
        current = history[-1][2]
    dq, dk, dv, dg, dbeta = (torch.zeros_like(x) for x in tokens[:5])
    dstate = torch.zeros_like(current)
    if dstates is not None and not all_states:
        dstate += dstates
    for t in reversed(range(time)):
        decayed, error, after = history[t]
        if dstates is not None and all_states:
            dstate = dstate + dstates[:, t]
        if do is not None:
            upstream = do[:, t].to(kind) * scale
            dq[:, t] = torch.einsum("bhkv,bhv->bhk", after, upstream)
            dstate = dstate + tokens.q[:, t, :, :, None] * upstream[:, :, None]
        along_key = torch.einsum("bhkv,bhk->bhv", dstate, tokens.k[:, t])
        strength = tokens.beta[:, t, :, None]
        dbeta[:, t] = (error * along_key).sum(-1)
        dv[:, t] = along_key * strength
        dk[:, t] = torch.einsum("bhkv,bhv->bhk", dstate, error * strength)
        dk[:, t] -= torch.einsum("bhkv,bhv->bhk", decayed, dv[:, t])
        dstate = dstate - tokens.k[:, t, :, :, None] * dv[:, t, :, None]
        dg[:, t] = (decayed * dstate).sum((-1, -2))
        dstate = dstate * tokens.g[:, t].exp()[..., None, None]
    q, k, *_ = inputs
    dq = _to_key_heads(dq, tokens.q, tokens.q_norm, q)
    dk = _to_key_heads(dk, tokens.k, tokens.k_norm, k)
    rows.clear_skipped(dq, dk, dv, dg, dbeta, dstate)
    for bit, (target, gradient) in enumerate(zip(gradients, (dq, dk, dv, dg, dbeta), strict=False)):
        if need >> bit & 1:
            target.copy_(gradient)
    if need & NEED_STATE:
        if rows.places is not None:  # rows may share a state if the step is not in place; their gradients add up
            pool = torch.zeros(state.shape, dtype=kind, device=state.device)
            dstate = pool.index_add_(0, rows.places, dstate) if len(state) else pool
        gradients[5].copy_(dstate)


def _to_key_heads(gradient: Tensor, normalized: Tensor, norm: Tensor | None, like: Tensor) -> Tensor:
    """Sums over the value heads of a key head, then applies the adjoint of normalising: dx = norm·(dy − y (y·dy))."""
    repeat = gradient.shape[2] // max(1, like.shape[2])
    total = gradient.unflatten(2, (-1, repeat)).sum(3) if repeat > 1 else gradient
    if norm is None:
        return total
    y = normalized[:, :, ::repeat]
    return (total - y * (y * total).sum(-1, keepdim=True)) * norm
