"""How far a decoding step may be from the exact one, for the very inputs of a call: see docs/gated-delta-error.md.

Tokens go one after the other in float32, and the transition of a token is a contraction: what a token rounds is
carried on, and never amplified. One number bounds the norm of the error of a token's vector (o, dq, dk, dv) or of a
state, or the error of a number (dg, dβ). Sizes of what is rounded include the errors they have.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import norm_of, without_nan
from adjoint.core.problem import Problem, wide_dtype
from adjoint.ops.gated_delta.arguments import EPSILON

AXES = {"o": 1, "new_state": 2, "states": 2, "dq": 1, "dk": 1, "dv": 1, "dstate": 2}
"""The number of last axes of a result over which its norm is taken."""

FORMULA = "what its tokens round, decayed and carried on, as the theorem on steps in docs/gated-delta-error.md has it"

SECOND_ORDER = 1.02


class Sized(NamedTuple):
    """An exact tensor, its norm, and the norm of the error of the computed one. Both norms are [rows, heads]."""

    exact: Tensor
    norm: Tensor
    error: Tensor

    @property
    def size(self) -> Tensor:
        return self.norm + self.error


class Token(NamedTuple):
    """The results of one token, of all rows, for the backward: Z, e and S⁺, and the token's own numbers."""

    q: Tensor
    k: Tensor
    k_norm: Tensor
    g: Tensor
    beta: Tensor
    decay: Tensor
    Z: Sized
    e: Sized
    after: Sized


def _of_rows(bounds: Tensor, live: Tensor) -> Tensor:
    """The bounds of rows, 0 for those that are skipped."""
    bounds = without_nan(bounds)
    return torch.where(live.view(-1, *[1] * (bounds.dim() - 1)), bounds, 0.0)


