"""Chunks that several stages are tested on, and what the reference makes of them."""

import torch
from torch import Tensor

from adjoint.contract.cases import Inputs, Make
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.values import tokens

CPU = torch.device("cpu")


def solved(
    shape: tuple[int, int, int, int, int, int],
    chunk: int,
    cu_seqlens: tuple[int, ...] | None = None,
    narrow: bool = False,
) -> Make:
    """k, v, beta, G and T of real chunks; T in the dtype of k where that is asked."""
    batch, time, _, heads, _, _ = shape

    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        _, k, v, g, beta, _, bounds = tokens(shape, cu_seqlens=cu_seqlens)(dtype, CPU, generator)
        G, T = torch.zeros_like(g), g.new_zeros(batch, time, heads, chunk)
        for row, part in reference.sequences(batch, time, bounds):
            for begin in range(part.start, part.stop, chunk):
                place = (row, slice(begin, min(begin + chunk, part.stop)))
                G[place] = g[place].cumsum(0)
                inverse = reference.solve(reference.gram(k[place].to(g.dtype), beta[place], G[place]))
                T[place][..., : inverse.shape[-1]] = inverse.transpose(0, 1)
        inputs = (k, v, beta, G, T.to(dtype) if narrow else T, bounds)
        return tuple(None if x is None else x.to(device) for x in inputs)

    return make


def w_u(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stage, chunk by chunk."""
    chunk, parts = T.shape[-1], []
    for row, part in reference.sequences(k.shape[0], k.shape[1], cu_seqlens):
        for begin in range(part.start, part.stop, chunk):
            place = (row, slice(begin, min(begin + chunk, part.stop)))
            matrix = T[place][..., : place[1].stop - begin].transpose(0, 1)
            parts.append(reference.recompute_w_u(k[place], v[place], beta[place], G[place], matrix))
    if not parts:
        return v.new_zeros(*v.shape[:3], k.shape[3]), torch.zeros_like(v)
    w, u = (torch.cat(rows) for rows in zip(*parts, strict=True))
    return w.unflatten(0, k.shape[:2]), u.unflatten(0, k.shape[:2])
