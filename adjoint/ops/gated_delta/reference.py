"""The gated delta rule as defined: short, in the dtype of its inputs, never optimised.

It is written twice and independently: token by token as in the recurrence, and chunk by chunk as kernels compute it.
Both have only differentiable functions of torch, so autograd gives their gradients.
"""

from itertools import pairwise

import torch
from torch import Tensor

EPSILON = 1e-6


def normalized(x: Tensor) -> Tensor:
    """x / sqrt(Σx² + 1e-6) along the last axis."""
    return x / (x.square().sum(-1, keepdim=True) + EPSILON).sqrt()


def gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g = −e^{A_log} · softplus(a + dt_bias) and β = σ(b).

    σ(b) is written as e^{log σ(b)}, because autograd's gradient of a sigmoid is β·(1 − β), which cancels and is 0 from
    b = 37 on.
    """
    return -A_log.exp() * torch.logaddexp(a + dt_bias, torch.zeros_like(a)), torch.nn.functional.logsigmoid(b).exp()


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Outputs and the state after each token, for q, k [T, Hg, K], v [T, H, V], g, beta [T, H], state [H, K, V].

    S ← e^{g_t}·S;   S ← S + k_t ⊗ β_t·(v_t − Sᵀk_t);   o_t = scale·Sᵀq_t
    """
    group = v.shape[1] // max(1, q.shape[1])
    outputs, states = [], []
    for q_t, k_t, v_t, g_t, beta_t in zip(q, k, v, g, beta, strict=True):
        q_t, k_t = q_t.repeat_interleave(group, 0), k_t.repeat_interleave(group, 0)
        state = g_t.exp()[:, None, None] * state
        known = torch.einsum("hkv,hk->hv", state, k_t)
        state = state + torch.einsum("hk,hv->hkv", k_t, beta_t[:, None] * (v_t - known))
        outputs.append(scale * torch.einsum("hkv,hk->hv", state, q_t))
        states.append(state)
    if not outputs:
        return torch.zeros_like(v), state.new_zeros(0, *state.shape)
    return torch.stack(outputs), torch.stack(states)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, scale: float, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """Outputs and the last state of one sequence, computed by chunks through the stages, with w and u."""
    group = v.shape[1] // max(1, q.shape[1])
    outputs = [torch.zeros_like(v[:0])]
    for begin in range(0, len(v), chunk):
        part = slice(begin, begin + chunk)
        decay = g[part].cumsum(0)
        A = gram(k[part], beta[part], decay)
        w, u = recompute_w_u(k[part], v[part], beta[part], decay, solve(A))
        keys = k[part].repeat_interleave(group, 1)
        values = u - torch.einsum("thk,hkv->thv", w, state)
        outputs.append(output(q[part], k[part], values, state, decay, scale))
        last = (decay[-1] - decay).exp()
        state = decay[-1].exp()[:, None, None] * state + torch.einsum("thk,th,thv->hkv", keys, last, values)
    return torch.cat(outputs), state


# ------------------------------------------------------------------------------------------- one chunk


def _decays(decay: Tensor, diagonal: int) -> Tensor:
    """e^{G_i − G_j} as [H, C, C] for j up to i + diagonal, and 0 elsewhere. Differences come first."""
    difference = decay.T[:, :, None] - decay.T[:, None, :]
    return torch.where(torch.ones_like(difference).tril(diagonal).bool(), difference, -torch.inf).exp()


def gram(k: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """A_ij = β_i (k_i·k_j) e^{G_i − G_j} for i > j, as [H, C, C], from a chunk's k [C, Hg, K], beta, decay [C, H]."""
    keys = k.repeat_interleave(beta.shape[1] // max(1, k.shape[1]), 1)
    return beta.T[:, :, None] * torch.einsum("ihk,jhk->hij", keys, keys) * _decays(decay, -1)


def solve(A: Tensor) -> Tensor:
    """T = (I + A)⁻¹."""
    return torch.linalg.inv(torch.eye(A.shape[-1], dtype=A.dtype, device=A.device) + A)


def recompute_w_u(k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, T: Tensor) -> tuple[Tensor, Tensor]:
    """w = T·(β·e^G·k) and u = T·(β·v), for a chunk."""
    keys = k.repeat_interleave(v.shape[1] // max(1, k.shape[1]), 1)
    w = torch.einsum("hij,jhk->ihk", T, (beta * decay.exp())[..., None] * keys)
    return w, torch.einsum("hij,jhv->ihv", T, beta[..., None] * v)


def output(q: Tensor, k: Tensor, values: Tensor, state: Tensor, decay: Tensor, scale: float) -> Tensor:
    """o_i = scale·(e^{G_i}·q_i·S + Σ_{j≤i} (q_i·k_j)·e^{G_i−G_j}·v'_j), for a chunk and the state it begins with."""
    group = values.shape[1] // max(1, q.shape[1])
    queries, keys = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    before = decay.exp()[..., None] * torch.einsum("thk,hkv->thv", queries, state)
    scores = torch.einsum("ihk,jhk->hij", queries, keys) * _decays(decay, 0)
    return scale * (before + torch.einsum("hij,jhv->ihv", scores, values))


# -------------------------------------------------------------------------------------------- the batch


def sequences(rows: int, time: int, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    """The row and the tokens of each sequence. Every row is a sequence, or `cu_seqlens` cuts the only row."""
    if cu_seqlens is None:
        return [(row, slice(0, time)) for row in range(rows)]
    return [(0, slice(begin, end)) for begin, end in pairwise(cu_seqlens.tolist())]


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    scale: float | None = None,
    normalize_qk: bool = False,
    by_chunks: bool = False,
) -> tuple[Tensor, Tensor]:
    """Outputs [B, T, H, V] and final states [N, H, K, V]."""
    if normalize_qk:
        q, k = normalized(q), normalized(k)
    scale = max(1, q.shape[-1]) ** -0.5 if scale is None else scale
    found = sequences(q.shape[0], q.shape[1], cu_seqlens)
    heads, K, V = v.shape[2], q.shape[3], v.shape[3]
    states = v.new_zeros(len(found), heads, K, V) if initial_state is None else initial_state
    outputs, finals = [], []
    for (row, tokens), state in zip(found, states, strict=True):
        arguments = (q[row, tokens], k[row, tokens], v[row, tokens], g[row, tokens], beta[row, tokens], state, scale)
        if by_chunks:
            out, final = chunked(*arguments)
        else:
            out, after = recurrence(*arguments)
            final = after[-1] if len(after) else state
        outputs.append(out)
        finals.append(final)
    if not found:
        return torch.zeros_like(v), states
    joined = torch.stack(outputs) if cu_seqlens is None else torch.cat(outputs)[None]
    return joined, torch.stack(finals)
