"""The errors of the scan of the state from chunk to chunk, and those of the outputs."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.packing import CHUNK
from adjoint.ops.gated_delta.rule.bound.arithmetic import FLUSHED, NOISE, TF32_PRODUCT, Arithmetic
from adjoint.ops.gated_delta.rule.bound.chunk import Chunk, norms_of_sums, times
from adjoint.ops.gated_delta.rule.bound.ellipsoids import Ellipsoids
from adjoint.ops.gated_delta.rule.bound.overflow import matrix_may_overflow, may_overflow, sums_may_overflow


class ForwardStep(NamedTuple):
    """The results of a chunk's forward: exact values, and bounds for the computed ones.

    Attributes:
        S: the state at the beginning of the chunk.
        new_values: v'.
        state_size, state_rounding: the norms of the rows of the computed state, and of the error of rounding it.
        local_error: the norm of each token's error of v', without the error that comes with the state.
        error: the norm of each token's whole error of v'.
        size: the norm of each token's computed v'.
        residual_rounding, residual_error: the error of rounding r, and its error before that.
        through_T: the error of the product with T.
        overflow: whether a number of S, r, v' or P may overflow in storage, or a sum, [lanes].
    """

    S: Tensor
    new_values: Tensor
    state_size: Tensor
    state_rounding: Tensor
    local_error: Tensor
    error: Tensor
    size: Tensor
    residual_rounding: Tensor
    residual_error: Tensor
    through_T: Tensor
    overflow: Tensor


def forward_step(
    a: Arithmetic, c: Chunk, v: Tensor, S: Tensor, E: Ellipsoids
) -> tuple[ForwardStep, Tensor, Ellipsoids]:
    """Evaluates a chunk from a state and its error. Also gives the state at its end, with its error."""
    row = a.row(v.shape[-1]) + FLUSHED
    s = S.norm(dim=-1) + E.rows()
    dS = a.u * s + a.row(v.shape[-1])
    predicted = times(c.old.abs(), s + dS)
    values = c.beta * v.norm(dim=-1)
    residual_error = (c.over_keys + 8 * a.unit) * predicted + 4 * a.unit * values + row
    residual_error += c.beta * c.start_error * times(c.k.abs(), s + dS) + FLUSHED * (s + dS).sum(-1, keepdim=True)
    r = c.beta.unsqueeze(-1) * v - c.old @ S
    new_values = c.T @ r
    rho = r.norm(dim=-1) + E.along(c.old) + times(c.old.abs(), dS) + residual_error
    dr = a.u * rho + a.row(v.shape[-1])
    through_T = times(c.stored_error, rho + dr) + c.over_tokens * (times(c.T0.abs(), rho + dr) + rho) + row
    local_error = times(c.T0.abs(), dr) + times(c.T.abs(), residual_error) + through_T
    error = E.along(c.w) + times(c.w.abs(), dS) + local_error
    size = new_values.norm(dim=-1) + error
    # The next state: every source of error, with the columns through which it reaches the state.
    carried = through_T + (a.u + 4 * a.unit) * size + row
    k_abs = c.k.abs().mT
    sums = c.over_tokens * (c.over.unsqueeze(-1) * s + times(c.kt.abs(), size)) + row * (1 + c.k.abs().sum(-2))
    sums = sums + c.start_error[..., -1:] * s + times(k_abs, c.end_error * size) + FLUSHED * size.sum(-1, keepdim=True)
    columns = torch.cat([c.kt @ c.w, c.kt @ c.T0, c.kt @ c.T, c.kt, c.eye], -1)
    sizes = torch.cat([dS, dr, residual_error, carried, sums], -1)
    after = c.over[:, None, None] * S + c.kt @ new_values
    overflow = matrix_may_overflow(a, S, s) | matrix_may_overflow(a, r, rho) | matrix_may_overflow(a, new_values, size)
    overflow = overflow | may_overflow(a, c.largest_score).flatten(1).any(-1)
    read = v.norm(dim=-1) + times(c.k.abs(), s + dS)
    terms = torch.cat([times(c.T.abs(), read), s + dS + times(k_abs, size)], -1)
    overflow = overflow | sums_may_overflow(a, 1.0, terms).any(-1)
    step = ForwardStep(S, new_values, s, dS, local_error, error, size, dr, residual_error, through_T, overflow)
    return step, after, E.move(c.M).add(Ellipsoids.around(columns, sizes))


def output_bound(a: Arithmetic, c: Chunk, step: ForwardStep, E: Ellipsoids) -> tuple[Tensor, Tensor]:
    """The norms of the exact outputs of a chunk, and of their error before they are rounded."""
    row, scale = a.row(step.S.shape[-1]) + FLUSHED, abs(c.scale)
    seen = step.state_size + step.state_rounding
    out = c.far @ step.S + c.P @ step.new_values
    P_abs = c.P.abs()
    error = E.along(c.z) + times(c.z.abs(), step.state_rounding)
    error = error + times((c.P @ c.T0).abs(), step.residual_rounding) + times(P_abs, step.through_T)
    error = error + times((c.P @ c.T).abs(), step.residual_error)
    share = a.score + a.new_value + a.score * a.new_value + c.over_tokens
    error = error + times((share + a.u**2) * P_abs + (1 + a.score) * c.P_error, step.size)
    error = error + (a.tiny * (1 + scale) + NOISE * scale * c.q_norm) * step.size.sum(-1, keepdim=True)
    error = error + (c.over_keys + c.over_tokens + 8 * a.unit) * times(c.far.abs(), seen) + row * (1 + P_abs.sum(-1))
    error = error + scale * c.start_error * times(c.q.abs(), seen)
    terms = times(c.q.abs(), seen) + times(c.qk_abs, 1 + step.size)
    error = error.masked_fill(sums_may_overflow(a, c.scale, terms), torch.inf)
    return out.norm(dim=-1), error


class ForwardErrors(NamedTuple):
    """The results of a chunk's forward that its gradients need besides the step.

    Attributes:
        state_error: a bound of ‖E‖_F.
        key_error: the error of (S decayed to a token)ᵀ k, for every token.
        stored: the error of v' in memory, without the error that comes with the state.
        difference: v − S_tᵀk, where S_t is the state decayed to token t.
        residual, S_norm: the norms of `difference` and of S_t.
        shift, shift_after: how far the rounding of normalised keys moves S_t, and the state after the token.
    """

    step: ForwardStep
    state_error: Tensor
    key_error: Tensor
    stored: Tensor
    difference: Tensor
    residual: Tensor
    S_norm: Tensor
    shift: Tensor
    shift_after: Tensor


class Lanes(NamedTuple):
    """Tokens of sequences of one length, [chunks, lanes, 64, ...], padded with tokens that do nothing."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def chunks(self) -> int:
        return len(self.q)

    def chunk(self, a: Arithmetic, scale: float, at: int) -> Chunk:
        return Chunk(a, scale, self.q[at], self.k[at], self.g[at], self.beta[at])


