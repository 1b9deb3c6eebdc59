"""The chunks that the stages of the gated delta rule are tested and verified on."""

import torch
from torch import Tensor

from adjoint.core.cases import Case, Inputs, Make, Subject
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.rule_cases import gradients, tokens, wrong, zeros
from adjoint.ops.gated_delta.w_u import recompute_w_u

CPU = torch.device("cpu")


def _solved(
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
                solved = reference.solve(reference.gram(k[place].to(g.dtype), beta[place], G[place]))
                T[place][..., : solved.shape[-1]] = solved.transpose(0, 1)
        kept = (k, v, beta, G, T.to(dtype) if narrow else T, bounds)
        return tuple(None if x is None else x.to(device) for x in kept)

    return make


def _w_u(k: Tensor, v: Tensor, beta: Tensor, G: Tensor, T: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """The stage, chunk by chunk."""
    chunk, parts = T.shape[-1], []
    for row, part in reference.sequences(k.shape[0], k.shape[1], cu_seqlens):
        for begin in range(part.start, part.stop, chunk):
            place = (row, slice(begin, min(begin + chunk, part.stop)))
            own = T[place][..., : place[1].stop - begin].transpose(0, 1)
            parts.append(reference.recompute_w_u(k[place], v[place], beta[place], G[place], own))
    if not parts:
        return v.new_zeros(*v.shape[:3], k.shape[3]), torch.zeros_like(v)
    w, u = (torch.cat(found) for found in zip(*parts, strict=True))
    return w.unflatten(0, k.shape[:2]), u.unflatten(0, k.shape[:2])


W_U_MISTAKES = {
    "zero output": zeros,
    "w without its decay": wrong(lambda k, v, beta, G, T, cu: _w_u(k, v, beta, G * 0, T, cu)),
    "T transposed": wrong(lambda k, v, beta, G, T, cu: _w_u(k, v, beta, G, T.flip(-1), cu)),
    "gradient of T dropped": wrong(lambda k, v, beta, G, T, cu: _w_u(k, v, beta, G, T.detach(), cu)),
}


def _w_u_subject(name: str, narrow: bool, dtypes: tuple[torch.dtype, ...]) -> Subject:
    return Subject(
        name=name,
        function=recompute_w_u,
        inputs=("k", "v", "beta", "G", "T", "cu_seqlens"),
        by_name=("cu_seqlens",),
        reference=_w_u,
        reference_backward=gradients(_w_u),
        cases=(
            Case("grouped heads", _solved((2, 5, 1, 2, 3, 2), 4, narrow=narrow)),
            Case("packed", _solved((1, 40, 1, 2, 9, 7), 16, (0, 0, 1, 18, 40, 40), narrow)),
            Case("no tokens", _solved((1, 0, 1, 1, 4, 4), 16, narrow=narrow)),
            Case("a layer", _solved((1, 1000, 2, 4, 128, 128), 64, narrow=narrow), heavy=True),
        ),
        mistakes=W_U_MISTAKES,
        dtypes=dtypes,
    )


W_U = (
    _w_u_subject("recompute_w_u", False, (torch.float64, torch.float32, torch.bfloat16, torch.float16)),
    _w_u_subject("recompute_w_u[narrow T]", True, (torch.bfloat16,)),
)