class StepBounds:
    """Bounds of all results of a step."""

    def __init__(self, problem: Problem) -> None:
        element, g, beta, state = problem.dtypes[:4]
        scale, self.normalize, self.all_states, *_ = problem.options
        self.scale = float(scale)
        self.wide = wide_dtype(element)
        # The exact results of float64 are themselves computed in float64.
        self.u = torch.finfo(self.wide).eps / (1 if self.wide == torch.float64 else 2)
        self.tiny, most = torch.finfo(self.wide).smallest_normal, torch.finfo(self.wide).max
        self.most = most / max(1.0, abs(self.scale)) / 2  # a scale may come before a decay or behind it
        self.kinds = {"o": element, "new_state": state, "states": state, "dq": element, "dk": element, "dv": element}
        self.kinds |= {"dg": g, "dbeta": beta, "dstate": state}
        self.K, self.V = problem.sizes[:2]
        self.tiny_state = self.tiny * (self.K * self.V) ** 0.5  # products that underflow, of all numbers of a state
        # The share by which normalised q and k are off.
        self.share = (self.K / 2 + 8) * self.u if self.normalize else 0.0

    def sum_of(self, terms: int) -> float:
        """The share of its terms that a sum of products, in any order, and the products around it lose."""
        return SECOND_ORDER * (terms + 8) * self.u

    def placed(self, error: Tensor, *sizes: Tensor) -> Tensor:
        """The error, infinite where numbers on the way, or sums of their terms, may have no place in the arithmetic."""
        for size in sizes:
            error = torch.where(size < self.most, error, torch.inf)
        return error

    def stored(self, name: str, norm: Tensor, error: Tensor, numbers: int) -> Tensor:
        """The error, including the rounding to the type of the result, which has `numbers` numbers."""
        kind = self.kinds[name]
        if kind == self.wide:
            return error
        info = torch.finfo(kind)
        return error + info.eps / 2 * (norm + error) + info.smallest_normal * info.eps * numbers**0.5

    # ----------------------------------------------------------------------------------------- forward

    def _tokens(self, inputs: Sequence[Tensor | None]) -> tuple[list[Token], Tensor]:
        """Every token, and a mask of the rows that are not skipped."""
        q, k, v, g, beta, state, indices = (*inputs, None)[:7]
        assert q is not None and k is not None and v is not None and g is not None and beta is not None
        assert state is not None
        if self.normalize:
            q, k = (self._normalized(x) for x in (q, k))
        group = v.shape[2] // max(1, q.shape[2])
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
        if indices is None:
            live, S = torch.ones(len(q), dtype=torch.bool, device=q.device), state
        else:
            live = (indices >= 0) & (indices < len(state))
            padded = torch.cat((state, torch.zeros_like(v[:1, 0, :, None, :]).expand(1, *state.shape[1:])))
            S = padded[torch.where(live, indices.long(), len(state))]
        current = Sized(S, norm_of(S, 2), torch.zeros_like(S[..., 0, 0]))
        tokens = []
        for t in range(q.shape[1]):
            tokens.append(self._token(q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t], current))
            current = tokens[-1].after
        return tokens, live

    def _normalized(self, x: Tensor) -> Tensor:
        """x over its length; infinite where the sum of its squares has no place, so that nothing is promised."""
        squares = x.square().sum(-1, keepdim=True)
        return torch.where(squares < self.most, x / (squares + EPSILON).sqrt(), torch.inf)

    def _token(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Sized) -> Token:
        u, k_norm, decay = self.u, norm_of(k), g.exp()
        Z = decay[..., None, None] * S.exact
        # e^g has a relative error of (4·|g| + 8)·u, and its product with the state is rounded.
        lost = torch.where(decay > 0, (4 * g.abs() + 10) * u * decay, 0.0).nan_to_num(nan=0.0)
        error = decay * S.error + SECOND_ORDER * lost * S.size + self.tiny * S.size + self.tiny_state
        of_Z = Sized(Z, norm_of(Z, 2), error)
        e = v - torch.einsum("bhkv,bhk->bhv", Z, k)
        known = k_norm * of_Z.size
        own = self.sum_of(self.K) * known + 2 * u * norm_of(v) + self.share * known + self.tiny * self.V
        own = self.placed(own, of_Z.size, known + norm_of(v))
        of_e = Sized(e, norm_of(e), k_norm * of_Z.error + own)
        after = Z + k[..., None] * (beta[..., None] * e)[..., None, :]
        # E⁺ = (I − β k kᵀ) E_Z + β k ownᵀ and roundings; for a normalised key also β (δk eᵀ − k (Zᵀδk)ᵀ).
        factor = (1 - beta * k_norm.square()).abs().clamp_min(1.0)
        rounded = 4 * u * beta * k_norm * of_e.size + self.share * beta * k_norm * of_e.size
        norm = norm_of(after, 2)
        error = factor * of_Z.error + beta * k_norm * own + rounded
        error = SECOND_ORDER * (error + u * (norm + error)) + self.tiny_state
        error = self.placed(error, of_e.size * beta * (1 + k_norm), norm + error)
        return Token(q, k, k_norm, g, beta, decay, of_Z, of_e, Sized(after, norm, error))

    def forward(self, name: str, *inputs: Tensor | None) -> Tensor:
        """The bound of o or of the states."""
        tokens, live = self._tokens(inputs)
        if name == "o":
            errors = []
            for token in tokens:
                exact = self.scale * torch.einsum("bhkv,bhk->bhv", token.after.exact, token.q)
                size = abs(self.scale) * norm_of(token.q)
                lost = (self.sum_of(self.K) + self.share) * token.after.size
                error = size * (token.after.error + lost) + self.tiny * (self.V + token.after.size)
                error = self.placed(error, norm_of(token.q) * token.after.size)
                errors.append(self.stored(name, norm_of(exact), error, self.V))
            return _of_rows(torch.stack(errors, 1), live)
        numbers = self.K * self.V
        of_states = [self.stored(name, token.after.norm, token.after.error, numbers) for token in tokens]
        return _of_rows(torch.stack(of_states, 1) if self.all_states else of_states[-1], live)

    # ---------------------------------------------------------------------------------------- backward

    def backward(self, name: str, do: Tensor, dstates: Tensor, *inputs: Tensor | None) -> Tensor:
        """The bound of a gradient."""
        tokens, live = self._tokens(inputs)
        q, k, *_, state, indices = (*inputs, None)[:7]
        assert q is not None and k is not None and state is not None
        last = torch.zeros_like(tokens[-1].after.exact) if self.all_states else dstates
        dS = Sized(last, norm_of(last, 2), torch.zeros_like(last[..., 0, 0]))
        of_tokens: list[tuple[Tensor, Tensor, Tensor]] = []  # norms, errors, and exact vectors of dq and dk
        for t in reversed(range(len(tokens))):
            result, dS = self._back(name, tokens[t], do[:, t], dstates[:, t] if self.all_states else None, dS)
            of_tokens.insert(0, result)
        if name == "dstate":
            return without_nan(self._of_pool(dS, live, state, indices))
        exact, norms, errors = (torch.stack(x, 1) for x in zip(*of_tokens, strict=True))
        if name in ("dq", "dk"):
            return _of_rows(self._of_key_heads(name, exact, norms, errors, q if name == "dq" else k), live)
        return _of_rows(self.stored(name, norms, errors, self.V if name == "dv" else 1), live)

    def _back(
        self, name: str, x: Token, do: Tensor, dstate: Tensor | None, dS: Sized
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Sized]:
        """The exact gradient of one token with its norm and error, and the gradient of the state before the token."""
        u, scale, q_norm, upstream = self.u, abs(self.scale), norm_of(x.q), norm_of(do)
        exact = dS.exact if dstate is None else dS.exact + dstate
        exact = exact + self.scale * x.q[..., None] * do[..., None, :]
        norm, added = norm_of(exact, 2), scale * q_norm * upstream
        error = dS.error + (3 * u + self.share) * added + 3 * u * (norm + dS.error + added) + self.tiny * upstream
        if dstate is not None:
            error = error + 2 * u * norm_of(dstate, 2)
        error = self.placed(SECOND_ORDER * error + self.tiny_state, q_norm * upstream, norm + error)
        dS = Sized(exact, norm, error)
        a = torch.einsum("bhkv,bhk->bhv", exact, x.k)
        own = (self.sum_of(self.K) + self.share) * x.k_norm * dS.size + self.tiny * self.V
        own = self.placed(own, x.k_norm * dS.size)
        of_a = Sized(a, norm_of(a), x.k_norm * dS.error + own)
        dZ = exact - x.k[..., None] * (x.beta[..., None] * a)[..., None, :]
        factor = (1 - x.beta * x.k_norm.square()).abs().clamp_min(1.0)
        error = factor * dS.error + x.beta * x.k_norm * (own + (4 * u + self.share) * of_a.size)
        norm = norm_of(dZ, 2)
        error = SECOND_ORDER * (error + u * (norm + error)) + self.tiny_state
        of_dZ = Sized(dZ, norm, self.placed(error, of_a.size * x.beta * (1 + x.k_norm), norm + error))
        lost = torch.where(x.decay > 0, (4 * x.g.abs() + 10) * u * x.decay, 0.0).nan_to_num(nan=0.0)
        before = x.decay[..., None, None] * dZ
        error = x.decay * of_dZ.error + SECOND_ORDER * lost * of_dZ.size + self.tiny * of_dZ.size + self.tiny_state
        return self._gradient(name, x, do, dS, of_a, of_dZ), Sized(before, norm_of(before, 2), error)

    def _gradient(
        self, name: str, x: Token, do: Tensor, dS: Sized, a: Sized, dZ: Sized
    ) -> tuple[Tensor, Tensor, Tensor]:
        u, upstream = self.u, norm_of(do)
        if name == "dq":
            exact = self.scale * torch.einsum("bhkv,bhv->bhk", x.after.exact, do)
            error = abs(self.scale) * upstream * (x.after.error + self.sum_of(self.V) * x.after.size)
            error = self.placed(error + self.tiny * (self.K + x.after.size), upstream * x.after.size)
            return exact, norm_of(exact), error
        if name == "dk":
            exact = torch.einsum("bhkv,bhv->bhk", dS.exact, x.beta[..., None] * x.e.exact)
            exact = exact - torch.einsum("bhkv,bhv->bhk", x.Z.exact, x.beta[..., None] * a.exact)
            error = dS.error * x.e.size + dS.norm * x.e.error + x.Z.error * a.size + x.Z.norm * a.error
            terms = dS.size * x.e.size + x.Z.size * a.size
            error = x.beta * (error + self.sum_of(self.V) * terms) + self.tiny * (self.K + dS.size + x.Z.size)
            return exact, norm_of(exact), self.placed(error, terms)
        if name == "dv":
            exact = x.beta[..., None] * a.exact
            return exact, norm_of(exact), x.beta * (a.error + 2 * u * a.size) + self.tiny * self.V
        if name == "dbeta":
            exact = (x.e.exact * a.exact).sum(-1)
            error = x.e.error * a.size + x.e.norm * a.error + self.sum_of(self.V) * x.e.size * a.size
            return exact, exact.abs(), self.placed(error + self.tiny * self.V, x.e.size * a.size)
        exact = (x.Z.exact * dZ.exact).sum((-1, -2))
        error = x.Z.error * dZ.size + x.Z.norm * dZ.error + self.sum_of(self.K * self.V) * x.Z.size * dZ.size
        return exact, exact.abs(), self.placed(error + self.tiny * self.K * self.V, x.Z.size * dZ.size)

    def _of_key_heads(self, name: str, exact: Tensor, norms: Tensor, errors: Tensor, x: Tensor) -> Tensor:
        """The bound of dq or dk, which add up value heads and then pass through the normalisation."""
        group = norms.shape[2] // max(1, x.shape[2])
        size = (norms + errors).unflatten(2, (-1, group)).sum(3)
        exact, error = (y.unflatten(2, (-1, group)).sum(3) for y in (exact, errors))
        error = self.placed(error + self.sum_of(group) * size, size)
        if self.normalize:
            r = (x.square().sum(-1) + EPSILON).rsqrt()
            y = x * r[..., None]
            exact = (exact - y * (y * exact).sum(-1, keepdim=True)) * r[..., None]
            error = r * (error + 3 * (self.share + self.sum_of(self.K)) * (size + error))
        return self.stored(name, norm_of(exact), error, self.K)

    def _of_pool(self, dS: Sized, live: Tensor, state: Tensor, indices: Tensor | None) -> Tensor:
        """The bound of the gradient of the states, where rows that share a state add up."""
        if indices is None:
            return self.stored("dstate", dS.norm, dS.error, self.K * self.V)
        error, size = (torch.zeros_like(state[..., 0, 0]) for _ in range(2))
        places = indices[live].long()
        error.index_add_(0, places, dS.error[live])
        size.index_add_(0, places, dS.size[live])
        error = error + self.sum_of(len(places)) * size * (len(places) > 1)
        return self.stored("dstate", size, error, self.K * self.V)