class Segment:
    """The map of a segment from a state S to M S + B, with the errors of M and B. They begin as the identity and 0."""

    def __init__(self, a: Arithmetic, S: Tensor) -> None:
        """Args: S: a state, for its size."""
        lanes, K, _ = S.shape
        self.a = a
        eye = torch.eye(K, dtype=S.dtype, device=S.device)
        self.M, self.M_error = eye.expand(lanes, K, K), Ellipsoids.none(lanes, K, S)
        self.B, self.B_error = torch.zeros_like(S), Ellipsoids.none(lanes, K, S)
        self.overflow = torch.zeros(lanes, dtype=torch.bool, device=S.device)

    def advance(self, c: Chunk, v: Tensor | None) -> None:
        """Advances by a chunk; without values only M."""
        nothing = c.k.new_zeros(c.k.shape)
        _, self.M, self.M_error = forward_step(self.a, c, nothing, self.M, self.M_error)
        if v is not None:
            step, self.B, self.B_error = forward_step(self.a, c, v, self.B, self.B_error)
            self.overflow = self.overflow | step.overflow

    def compose(self, S: Tensor, E: Ellipsoids) -> Ellipsoids:
        """The error of M̂ Ŝ + B̂, where Ŝ = S + E: M E, the error of M times Ŝ, and those of B and of the product."""
        size = Ellipsoids((S @ S.mT).unsqueeze(1)).norm() + E.norm()
        s = S.norm(dim=-1) + E.rows()
        product = times(self.M.abs(), s) + self.M_error.rows() * s.norm(dim=-1, keepdim=True)
        product = product + self.B.norm(dim=-1) + self.B_error.rows()
        sums = (TF32_PRODUCT + self.a.sum_of(self.M.shape[-1])) * product + FLUSHED
        eye = torch.eye(self.M.shape[-1], dtype=self.M.dtype, device=self.M.device)
        of_sums = Ellipsoids.around(eye.expand_as(self.M), sums)
        return E.move(self.M).add(self.M_error.scale(size), self.B_error, of_sums)


