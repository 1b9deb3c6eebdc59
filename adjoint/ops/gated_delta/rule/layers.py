"""The layers on which the rule is timed, and the rule in torch's own functions."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.contract.cases import Inputs, Make
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.values import drawn_on

K = V = 128
"""The sizes of keys and values in the workloads."""

Normal = Callable[..., Tensor]


def _log_sigmoid(normal: Normal, time: int, heads: int) -> Tensor:
    return F.logsigmoid(normal(1, time, heads))


def _slow(normal: Normal, time: int, heads: int) -> Tensor:
    return _log_sigmoid(normal, time, heads) / 256


def _quarter_without_decay(normal: Normal, time: int, heads: int) -> Tensor:
    """The gates of FlashQLA's own benchmark: log σ(x) / 16, and no decay at all in a quarter of the heads."""
    g = _log_sigmoid(normal, time, heads) / 16
    g[..., normal(heads).argsort()[: heads // 4]] = 0
    return g


def _initial(normal: Normal, time: int, heads: int) -> Tensor:
    """The initial gates of Qwen3-Next, −A·softplus(dt), with A uniform in [0.01, 16), and softplus(dt) log-uniform
    between 0.001 and 0.1."""

    def uniform(*shape: int) -> Tensor:
        return torch.special.ndtr(normal(*shape))

    rate, step = 0.01 + 15.99 * uniform(heads), 0.001 * 100 ** uniform(1, time, heads)
    return -rate * step


GATES = {"": _log_sigmoid, "slow decay": _slow, "FlashQLA's gates": _quarter_without_decay, "initial gates": _initial}
"""The logarithms of decays, by the name in a row.

Our times do not depend on them. But those of a peer do that leaves out terms that have decayed away. log σ(x) itself
halves a state at every token, which is a stronger decay than that of most heads of a layer.
"""


def layer(
    time: int, key_heads: int, heads: int, sequences: int, gates: str, share: float = 1.0, nearly_equal: bool = False
) -> Make:
    """The inputs of a layer: random directions as keys and queries, decays and strengths as in a layer, and sequences
    of one length.

    The decays are multiplied by `share`. Nearly equal keys are one common direction plus a twentieth of another one.
    """

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        normal = partial(torch.randn, **drawn_on(device, generator))
        q, k = (F.normalize(normal(1, time, key_heads, K), dim=-1) for _ in range(2))
        if nearly_equal:
            k = F.normalize(k[:, :1] + 0.05 * k, dim=-1)
        q, k = q.to(dtype), k.to(dtype)
        v = normal(1, time, heads, V).to(dtype)
        g, beta = share * GATES[gates](normal, time, heads), normal(1, time, heads).sigmoid()
        bounds = torch.arange(0, time + 1, time // sequences, device=device) if sequences > 1 else None
        return q, k, v, g, beta, None, bounds

    return make


def in_torch(*inputs: Any) -> Tensor:
    """The rule by chunks in torch's own functions, in float32, for one sequence."""
    q, k, v, g, beta = (x.float() for x in inputs[:5])
    time, repeat, chunks = q.shape[1], v.shape[2] // q.shape[2], q.shape[1] // CHUNK

    def by_chunk(x: Tensor) -> Tensor:
        return x[0].unflatten(0, (chunks, CHUNK)).transpose(1, 2)

    q, k = (by_chunk(x.repeat_interleave(repeat, 2)) for x in (q, k))
    v, g, beta = by_chunk(v), by_chunk(g).cumsum(-1), by_chunk(beta).unsqueeze(-1)
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (g.unsqueeze(-1) - g.unsqueeze(-2)).masked_fill(~lower, -torch.inf).exp()
    eye = torch.eye(CHUNK, device=q.device)
    A = (beta * (k @ k.mT) * between).tril(-1)
    solved = torch.linalg.solve_triangular(eye + A, eye.expand_as(A), upper=False, unitriangular=True)
    w, u = solved @ (beta * g.exp().unsqueeze(-1) * k), solved @ (beta * v)
    scores, faded = (q @ k.mT) * between, k * (g[..., -1:] - g).exp().unsqueeze(-1)
    state, outputs = q.new_zeros(v.shape[1], K, V), []
    for c in range(chunks):
        values = u[c] - w[c] @ state
        outputs.append(g[c].exp().unsqueeze(-1) * (q[c] @ state) + scores[c] @ values)
        state = g[c, :, -1, None, None].exp() * state + faded[c].mT @ values
    return (K**-0.5 * torch.stack(outputs)).transpose(1, 2).reshape(1, time, -1, V).to(inputs[2].dtype)
