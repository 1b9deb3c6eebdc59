"""The gradients of a chunk's tokens: products of what both scans left, and of their errors.

S_t is the state decayed to token t, dS_t the gradient of the state after it, both as the sums that a chunk's products
amount to:

    S_t  = e^{G_t} S + Σ_{j<t} D_tj k_j v'_jᵀ
    dS_t = e^{Γ−G_t} dS + Σ_{i≥t} D_it scale·q_i do_iᵀ − Σ_{i>t} β_i D_it k_i Y_iᵀ

    dq = scale·S_t,after do,   dk = dS_t v' − β S_t Y,   dv = β Y,   dβ = Y·(v − S_tᵀk),   dg = ⟨S_t, dS_t − β k Yᵀ⟩
"""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.ops.gated_delta.rule.bound.arithmetic import FLUSHED, NOISE, Arithmetic
from adjoint.ops.gated_delta.rule.bound.chunk import Chunk, norms_of_sums, times
from adjoint.ops.gated_delta.rule.bound.forward import ForwardErrors
from adjoint.ops.gated_delta.rule.bound.overflow import Lost, may_overflow, sums_may_overflow
from adjoint.ops.gated_delta.rule.bound.reverse_step import ReverseStep


class Gradients(NamedTuple):
    """The exact gradients of a chunk (for dv their norms), and bounds of their errors before they are rounded.

    `dq_terms` and `dk_terms` are the norms of the sums in dq and dk with the magnitudes of their terms.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dq_error: Tensor
    dk_error: Tensor
    dv_error: Tensor
    dg_error: Tensor
    dbeta_error: Tensor
    dq_terms: Tensor
    dk_terms: Tensor


def outer(left: Tensor, right: Tensor) -> Tensor:
    """left_i·right_j of each lane."""
    return left.unsqueeze(-1) * right.unsqueeze(-2)


class TokenGradients:
    """The errors of a chunk's gradients, from the results of the forward and of the reverse scan (`back`).

    Args:
        dS_error: a bound of the error of dS.
        shift: how far the rounding of normalised q and k moves dS, one number for each lane.
    """

    def __init__(
        self, a: Arithmetic, c: Chunk, v: Tensor, do: Tensor, forward: ForwardErrors, back: ReverseStep,
        dS_error: Tensor, shift: Tensor,
    ) -> None:  # fmt: skip
        self.a, self.c, self.v, self.do, self.forward, self.back = a, c, v, do, forward, back
        step = forward.step
        self.S, self.dS, self.new, self.Y = step.S, back.dS, step.new_values, back.Y
        self.strict = c.D.tril(-1)
        row = a.row(v.shape[-1])
        # v' and Y in memory: their sizes and errors, and the errors without those that come with a state.
        stored_Y = back.local_error + a.u * back.size + row
        self.Y_error, self.new_error = back.error + a.u * back.size + row, step.error + a.u * step.size + row
        self.Y_norm, self.new_norm, self.upstream = (x.norm(dim=-1) for x in (self.Y, self.new, do))
        self.Y_size, self.new_size = self.Y_norm + self.Y_error, self.new_norm + self.new_error
        self.all_Y, self.all_new = (x.sum(-1, keepdim=True) for x in (self.Y_size, self.new_size))
        self.S_rows, self.dS_rows = step.state_size + step.state_rounding, back.dS_size + back.dS_rounding
        # S_t and dS_t, before and after the token's own update.
        from_start = c.start * (forward.state_error + step.state_rounding.norm(dim=-1)).unsqueeze(-1)
        self.S_error = from_start + times(self.strict, c.k_norm * forward.stored)
        self.S_after_error = from_start + times(c.D, c.k_norm * forward.stored)
        to_end = c.end * (dS_error + back.dS_rounding.norm(dim=-1)).unsqueeze(-1)
        self.dS_error = to_end + times(self.strict.mT, c.beta * c.k_norm * stored_Y)
        self.dS_before_error = to_end + times(c.D.mT, c.beta * c.k_norm * stored_Y)
        left, right = torch.cat([c.scale * c.q, -c.beta.unsqueeze(-1) * c.k], -2), torch.cat([do, self.Y], -2)
        self.dS_before = norms_of_sums(c.end, self.dS, torch.cat([c.D.mT, c.D.mT], -1), left, right)
        self.dS_after = self.dS_before + c.beta * c.k_norm * self.Y_norm
        self._round_matrices()
        self._shift(shift)

    def _round_matrices(self) -> None:
        """Rounds M and E = −β N: their terms, and their errors before the products for dq and dk."""
        a, c = self.a, self.c
        sums = a.sum_of(self.v.shape[-1]) + c.over_keys + c.over_tokens + 8 * a.unit
        self.products = sums + 3 * a.gradient_product
        D = c.D + c.decay_error
        self.decays = c.decay_error / D.clamp_min(FLUSHED)
        M = (self.do @ self.new.mT).abs() + outer(self.upstream, self.new_error)
        N = (self.Y @ self.new.mT).abs() + outer(self.Y_error, self.new_size) + outer(self.Y_norm, self.new_error)
        self.M_terms = abs(c.scale) * D * outer(self.upstream, self.new_size)
        self.N_terms = D.tril(-1) * outer(self.Y_size, self.new_size)
        share, tiny = self.products + self.decays, 2 * a.tiny * bool(a.storage)
        self.lost_M = (a.u * abs(c.scale) * D * M + share * self.M_terms + tiny).tril()
        self.lost_E = (c.beta.unsqueeze(-1) * (a.u * D * N + share * self.N_terms) + tiny).tril(-1)
        self.row_tiny = a.tiny * bool(a.row_product)  # the error of rounding a number of a row below the normal range
        self.largest_M = (abs(c.scale) * D * M + share * self.M_terms).tril()
        self.largest_E = (c.beta.unsqueeze(-1) * (D * N + share * self.N_terms)).tril(-1)

    def lost(self, forward_overflow: Tensor, reverse_overflow: Tensor) -> Lost:
        """The gradients that overflows may reach: those of M, E and rows of this chunk, of its sums, or of a scan."""
        a, c = self.a, self.c
        M, E = may_overflow(a, self.largest_M), may_overflow(a, self.largest_E)
        sums = self._sums_may_overflow()
        of_scans = (forward_overflow | reverse_overflow | sums).unsqueeze(-1).expand_as(c.beta)
        dq, dk = of_scans | M.any(-1), of_scans | M.any(-2) | E.any(-1) | E.any(-2)
        dg = dbeta = of_scans
        if a.row_product:
            products = (1 + self.products) * c.start + c.start_error
            do_S, Y_S = (products.unsqueeze(-1) * x for x in (self._rows_of_do_S(), self._rows_of_Y_S()))
            new_dS = ((1 + self.products) * c.end + c.end_error).unsqueeze(-1) * self._rows_of_new_dS()
            of_keys = may_overflow(a, Y_S).any(-1)
            pairs = (self.largest_M * c.qk_abs + self.largest_E * c.kk_abs).tril(-1)
            rows = may_overflow(a, torch.cat([abs(c.scale) * do_S, new_dS, pairs], -1)).any(-1) | of_keys
            dg, dbeta = dg | rows.any(-1, keepdim=True), dbeta | of_keys
        return Lost(dq, dk, reverse_overflow.unsqueeze(-1).expand_as(c.beta), dg, dbeta)

    def _sums_may_overflow(self) -> Tensor:
        """Whether the sums for dq, dk, dβ or dg of one of the chunk's tokens may, [lanes]."""
        c, S, dS = self.c, self.S_rows.norm(dim=-1, keepdim=True), self.dS_rows.norm(dim=-1, keepdim=True)
        scaled, q, k = max(1.0, abs(c.scale)) * self.upstream, 1 + c.q_norm, 1 + c.k_norm
        of_outputs = scaled.sum(-1, keepdim=True) * (S + (k * self.new_size).sum(-1, keepdim=True)) * q
        read = S + (k * self.new_size).sum(-1, keepdim=True) + self.v.norm(dim=-1)
        of_values = (self.Y_size * k).sum(-1, keepdim=True) * read * k + self.new_size * dS * k
        return sums_may_overflow(self.a, 1.0, of_outputs + of_values + S * dS).any(-1)

    def _shift(self, shift: Tensor) -> None:
        """The errors that normalised q and k add to dS_t, Y and v − S_tᵀk, and to the dS of the previous chunk."""
        c, share, S_norm = self.c, self.a.normalized, self.forward.S_norm
        source = c.beta * share * c.k_norm * ((1 + share) * self.Y_norm + self.dS_after)
        from_q = abs(c.scale) * share * c.q_norm * self.upstream
        self.dS_shift = c.end * shift.unsqueeze(-1) + times(c.D.mT, from_q) + times(self.strict.mT, source)
        self.dS_before_shift = self.dS_shift + source
        self.Y_shift = c.k_norm * (self.dS_shift + share * (self.dS_after + self.dS_shift))
        self.residual_shift = c.k_norm * (self.forward.shift + share * (S_norm + self.forward.shift))
        self.shift = c.over * shift + (c.start * (from_q + source)).sum(-1)

    # ------------------------------------------------------------------------------------------ errors

    def dq_error(self) -> Tensor:
        c = self.c
        from_S = self.products * c.start + c.start_error
        state = self.S_after_error + self.forward.shift_after + from_S * self.S_rows.norm(dim=-1, keepdim=True)
        error = abs(c.scale) * self.upstream * (state + NOISE * self.all_new)
        return error + times(self.lost_M, c.k_norm)

    def dk_error(self) -> Tensor:
        c, forward = self.c, self.forward
        error = self.dS_error * self.new_size + self.dS_after * self.new_error
        error = error + c.beta * (self.S_error * self.Y_size + forward.S_norm * self.Y_error)
        error = error + times(self.lost_M.mT, c.q_norm) + times(self.lost_E + self.lost_E.mT, c.k_norm)
        from_dS, from_S = self.products * c.end + c.end_error, self.products * c.start + c.start_error
        error = error + from_dS * self.dS_rows.norm(dim=-1, keepdim=True) * self.new_size
        error = error + from_S * c.beta * self.S_rows.norm(dim=-1, keepdim=True) * self.Y_size
        noise = self.all_Y * self.all_new + self.dS_after * forward.residual + forward.S_norm * self.Y_norm
        shift = self.dS_shift * (forward.residual + self.residual_shift) + self.dS_after * self.residual_shift
        shift = shift + forward.shift * (self.Y_norm + self.Y_shift) + forward.S_norm * self.Y_shift
        return error + NOISE * noise + c.beta * shift

    def dv_error(self) -> Tensor:
        return self.c.beta * (self.Y_error + 4 * self.a.unit * self.Y_size + self.Y_shift + NOISE * self.all_Y)

    def dbeta_error(self) -> Tensor:
        c, forward = self.c, self.forward
        error = self.Y_error * forward.residual + self.Y_size * forward.key_error
        along = times(c.k.abs(), self.S_rows)
        error = error + self.Y_size * (self.products * (self.v.norm(dim=-1) + c.start * along) + c.start_error * along)
        error = error + (self.N_terms * (self.products + self.decays) * c.kk_abs).sum(-1)
        error = error + self.a.row_product * c.start * (c.k.abs() * self._rows_of_Y_S()).sum(-1)
        error = error + self.row_tiny * c.k.abs().sum(-1)
        shift = self.Y_shift * (forward.residual + self.residual_shift) + self.Y_norm * self.residual_shift
        return error + shift + NOISE * self.all_Y * (forward.residual + self.all_new)

    def dg_error(self) -> Tensor:
        """The error of ⟨S_t, dS_t − β k Yᵀ⟩, computed as sums of the products with a decay that contains token t."""
        a, c, forward = self.a, self.c, self.forward
        error = self.S_error * self.dS_before + (forward.S_norm + self.S_error) * self.dS_before_error
        error = error + self.dS_before_shift * (forward.S_norm + forward.shift) + self.dS_before * forward.shift
        # Kernels for Hopper add rows and columns of all pairs of tokens, and pairs without the decay cancel.
        pairs = self.M_terms * c.qk_abs + c.beta.unsqueeze(-1) * self.N_terms * c.kk_abs
        pairs = ((self.products + self.decays + a.u**2) * pairs + self.row_tiny).tril(-1)
        error = error + 2 * pairs.sum((-1, -2)).unsqueeze(-1)
        k_abs, q_abs = c.k.abs(), c.q.abs()
        since = abs(c.scale) * self.upstream * times(q_abs, self.S_rows)
        since = (since + c.beta * self.Y_size * times(k_abs, self.S_rows)) * (self.products * c.start + c.start_error)
        rows = abs(c.scale) * (q_abs * self._rows_of_do_S()).sum(-1) + c.beta * (k_abs * self._rows_of_Y_S()).sum(-1)
        since = since + a.row_product * c.start * rows
        since = since + self.row_tiny * (q_abs.sum(-1) + c.beta * k_abs.sum(-1))
        until = times(k_abs, self.dS_rows) * self.new_size * (self.products * c.end + c.end_error)
        until = until + a.row_product * c.end * (k_abs * self._rows_of_new_dS()).sum(-1)
        until = until + self.row_tiny * k_abs.sum(-1)
        error = error + since.flip(-1).cumsum(-1).flip(-1) + until.cumsum(-1)
        over_state = a.sum_of(self.v.shape[-1] + c.k.shape[-1]) + a.gradient_product
        lost = over_state * c.over.unsqueeze(-1) + c.start_error[..., -1:]
        error = error + lost * (self.S_rows * self.dS_rows).sum(-1, keepdim=True)
        # Of three factors and a decay the product of some may underflow, and the others are large.
        S, dS = (1 + x.sum(-1, keepdim=True) for x in (self.S_rows, self.dS_rows))
        terms = (abs(c.scale) * self.upstream * (1 + q_abs.sum(-1)) + self.Y_size) * S + self.new_size * dS
        pairs = (abs(c.scale) * self.upstream + self.Y_size).sum(-1, keepdim=True) * self.new_size.sum(-1, keepdim=True)
        return error + FLUSHED * (S + dS + terms.sum(-1, keepdim=True) + pairs)

    def _rows_of_Y_S(self) -> Tensor:
        """The magnitudes |Ŝ Ŷ_t|, number by number."""
        rows = (self.Y @ self.S.mT).abs() + outer(self.Y_error, self.S_rows)
        return rows + outer(self.Y_norm, self.S_rows - self.S.norm(dim=-1))

    def _rows_of_do_S(self) -> Tensor:
        return (self.do @ self.S.mT).abs() + outer(self.upstream, self.S_rows - self.S.norm(dim=-1))

    def _rows_of_new_dS(self) -> Tensor:
        rows = (self.new @ self.dS.mT).abs() + outer(self.new_error, self.dS_rows)
        return rows + outer(self.new_norm, self.dS_rows - self.dS.norm(dim=-1))

    def dq_terms(self) -> Tensor:
        c = self.c
        of_S = abs(c.scale) * self.upstream * c.start * self.S_rows.norm(dim=-1, keepdim=True)
        return of_S + times(self.M_terms, c.k_norm)

    def dk_terms(self) -> Tensor:
        c = self.c
        E = c.beta.unsqueeze(-1) * self.N_terms
        of_tokens = times(self.M_terms.mT, c.q_norm) + times(E + E.mT, c.k_norm)
        of_dS = c.end * self.dS_rows.norm(dim=-1, keepdim=True) * self.new_size
        return of_tokens + of_dS + c.beta * c.start * self.S_rows.norm(dim=-1, keepdim=True) * self.Y_size

    # ------------------------------------------------------------------------------------------- values

    def all(self, forward_overflow: Tensor, reverse_overflow: Tensor) -> Gradients:
        """All gradients with their bounds.

        Args:
            forward_overflow, reverse_overflow: whether numbers of the scans, up to this chunk, may have overflowed.
        """
        c, S, dS, new, Y, do = self.c, self.S, self.dS, self.new, self.Y, self.do
        M = c.scale * (do @ new.mT) * c.D
        E = -c.beta.unsqueeze(-1) * (Y @ new.mT) * self.strict
        do_S, Y_S, new_dS = (x.unsqueeze(-1) for x in (c.scale * c.start, c.beta * c.start, c.end))
        do_S, Y_S, new_dS = do_S * (do @ S.mT), Y_S * (Y @ S.mT), new_dS * (new @ dS.mT)
        dq = do_S + M @ c.k
        dk = M.mT @ c.q + new_dS - Y_S + (E + E.mT) @ c.k
        passing = (M * c.qk + E * c.kk).tril(-1).flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
        since, until = (do_S * c.q).sum(-1) - (Y_S * c.k).sum(-1), (new_dS * c.k).sum(-1)
        dg = passing + since.flip(-1).cumsum(-1).flip(-1) + until.cumsum(-1) - until
        dg = dg + (c.over * (S * dS).sum((-1, -2))).unsqueeze(-1)
        dbeta = (Y * self.forward.difference).sum(-1)
        errors = (self.dq_error(), self.dk_error(), self.dv_error(), self.dg_error(), self.dbeta_error())
        lost = self.lost(forward_overflow, reverse_overflow)
        errors = tuple(x.masked_fill(where, torch.inf) for x, where in zip(errors, lost, strict=True))  # type: ignore
        return Gradients(dq, dk, c.beta * self.Y_norm, dg, dbeta, *errors, self.dq_terms(), self.dk_terms())
