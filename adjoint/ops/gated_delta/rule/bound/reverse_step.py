"""The errors of one chunk of the reverse scan of the state's gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.ops.gated_delta.rule.bound.arithmetic import FLUSHED, Arithmetic
from adjoint.ops.gated_delta.rule.bound.chunk import Chunk, times
from adjoint.ops.gated_delta.rule.bound.ellipsoids import Ellipsoids
from adjoint.ops.gated_delta.rule.bound.overflow import matrix_may_overflow, may_overflow, sums_may_overflow


class ReverseStep(NamedTuple):
    """The results of a chunk's reverse scan: exact values, and bounds for the computed ones.

    Attributes:
        dS: the gradient of the state at the end of the chunk.
        dS_size, dS_rounding: the norms of the rows of the computed dS, and of the error of rounding it once.
        Y: the adjoint of β ⊙ (v − Sᵀk).
        local_error, error, size: those of Y before it is rounded, as those of v' in `ForwardStep`.
        overflow: whether a number of dS, Y, P, scale·e^G do, and of R or of P T and Tᵀ Pᵀ do, may overflow in storage,
            or a sum, [lanes].
    """

    dS: Tensor
    Y: Tensor
    dS_size: Tensor
    dS_rounding: Tensor
    local_error: Tensor
    error: Tensor
    size: Tensor
    overflow: Tensor


def reverse_step(
    a: Arithmetic, c: Chunk, do: Tensor, dS: Tensor, E: Ellipsoids
) -> tuple[ReverseStep, Tensor, Ellipsoids]:
    """Evaluates a chunk from the gradient of the state at its end, with its error. Also gives those at its beginning.

    Y is Tᵀ R with R = k̃ dS + Pᵀ do, or W dS + Tᵀ Pᵀ do.
    """
    row, tiny = a.row(do.shape[-1]) + FLUSHED, 2 * a.tiny * bool(a.storage)
    two = a.u**2  # the share of a number that two parts lose
    keys, tokens = c.over_keys + a.gradient_product, c.over_tokens + a.gradient_product
    T_abs, P_abs, kt_abs, upstream = c.T.abs(), c.P.abs(), c.kt.abs(), do.norm(dim=-1)
    s = dS.norm(dim=-1) + E.rows()
    T_error = c.T_error + (3 * two + tokens) * T_abs + tiny
    of_scores = c.P.mT @ do
    if a.without_W:
        R = c.kt.mT @ dS + of_scores
        P_error = (two + tokens) * P_abs + c.P_error + tiny
        R_error = times(P_error.mT, upstream) + (two + keys) * times(kt_abs.mT, s)
        R_error = R_error + c.end_error * times(c.k.abs(), s) + row + FLUSHED * s.sum(-1, keepdim=True)
        R_size = R.norm(dim=-1) + E.along(c.kt.mT) + R_error
        Y = c.T.mT @ R
        local_error = times(T_error.mT, R_size) + times(T_abs.mT, R_error + row) + row
        overflow = matrix_may_overflow(a, R, R_size)
    else:
        local = c.T.mT @ of_scores
        Y = c.W @ dS + local
        W_error = T_error.mT @ kt_abs.mT + T_abs.mT @ (c.end_error.unsqueeze(-1) * c.k.abs())
        W_error = a.u * c.W.abs() + (1 + a.u) * W_error + a.tiny + FLUSHED
        P_error = (3 * two + tokens) * P_abs + c.P_error + tiny
        slip = times(T_error.mT, times(P_abs.mT, upstream)) + times(T_abs.mT, times(P_error.mT, upstream))
        local_error = a.u * local.norm(dim=-1) + (1 + a.u) * slip + row
        local_error = local_error + times(W_error, s) + (two + keys + tokens) * times(T_abs.mT, times(kt_abs.mT, s))
        P_T = (c.P @ c.T).abs() + P_error @ T_abs + P_abs @ T_error
        overflow = matrix_may_overflow(a, local, local.norm(dim=-1) + local_error)
        overflow = overflow | may_overflow(a, P_T).flatten(1).any(-1)
    local_error = local_error + row * c.W.abs().sum(-1)
    error = E.along(c.W) + local_error
    size = Y.norm(dim=-1) + error
    sums = tokens * (c.over.unsqueeze(-1) * s + times(c.old.abs().mT, size)) + c.start_error[..., -1:] * s
    sums = sums + (two + tokens + 8 * a.unit) * times(c.far.abs().mT, upstream)
    sums = sums + times(c.k.abs().mT, c.beta * c.start_error * size)
    sums = sums + abs(c.scale) * times(c.q.abs().mT, c.start_error * upstream)
    sums = sums + row * (1 + c.k.abs().sum(-2) + c.q.abs().sum(-2)) + FLUSHED * (size + upstream).sum(-1, keepdim=True)
    columns = torch.cat([c.old.mT, c.eye], -1)
    sizes = torch.cat([local_error + (a.u + 8 * a.unit) * size + row, sums], -1)
    overflow = overflow | matrix_may_overflow(a, dS, s) | matrix_may_overflow(a, Y, size)
    far = abs(c.scale) * (c.start + c.start_error).unsqueeze(-1) * do.abs()
    overflow = overflow | may_overflow(a, torch.cat([c.largest_score, far], -1)).flatten(1).any(-1)
    read = times(c.k.abs(), s) + times(c.qk_abs.mT, upstream)
    terms = torch.cat([times(T_abs.mT, read), s + times(c.q.abs().mT, upstream) + times(c.k.abs().mT, size)], -1)
    overflow = overflow | sums_may_overflow(a, c.scale, terms).any(-1)
    step = ReverseStep(dS, Y, s, a.u * s + a.row(do.shape[-1]), local_error, error, size, overflow)
    before = c.over[:, None, None] * dS + c.far.mT @ do - c.old.mT @ Y
    return step, before, E.move(c.M.mT).add(Ellipsoids.around(columns, sizes))
