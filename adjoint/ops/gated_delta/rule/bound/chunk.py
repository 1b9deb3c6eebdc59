"""The exact matrices of a chunk, and the errors of those that depend on keys, queries and gates alone."""

import torch
from torch import Tensor

from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.rule.bound.arithmetic import FLUSHED, Arithmetic


def times(matrix: Tensor, vector: Tensor) -> Tensor:
    """The product of a matrix and a vector, for each lane."""
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)


def norms_of_sums(start: Tensor, S: Tensor, weights: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """‖start_t·S + Σ_j weights_tj·left_j right_jᵀ‖_F for every t, from products of the vectors only."""
    across = ((left @ S) * right).sum(-1)
    grams = (left @ left.mT) * (right @ right.mT)
    squares = start.square() * S.square().sum((-1, -2)).unsqueeze(-1) + 2 * start * times(weights, across)
    squares = squares + ((weights @ grams) * weights).sum(-1)
    terms = start * S.norm(dim=(-1, -2)).unsqueeze(-1) + times(weights.abs(), left.norm(dim=-1) * right.norm(dim=-1))
    return (squares.clamp_min(0) + 1e-13 * terms.square()).sqrt()


class Chunk:
    """The exact matrices of a chunk in all lanes, and bounds of the errors of those that depend only on k, q and gates.

    Attributes:
        over_keys, over_tokens: the shares of their terms that sums over K and over the chunk's tokens lose.
        decay_error: the error of D.
        start_error, end_error: the errors of e^G and e^{Γ−G}, [lanes, 64].
        T_error: the error of T before it is rounded.
        stored_error: the error of T° as the forward stores it.
        P_error: the error of P before it is rounded.
        largest_score: the largest magnitude of the computed P, with its scale or without.
    """

    def __init__(self, arithmetic: Arithmetic, scale: float, q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> None:
        a, K, count = arithmetic, k.shape[-1], k.shape[-2]
        self.q, self.k, self.beta, self.scale = q, k, beta, scale
        self.eye = torch.eye(K, dtype=k.dtype, device=k.device).expand(len(k), K, K)
        self.over_keys, self.over_tokens = a.sum_of(K), a.sum_of(count)
        G = g.clamp_min(RESET[torch.float64]).cumsum(-1)
        past = torch.ones(count, count, dtype=torch.bool, device=k.device).tril()
        between = (G.unsqueeze(-1) - G.unsqueeze(-2)).masked_fill(~past, -torch.inf)
        self.D, self.start, self.end = between.exp(), G.exp(), (G[..., -1:] - G).exp()
        self.over = self.start[..., -1]
        self.kk, self.qk = k @ k.mT, q @ k.mT
        self.kk_abs, self.qk_abs = k.abs() @ k.abs().mT, q.abs() @ k.abs().mT
        self.k_norm, self.q_norm = k.norm(dim=-1), q.norm(dim=-1)
        strict = self.D.tril(-1)
        A = beta.unsqueeze(-1) * self.kk * strict
        one = torch.eye(count, dtype=k.dtype, device=k.device)
        self.T = torch.linalg.solve_triangular(A + one, one.expand_as(A), upper=False, unitriangular=True)
        self.T0 = self.T - one
        self.old = (beta * self.start).unsqueeze(-1) * k
        self.w, self.kt = self.T @ self.old, (self.end.unsqueeze(-1) * k).mT
        self.W = (self.kt @ self.T).mT
        self.M = self.over[:, None, None] * self.eye - self.kt @ self.w
        self.P, self.far = scale * self.qk * self.D, scale * self.start.unsqueeze(-1) * q
        self.z = self.far - self.P @ self.w
        self._errors(a, g, A, strict)

    def _errors(self, a: Arithmetic, g: Tensor, A: Tensor, strict: Tensor) -> None:
        # The errors of running sums and exponentials. A factor e^x has a rounded x, and its own error is 4 units.
        sums = g.clamp_min(RESET[a.wide]).cumsum(-1)
        apart = (sums.unsqueeze(-1) - sums.unsqueeze(-2)).abs()
        from_start, to_end = sums.abs(), (sums[..., -1:] - sums).abs()
        if a.short_sums:
            apart = apart + (sums.unsqueeze(-1) + sums.unsqueeze(-2)).abs()
        if a.wide == torch.float64:  # every sum is rounded, and a difference has the roundings of all sums in between
            steps = torch.arange(sums.shape[-1], device=sums.device)
            apart = apart + (1 + steps[:, None] - steps).clamp_min(0) * sums.unsqueeze(-1).abs() / 4
            from_start = from_start + (1 + steps) * sums.abs() / 4
            to_end = to_end + (len(steps) - steps) * sums[..., -1:].abs() / 4
        self.decay_error = (self.D * a.unit * (4 * apart + 8) + FLUSHED).tril()
        self.start_error = self.start * a.unit * (4 * from_start + 8) + FLUSHED
        self.end_error = self.end * a.unit * (4 * to_end + 8) + FLUSHED
        # The chunk's matrix and its inverse.
        A_error = self.kk_abs * (self.over_keys * strict + self.decay_error.tril(-1))
        A_error = self.beta.unsqueeze(-1) * A_error
        self.T_error = inverse_error(a, self.T, A, A_error, self.over_tokens) + a.inverse * self.T0.abs()
        self.stored_error = self.T_error
        if a.storage:
            off = self.T0.to(a.storage).double() - self.T0
            rounded = a.u * self.T0.abs() + (1 + a.u) * self.T_error + a.tiny
            self.stored_error = torch.minimum(rounded, off.abs() + 2 * self.T_error).tril(-1)
        score_error = self.qk_abs * (self.over_keys * self.D + self.decay_error) + FLUSHED * (self.D > 0)
        self.P_error = abs(self.scale) * score_error
        self.largest_score = max(1.0, abs(self.scale)) * ((self.qk * self.D).abs() + score_error)


def inverse_error(a: Arithmetic, T: Tensor, A: Tensor, A_error: Tensor, sums: float) -> Tensor:
    """The error of the computed T. Diagonal blocks are inverted by substitution, and larger ones from two smaller ones.

    The inverse of [[X, 0], [Z, Y]] has −Y⁻¹ Z X⁻¹ below the diagonal. The errors of X⁻¹ pass through Y⁻¹ Z, and those
    of Y⁻¹ through Z X⁻¹. Both matrices are known exactly, so no error passes through a product of magnitudes.
    """
    size, count = a.block, T.shape[-1]
    T_abs, A_abs = T.abs(), A.abs()

    def blocks(x: Tensor, width: int) -> Tensor:
        """The diagonal blocks, [lanes, blocks, width, width], as a view."""
        return x.unflatten(-1, (-1, width)).unflatten(-3, (-1, width)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)

    error = torch.zeros_like(T)
    T_b = blocks(T_abs, size)
    blocks(error, size).copy_(T_b @ (blocks(A_error, size) + sums * blocks(A_abs, size)) @ T_b)
    while size < count:
        upper, lower = slice(0, size), slice(size, 2 * size)
        T_b, A_b, E_b = (blocks(x, 2 * size) for x in (T, A, error))
        X, Y, Z = T_b[..., upper, upper], T_b[..., lower, lower], A_b[..., lower, upper]
        left, right = (Y @ Z).abs(), (Z @ X).abs()
        share = a.merge + sums
        terms = Y.abs() @ Z.abs() @ X.abs()
        E_b[..., lower, upper] = (
            left @ E_b[..., upper, upper]
            + E_b[..., lower, lower] @ right
            + Y.abs() @ blocks(A_error, 2 * size)[..., lower, upper] @ X.abs()
            + share * (terms + Y.abs() @ right + left @ X.abs())
        )
        size *= 2
    return error
