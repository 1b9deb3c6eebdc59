"""The expert layer as defined: token by token and slot by slot, in the dtype of its inputs, never optimised."""

import torch
from torch import Tensor


def experts(x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """y[t] = Σ_j weights[t, j] · down[e] · (silu(g) ⊙ u), [g; u] = gate_up[e] · x[t], e = indices[t, j].

    An index out of range adds nothing.
    """
    inner = down.shape[2]
    tokens = []
    for t in range(x.shape[0]):
        y = torch.zeros_like(x[t])
        for j in range(indices.shape[1]):
            e = int(indices[t, j])
            if 0 <= e < down.shape[0]:
                both = gate_up[e] @ x[t]
                g, u = both[:inner], both[inner:]
                y = y + weights[t, j] * (down[e] @ (g / (1 + torch.exp(-g)) * u))
        tokens.append(y)
    return torch.stack(tokens) if tokens else torch.zeros_like(x)


def experts_backward(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, indices: Tensor, weights: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of x, gate_up, down and weights, expert by expert."""
    inner = down.shape[2]
    dx, dgate_up = torch.zeros_like(x), torch.zeros_like(gate_up)
    ddown, dweights = torch.zeros_like(down), torch.zeros_like(weights)
    for e in range(down.shape[0]):
        t, j = (indices == e).nonzero(as_tuple=True)
        both = x[t] @ gate_up[e].T
        g, u = both[:, :inner], both[:, inner:]
        sigma = torch.sigmoid(g)
        h = g * sigma * u
        unscaled = dy[t] @ down[e]
        dweights[t, j] = (h * unscaled).sum(1)
        dh = weights[t, j][:, None] * unscaled
        dboth = torch.cat((dh * u * sigma * (1 + g * (1 - sigma)), dh * g * sigma), 1)
        dx.index_add_(0, t, dboth @ gate_up[e])
        dgate_up[e] = dboth.T @ x[t]
        ddown[e] = dy[t].T @ (weights[t, j][:, None] * h)
    return dx, dgate_up, ddown, dweights