@dataclass
class Forward:
    """The bounds of a forward over all chunks: outputs, the final state, and states between segments.

    Attributes:
        out, out_error: the norms of the exact outputs, and of their error before rounding, [chunks, lanes, 64].
        S, error: the final state, and a bound of its error.
        errors: the results that the gradients of each chunk need, if there are to be any.
        states: bounds of the error of the state at the start of each segment but the first.
        overflow: whether numbers of a chunk, or of an earlier one, may have overflowed in storage, [chunks, lanes].
    """

    out: list[Tensor] = field(default_factory=list)
    out_error: list[Tensor] = field(default_factory=list)
    errors: list[ForwardErrors] = field(default_factory=list)
    states: dict[int, Tensor] = field(default_factory=dict)
    overflow: list[Tensor] = field(default_factory=list)
    S: Any = None
    error: Any = None


def forward(a: Arithmetic, scale: float, lanes: Lanes, S: Tensor, length: int, gradients: bool) -> Forward:
    """Evaluates every chunk of a sequence of `length` tokens, first to last."""
    result, E = Forward(), Ellipsoids.none(len(S), S.shape[-2], S)
    shift = S.new_zeros(len(S))  # the shift by the rounding of normalised keys
    every = a.segment // CHUNK if a.segment and length > a.segment else 0
    segment, start = None, (S, E)
    overflow = torch.zeros(len(S), dtype=torch.bool, device=S.device)
    for at in range(lanes.chunks):
        if every and at % every == 0:
            if segment is not None:
                E, overflow = segment.compose(*start), overflow | segment.overflow
            segment, start = Segment(a, S), (S, E)
        if at and at % (packing.SEGMENT // CHUNK) == 0:
            state_error = (E.norm() + shift).masked_fill(overflow, torch.inf)
            result.states[at // (packing.SEGMENT // CHUNK)] = state_error
        c, v = lanes.chunk(a, scale, at), lanes.v[at]
        step, after, after_error = forward_step(a, c, v, S, E)
        out, error = output_bound(a, c, step, E)
        if a.normalized or gradients:
            errors = _forward_errors(a, c, v, step, E, shift)
            shift = errors.shift_after[..., -1]
            S_after = errors.S_norm + c.beta * c.k_norm * errors.residual
            error = error + abs(scale) * c.q_norm * ((1 + a.normalized) * errors.shift_after + a.normalized * S_after)
            result.errors.append(errors)
        overflow = overflow | step.overflow
        result.out.append(out)
        result.out_error.append(error.masked_fill(overflow.unsqueeze(-1), torch.inf))
        result.overflow.append(overflow)
        if segment is not None:
            segment.advance(c, v)
        S, E = after, after_error
    result.S, result.error = S, (E.norm() + shift).masked_fill(overflow, torch.inf)
    return result


def _forward_errors(
    a: Arithmetic, c: Chunk, v: Tensor, step: ForwardStep, E: Ellipsoids, shift: Tensor
) -> ForwardErrors:
    """The results that gradients need, with the errors of normalised keys.

    An error ‖δk‖ ≤ ρ‖k‖ of a key adds β (δk rᵀ − k (S_tᵀ δk)ᵀ) to the state, where r = v − S_tᵀk. The rule with the
    rounded keys does not amplify it.
    """
    stored = step.local_error + a.u * step.size + a.row(v.shape[-1])
    strict = c.D.tril(-1)
    grams = c.kk * strict
    reach = c.start.unsqueeze(-1) * c.k - grams @ c.w
    key_error = E.along(reach) + times(reach.abs(), step.state_rounding) + times(grams.abs(), stored)
    difference = v - c.start.unsqueeze(-1) * (c.k @ step.S) - grams @ step.new_values
    residual = difference.norm(dim=-1)
    S_norm = norms_of_sums(c.start, step.S, strict, c.k, step.new_values)
    source = c.beta * a.normalized * c.k_norm * (residual + (1 + a.normalized) * S_norm)
    carried_shift = c.start * shift.unsqueeze(-1)
    before, after = carried_shift + times(strict, source), carried_shift + times(c.D, source)
    return ForwardErrors(step, E.norm(), key_error, stored, difference, residual, S_norm, before, after)
