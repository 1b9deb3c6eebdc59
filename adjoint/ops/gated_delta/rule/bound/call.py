"""The bounds of a whole call, from the inputs of the reference."""

from dataclasses import dataclass

import torch
from torch import Tensor

from adjoint.core.guarantee import without_nan
from adjoint.ops.gated_delta import packing, reference
from adjoint.ops.gated_delta.packing import CHUNK, saved_states
from adjoint.ops.gated_delta.rule.bound.arithmetic import FLUSHED, SLACK, Arithmetic, rounding, unit_below_normal
from adjoint.ops.gated_delta.rule.bound.backward import backward
from adjoint.ops.gated_delta.rule.bound.expected import expected_errors
from adjoint.ops.gated_delta.rule.bound.forward import Lanes, forward
from adjoint.ops.gated_delta.rule.bound.gradients import Gradients
from adjoint.ops.gated_delta.rule.bound.overflow import sums_may_overflow


def _lanes(x: Tensor, heads: int) -> Tensor:
    """[rows, T, H, ...] -> [chunks, rows × heads, 64, ...]; key heads are repeated for their value heads."""
    x = x.repeat_interleave(heads // max(1, x.shape[2]), 2).transpose(1, 2).flatten(0, 1)
    missing = -x.shape[1] % CHUNK
    x = torch.cat([x, x.new_zeros(x.shape[0], missing, *x.shape[2:])], 1)
    return x.unflatten(1, (-1, CHUNK)).transpose(0, 1)


def _tokens(x: list[Tensor], rows: int, length: int) -> Tensor:
    """[chunks] of [rows × heads, 64, ...] -> [rows, T, H, ...]"""
    return torch.cat(x, 1)[:, :length].unflatten(0, (rows, -1)).transpose(1, 2)


@dataclass(frozen=True)
class Call:
    """A call of the rule in float64, cut into groups of sequences of one length."""

    arithmetic: Arithmetic
    scale: float
    normalize: bool

    def _inputs(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """q and k as the products take them: normalised if the call asks for it."""
        if not self.normalize:
            return q, k
        q, k = (self._normalized(x) for x in (q, k))
        if self.arithmetic.storage:
            q, k = (x.to(self.arithmetic.storage).double() for x in (q, k))
        return q, k

    def _normalized(self, x: Tensor) -> Tensor:
        """x over its length; infinite where the sum of its squares has no place, so that nothing is promised."""
        lost = sums_may_overflow(self.arithmetic, 1.0, x.square().sum(-1, keepdim=True))
        return reference.normalized(x).masked_fill(lost, torch.inf)

    def _groups(self, x: Tensor, cu_seqlens: Tensor | None) -> list[tuple[slice, slice, slice]]:
        """The rows, tokens and numbers of the sequences that are evaluated together."""
        if cu_seqlens is None:
            return [(slice(0, len(x)), slice(0, x.shape[1]), slice(0, len(x)))]
        cut = reference.sequences(1, x.shape[1], cu_seqlens)
        return [(slice(0, 1), tokens, slice(n, n + 1)) for n, (_, tokens) in enumerate(cut)]

    def forward(
        self, kinds: dict[str, torch.dtype], q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Bounds of the norm of the error of every token's output, [B, T, H], and of every state."""
        a, (rows, time, heads, V), K = self.arithmetic, v.shape, q.shape[-1]
        q, k = self._inputs(q, k)
        groups = self._groups(v, cu_seqlens)
        number = groups[-1][2].stop if groups else 0
        bounds = {
            "o": v.new_zeros(rows, time, heads),
            "final_state": v.new_zeros(number, heads),
            "saved": v.new_zeros(saved_states(rows * time), heads),
        }
        for of_rows, tokens, numbers in groups:
            length, S = tokens.stop - tokens.start, _states(initial_state, numbers, heads, K, V, v)
            if not length or 0 in (rows, heads, K, V):
                continue
            lanes = Lanes(*(_lanes(x[of_rows, tokens], heads) for x in (q, k, v, g, beta)))
            result = forward(a, self.scale, lanes, S, length, gradients=False)
            out, error = (_tokens(x, of_rows.stop - of_rows.start, length) for x in (result.out, result.out_error))
            bounds["o"][of_rows, tokens] = _rounded(kinds["o"], a.wide, error, out, V)
            bounds["final_state"][numbers] = SLACK * result.error.unflatten(0, (-1, heads)) + FLUSHED
            for segment, bound in result.states.items():
                for number, of_sequence in enumerate(bound.unflatten(0, (-1, heads))):
                    begin = (of_rows.start + number) * time + tokens.start
                    bounds["saved"][begin // packing.SEGMENT + segment - 1] = SLACK * of_sequence + FLUSHED
        return {name: without_nan(bound) for name, bound in bounds.items()}

    def expected(
        self,
        kinds: dict[str, torch.dtype],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        initial_state: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Expected errors of the outputs and final states, in the norms of their bounds."""
        (rows, time, heads, V), K = v.shape, q.shape[-1]
        q, k = self._inputs(q, k)
        groups = self._groups(v, cu_seqlens)
        errors = {"o": v.new_zeros(rows, time, heads)}
        errors["final_state"] = v.new_zeros(groups[-1][2].stop if groups else 0, heads)
        for of_rows, tokens, numbers in groups:
            length, S = tokens.stop - tokens.start, _states(initial_state, numbers, heads, K, V, v)
            if not length or 0 in (rows, heads, K, V):
                continue
            lanes = Lanes(*(_lanes(x[of_rows, tokens], heads) for x in (q, k, v, g, beta)))
            unit = rounding(kinds["o"], self.arithmetic.wide)
            outputs, state = expected_errors(self.arithmetic, self.scale, lanes, S, unit)
            errors["o"][of_rows, tokens] = _tokens(outputs, of_rows.stop - of_rows.start, length)
            errors["final_state"][numbers] = state.unflatten(0, (-1, heads))
        return errors

    def backward(
        self, kinds: dict[str, torch.dtype], do: Tensor | None, dfinal_state: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor | None = None, cu_seqlens: Tensor | None = None,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Bounds of the norm of the error of every token's gradients, and of the gradient of every initial state."""
        a, (rows, time, heads, V), (key_heads, K) = self.arithmetic, v.shape, q.shape[2:]
        do = torch.zeros_like(v) if do is None else do
        lengths = [1 / (x.square().sum(-1) + reference.EPSILON).sqrt() for x in (q, k)] if self.normalize else None
        q, k = self._inputs(q, k)
        groups = self._groups(v, cu_seqlens)
        number = groups[-1][2].stop if groups else 0
        bounds = {name: v.new_zeros(rows, time, key_heads) for name in ("dq", "dk")}
        bounds |= {name: v.new_zeros(rows, time, heads) for name in ("dv", "dg", "dbeta")}
        bounds["dinitial_state"] = v.new_zeros(number, heads)
        for of_rows, tokens, numbers in groups:
            length, S = tokens.stop - tokens.start, _states(initial_state, numbers, heads, K, V, v)
            dS = _states(dfinal_state, numbers, heads, K, V, v)
            if not length or 0 in (rows, heads, K, V):
                continue
            lanes = Lanes(*(_lanes(x[of_rows, tokens], heads) for x in (q, k, v, g, beta)))
            upstream = _lanes(do[of_rows, tokens], heads)
            chunks, _, dS_error = backward(a, self.scale, lanes, upstream, S, dS, length)
            bounds["dinitial_state"][numbers] = SLACK * dS_error.unflatten(0, (-1, heads)) + FLUSHED
            count = of_rows.stop - of_rows.start
            whole = Gradients(*(_tokens([getattr(x, n) for x in chunks], count, length) for n in Gradients._fields))
            for index, name in enumerate(("dq", "dk")):
                each, error, terms = (
                    getattr(whole, field).unflatten(2, (key_heads, -1))
                    for field in (name, f"{name}_error", f"{name}_terms")
                )
                # Value heads that share a key head may add up in one accumulator, with four products each.
                error = error.sum(3) + a.sum_of(4 * CHUNK * (heads // key_heads)) * terms.sum(3)
                norm = each.sum(3).norm(dim=-1)
                if lengths is not None:
                    factor = lengths[index][of_rows, tokens]
                    share = 3 * (a.normalized + a.sum_of(K))
                    error, norm = factor * (error + share * (norm + error)), factor * norm
                bounds[name][of_rows, tokens] = _rounded(kinds[name], a.wide, error, norm, K)
            for name in ("dv", "dg", "dbeta"):
                error, norm = getattr(whole, f"{name}_error"), getattr(whole, name).abs()
                bounds[name][of_rows, tokens] = _rounded(kinds[name], a.wide, error, norm, V if name == "dv" else 1)
        return {name: without_nan(bound) for name, bound in bounds.items()}


def _rounded(kind: torch.dtype, wide: torch.dtype, error: Tensor, norm: Tensor, size: int) -> Tensor:
    """The bound of a result that is rounded to its type; infinite if the error before is infinite."""
    unit = rounding(kind, wide)
    return SLACK * (error + unit * norm + (unit * error if unit else 0.0)) + _below(kind, size)


def _below(kind: torch.dtype, size: int) -> float:
    """The error of rounding a row of numbers to a type below its normal range."""
    return max(unit_below_normal(kind), FLUSHED) * size**0.5


def _states(states: Tensor | None, numbers: slice, heads: int, K: int, V: int, like: Tensor) -> Tensor:
    """States by lane, or zeros."""
    if states is None:
        return like.new_zeros((numbers.stop - numbers.start) * heads, K, V)
    return states[numbers].flatten(0, 1)
