"""The backward over all chunks of a sequence, last to first, from what its forward leaves."""

import torch
from torch import Tensor

from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.bound.arithmetic import FLUSHED, TF32_PRODUCT, Arithmetic
from adjoint.ops.gated_delta.rule.bound.chunk import times
from adjoint.ops.gated_delta.rule.bound.ellipsoids import Ellipsoids
from adjoint.ops.gated_delta.rule.bound.forward import Lanes, Segment, forward
from adjoint.ops.gated_delta.rule.bound.gradients import Gradients, TokenGradients
from adjoint.ops.gated_delta.rule.bound.reverse_step import reverse_step


def backward(
    a: Arithmetic, scale: float, lanes: Lanes, do: Tensor, S: Tensor, dS: Tensor, length: int
) -> tuple[list[Gradients], Tensor, Tensor]:
    """Evaluates every chunk, last to first.

    Returns the gradients of each chunk, in order, the gradient of the initial state, and the bound of its error.
    """
    left = forward(a, scale, lanes, S, length, gradients=True)
    errors, overflow = left.errors, torch.zeros(len(S), dtype=torch.bool, device=S.device)
    E, shift = Ellipsoids.none(len(S), S.shape[-2], S), S.new_zeros(len(S))
    every = a.reverse_segment // CHUNK if a.unsplit_reverse and length > a.unsplit_reverse else 0
    last = (lanes.chunks - 1) // every if every else 0
    end, B, B_error = (dS, E), torch.zeros_like(dS), E
    results = []
    for at in reversed(range(lanes.chunks)):
        c = lanes.chunk(a, scale, at)
        step, before, before_error = reverse_step(a, c, do[at], dS, E)
        gradients = TokenGradients(a, c, lanes.v[at], do[at], errors[at], step, E.norm(), shift)
        overflow = overflow | step.overflow
        results.append(gradients.all(left.overflow[at], overflow))
        shift = gradients.shift
        dS, E = before, before_error
        if every:
            alone, B, B_error = reverse_step(a, c, do[at], B, B_error)
            overflow = overflow | alone.overflow
            if at and at % every == 0:
                if at // every < last:
                    E = _compose_reverse(a, scale, lanes, range(at, at + every), *end, B, B_error)
                end, B, B_error = (dS, E), torch.zeros_like(dS), Ellipsoids.none(len(S), S.shape[-2], S)
    return results[::-1], dS, (E.norm() + shift).masked_fill(overflow, torch.inf)


def _compose_reverse(
    a: Arithmetic, scale: float, lanes: Lanes, chunks: range, dS: Tensor, E: Ellipsoids, B: Tensor, B_error: Ellipsoids
) -> Ellipsoids:
    """The error of M̂ᵀ dŜ + B̂ of a segment, where dŜ = dS + E."""
    segment = Segment(a, dS)
    for at in chunks:
        segment.advance(lanes.chunk(a, scale, at), None)
    eye = torch.eye(dS.shape[-2], dtype=dS.dtype, device=dS.device).expand_as(segment.M)
    s, M_rows = dS.norm(dim=-1) + E.rows(), segment.M_error.rows()
    # ‖(error of M)ᵀ dS‖ is at most that of dSᵀ's columns along M's ellipsoids.
    passed = segment.M_error.along(dS.mT).norm(dim=-1) + segment.M_error.norm() * E.norm()
    product = times(segment.M.abs().mT, s) + (M_rows * s).sum(-1, keepdim=True) + B.norm(dim=-1)
    sums = (TF32_PRODUCT + a.sum_of(dS.shape[-2])) * product + FLUSHED
    of_sums = Ellipsoids.around(eye, sums)
    isotropic = Ellipsoids((passed.square()[:, None, None] * eye).unsqueeze(1))
    return E.move(segment.M.mT).add(isotropic, B_error, of_sums)
