"""The definition of the causal convolution and its adjoint: float64, sequence by sequence, never optimised.

z_t = bias + Σ_j weight[:, j]·x_{t−W+1+j},   y = z or silu(z)

The W − 1 tokens before the first of a sequence are the columns of its state, or 0. The final state is the last W − 1
tokens, those of the state included.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class Gradients(NamedTuple):
    x: Tensor
    weight: Tensor
    bias: Tensor
    state: Tensor


def sequences(x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[int, slice]]:
    """The row and the tokens of each sequence."""
    if cu_seqlens is None:
        return [(row, slice(0, x.shape[1])) for row in range(x.shape[0])]
    bounds = cu_seqlens.tolist()
    return [(0, slice(begin, end)) for begin, end in pairwise(bounds)]


def padded(x: Tensor, width: int, state: Tensor | None, cu_seqlens: Tensor | None) -> list[Tensor]:
    """The tokens of each sequence, [W − 1 + length, channels], with the W − 1 before the first."""
    none = x.new_zeros(width - 1, x.shape[2])
    return [
        torch.cat((none if state is None else state[number].T, x[row, tokens]))
        for number, (row, tokens) in enumerate(sequences(x, cu_seqlens))
    ]


def preactivation(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """z, like x."""
    z = torch.zeros_like(x)
    pieces = padded(x, weight.shape[1], state, cu_seqlens)
    for (row, tokens), piece in zip(sequences(x, cu_seqlens), pieces, strict=True):
        for j in range(weight.shape[1]):
            z[row, tokens] += weight[:, j] * piece[j : j + tokens.stop - tokens.start]
    return z if bias is None else z + bias


def final_states(x: Tensor, width: int, state: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
    """[sequences, channels, W − 1]."""
    pieces = padded(x, width, state, cu_seqlens)
    if not pieces:
        return x.new_zeros(0, x.shape[2], width - 1)
    return torch.stack([piece[len(piece) - (width - 1) :].T for piece in pieces])


def adjoint(
    dz: Tensor, x: Tensor, weight: Tensor, state: Tensor | None, cu_seqlens: Tensor | None,
    dfinal_state: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """Of z, and of the final states where there is a gradient of them."""
    width, dx, dweight = weight.shape[1], torch.zeros_like(x), torch.zeros_like(weight)
    dstates = []
    pieces = padded(x, width, state, cu_seqlens)
    for number, ((row, tokens), piece) in enumerate(zip(sequences(x, cu_seqlens), pieces, strict=True)):
        length, own, dpiece = tokens.stop - tokens.start, dz[row, tokens], torch.zeros_like(piece)
        for j in range(width):
            dpiece[j : j + length] += weight[:, j] * own
            dweight[:, j] += (own * piece[j : j + length]).sum(0)
        if dfinal_state is not None:
            dpiece[length:] += dfinal_state[number].T
        dx[row, tokens] = dpiece[width - 1 :]
        dstates.append(dpiece[: width - 1].T)
    dstate = torch.stack(dstates) if dstates else x.new_zeros(0, x.shape[2], width - 1)
    return Gradients(dx, dweight, dz.sum((0, 1)), dstate)


def silu(z: Tensor) -> Tensor:
    return z * torch.sigmoid(z)


def silu_slope(z: Tensor) -> Tensor:
    return torch.sigmoid(z) * (1 + z * torch.sigmoid(-z))


def identity(z: Tensor) -> Tensor:
    return z


ACTIVATIONS: dict[bool, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    True: (silu, silu_slope),
    False: (identity, torch.ones_like),
}
"""The activation and its slope, by whether it is SiLU."""


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None, cu_seqlens: Tensor | None, *,
    is_silu: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and the final states."""
    y = ACTIVATIONS[is_silu][0](preactivation(x, weight, bias, state, cu_seqlens))
    return y, final_states(x, weight.shape[1], state, cu_seqlens)


def backward(
    dy: Tensor, dfinal_state: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor | None,
    cu_seqlens: Tensor | None, *, is_silu: bool = True,
) -> Gradients:  # fmt: skip
    """With dz = dy·act'(z): the adjoint of z and of the final states."""
    dz = dy * ACTIVATIONS[is_silu][1](preactivation(x, weight, bias, state, cu_seqlens))
    return adjoint(dz, x, weight, state, cu_seqlens, dfinal_state)
