"""How far `carry`, from chunk to chunk, may be from the exact one.

One number bounds the norm of the error of a token's vector or of a state. An error E of the state a chunk begins with
becomes M E, M = e^Γ − (e^{Γ−G} ⊙ k)ᵀ w, and what the chunk rounds itself is added: ‖M‖₂ is that of the very chunk.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.core.guarantee import norm_of, without_nan
from adjoint.ops.gated_delta.stages.in_chunks import Chunks, state_count

SLACK = 1.02
"""A factor for products of two errors of float32 or of float64."""


class CarryBound:
    """The exact states and values of the chunks, [chunks, heads, ...], and the errors of the computed ones."""

    def __init__(
        self,
        wide: torch.dtype,
        kinds: dict[str, torch.dtype],
        inputs: Sequence[Tensor],
        cu_seqlens: Tensor | None,
        chunk: int,
    ) -> None:
        k, w, u, G, state = inputs
        info = torch.finfo(wide)
        # The exact results of float64 are themselves computed in float64.
        self.wide, self.kinds, self.u = wide, kinds, info.eps / (1 if wide == torch.float64 else 2)
        self.tiny, self.most, self.chunk = info.smallest_normal, info.max / 2, chunk
        self.chunks = chunks = Chunks(k, cu_seqlens, chunk)
        self.repeat = u.shape[2] // max(1, k.shape[2])
        self.K, self.V = k.shape[-1], u.shape[-1]

        def gather(x: Tensor, repeat: int = 1) -> Tensor:
            return chunks.gather(x, torch.float64, repeat)

        self.gather = gather
        self.k, self.w, self.U, decay = gather(k, self.repeat), gather(w), gather(u), gather(G)
        last = decay.gather(-1, chunks.last.expand(*decay.shape[:2], 1))
        inside = chunks.inside[:, None]
        between = torch.where(inside, last - decay, 0.0)
        self.end = torch.where(inside, between.exp(), 0.0)
        self.end_error = self.end * (4 * between.abs() + 10) * self.u + self.tiny
        self.over = last[..., 0].exp()
        self.over_error = self.over * (4 * last[..., 0].abs() + 10) * self.u + self.tiny
        self.faded = self.end.unsqueeze(-1) * self.k
        self.faded_error = self.end_error * norm_of(self.k) + self.tiny
        eye = torch.eye(self.K, dtype=torch.float64, device=k.device)
        self.M = torch.linalg.matrix_norm(self.over[..., None, None] * eye - self.faded.mT @ self.w, 2) * (1 + 1e-12)
        self.k_norm, self.w_norm = norm_of(self.k), norm_of(self.w)
        self.state = state
        self._scan()

    def _sum(self, terms: int) -> float:
        return SLACK * (terms + 8) * self.u

    def _placed(self, error: Tensor, *sizes: Tensor) -> Tensor:
        """The error, infinite where numbers on the way, or sums of their terms, may have no place in the arithmetic."""
        for size in sizes:
            error = torch.where(size < self.most, error, torch.inf)
        return error

    def _scan(self) -> None:
        chunks, current = self.chunks, self.state.clone()
        error = torch.zeros_like(current[..., 0, 0])
        heads = self.U.shape[:2]
        self.S = current.new_zeros(*heads, self.K, self.V)
        self.S_error = current.new_zeros(heads)
        self.values, self.values_error = torch.zeros_like(self.U), torch.zeros_like(self.w_norm)
        for step in range(chunks.steps):
            sequences, at = chunks.at(step)
            S, E = current[sequences], error[sequences]
            self.S[at], self.S_error[at] = S, E
            size = norm_of(S, 2) + E
            values = self.U[at] - self.w[at] @ S
            own = self._sum(self.K) * self.w_norm[at] * size.unsqueeze(-1) + 2 * self.u * norm_of(self.U[at])
            known = self.w_norm[at] * size.unsqueeze(-1)
            own = self._placed(own + self.tiny * self.V, known + norm_of(self.U[at]))
            of_values = self.w_norm[at] * E.unsqueeze(-1) + own
            self.values[at], self.values_error[at] = values, of_values
            current[sequences] = self.over[at][..., None, None] * S + self.faded[at].mT @ values
            total = norm_of(values) + of_values
            error[sequences] = self._carried(at, E, size, own, total, norm_of(self.faded[at]), current[sequences])
        self.final, self.final_error = current, error

    def _carried(
        self, at: slice | Tensor, E: Tensor, size: Tensor, own: Tensor, total: Tensor, weights: Tensor, result: Tensor
    ) -> Tensor:
        """The error of a state after a chunk, whose rows have sizes `total` and, of their own, errors `own`."""
        lost = self.faded_error[at] * total + self._sum(self.chunk) * weights * total
        added = (weights * own + lost).sum(-1) + (self.over_error[at] + 3 * self.u * self.over[at]) * size
        added = added + 3 * self.u * norm_of(result, 2) + self.tiny * (self.K * self.V) ** 0.5
        terms = self.over[at] * size + (weights * total).sum(-1)
        return self._placed(SLACK * (self.M[at] * E + added), size, terms)

    # ----------------------------------------------------------------------------------------- results

    def _stored(self, name: str, norm: Tensor, error: Tensor, numbers: int) -> Tensor:
        kind = self.kinds[name]
        if kind == self.wide:
            return error
        info = torch.finfo(kind)
        return error + info.eps / 2 * (norm + error) + info.smallest_normal * info.eps * numbers**0.5

    def _tokens(self, name: str, norm: Tensor, error: Tensor, numbers: int) -> Tensor:
        return self.chunks.tokens(without_nan(self._stored(name, norm, error, numbers)))

    def results(self) -> dict[str, Tensor]:
        count = state_count(self.chunks.batch * self.chunks.time, len(self.state), self.chunk)
        states = self.S_error.new_zeros(count, self.U.shape[1])
        states[self.chunks.state_places] = self.S_error
        return {
            "values": self._tokens("values", norm_of(self.values), self.values_error, self.V),
            "states": without_nan(states),
            "final_state": without_nan(self.final_error),
        }

    def gradients(self, dvalues: Tensor, dstates: Tensor, dfinal: Tensor) -> dict[str, Tensor]:
        chunks, u = self.chunks, self.u
        total, of_begins = self.gather(dvalues), dstates[chunks.state_places]
        total_error = torch.zeros_like(self.w_norm)
        dS, dS_error = torch.zeros_like(self.S), torch.zeros_like(self.S_error)
        current, error = dfinal.clone(), torch.zeros_like(dfinal[..., 0, 0])
        for step in reversed(range(chunks.steps)):
            sequences, at = chunks.at(step)
            after, E = current[sequences], error[sequences]
            dS[at], dS_error[at] = after, E
            size, weights = norm_of(after, 2) + E, norm_of(self.faded[at])
            own = (self._sum(self.K) * weights + self.faded_error[at]) * size.unsqueeze(-1)
            own = own + 2 * u * norm_of(total[at]) + self.tiny * self.V
            own = self._placed(own, weights * size.unsqueeze(-1) + norm_of(total[at]))
            total[at] = total[at] + self.faded[at] @ after
            total_error[at] = weights * E.unsqueeze(-1) + own
            rows, begin = norm_of(total[at]) + total_error[at], of_begins[at]
            before = self.over[at][..., None, None] * after - self.w[at].mT @ total[at] + begin
            lost = self._carried(at, E, size, own, rows, self.w_norm[at], before)
            current[sequences], error[sequences] = before, lost + 2 * u * norm_of(begin, 2)
        return self._of_tokens(total, total_error, dS, dS_error) | {"dstate": without_nan(error)}

    def _of_tokens(self, total: Tensor, total_error: Tensor, dS: Tensor, dS_error: Tensor) -> dict[str, Tensor]:
        S_norm, dS_norm = norm_of(self.S, 2), norm_of(dS, 2)
        S_size, dS_size = S_norm + self.S_error, dS_norm + dS_error
        rows, new = norm_of(total), norm_of(self.values)
        row_sizes, new_sizes = rows + total_error, new + self.values_error

        def each(x: Tensor) -> Tensor:
            return x.unsqueeze(-1)

        dw = each(self.S_error) * row_sizes + each(S_norm) * total_error + self._sum(self.V) * each(S_size) * row_sizes
        dw = self._placed(dw, each(S_size) * row_sizes)
        of_keys = each(dS_error) * new_sizes + each(dS_norm) * self.values_error
        of_keys = self.end * of_keys + (self._sum(self.V) * self.end + self.end_error) * each(dS_size) * new_sizes
        of_keys = self._placed(of_keys + self.tiny * self.K, each(dS_size) * new_sizes)
        key_rows = self.end * each(dS_size) * new_sizes
        until_end = of_keys * self.k_norm + self._sum(self.K) * key_rows * self.k_norm
        until_end = until_end + self.tiny * each(dS_size) * new_sizes  # of the product of a key with its decay
        whole = self.S_error * dS_size + S_norm * dS_error + self._sum(self.K * self.V) * S_size * dS_size
        at_end = until_end.sum(-1) + self._sum(self.chunk) * (key_rows * self.k_norm).sum(-1)
        at_end = at_end + self.over * whole + (self.over_error + 3 * self.u * self.over) * S_size * dS_size
        at_end = self._placed(at_end + self.tiny * (S_size + dS_size), S_size * dS_size)
        dG = until_end.clone()
        place = self.chunks.last.expand(*dG.shape[:2], 1)
        dG.scatter_add_(-1, place, at_end.unsqueeze(-1))
        dG = dG + 2 * self.u * (dG + key_rows * self.k_norm) + self.tiny * self.chunk

        def grouped(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, self.repeat)).sum(2)

        dk = grouped(of_keys) + self._sum(self.repeat) * grouped(key_rows + of_keys) * (self.repeat > 1)
        return {
            "dk": self._tokens("dk", grouped(key_rows), dk, self.K),
            "dw": self._tokens("dw", (each(S_norm) * rows), dw + self.tiny * self.K, self.K),
            "du": self._tokens("du", rows, total_error, self.V),
            "dG": self.chunks.tokens(without_nan(dG)),
        }
