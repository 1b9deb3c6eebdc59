"""The error of a state, by directions."""

import torch
from torch import Tensor

KEPT = 16
"""The most ellipsoids for a lane's error. If there are more, the two oldest become one around their sum."""


class Ellipsoids:
    """A set of matrices E [K, V] that contains the error of a state: E = Σ_m E_m with ‖zᵀE_m‖² ≤ zᵀQ_m z for every z.

    `Q` is [lanes, m, K, K]. E_m = B_m X with B_m B_mᵀ = Q_m and ‖X‖_F ≤ 1.
    """

    def __init__(self, Q: Tensor) -> None:
        self.Q = Q

    @staticmethod
    def none(lanes: int, K: int, like: Tensor) -> "Ellipsoids":
        return Ellipsoids(like.new_zeros(lanes, 0, K, K))

    @staticmethod
    def around(columns: Tensor, sizes: Tensor) -> "Ellipsoids":
        """An ellipsoid that contains every Σ_j a_j e_jᵀ with ‖e_j‖ ≤ sizes_j, where a_j are the columns [lanes, K, j].

        Q = (Σ_j d_j‖a_j‖)·Σ_j d_j/‖a_j‖·a_j a_jᵀ, by Cauchy and Schwarz.
        """
        lengths = columns.norm(dim=-2)
        factor = ((sizes * lengths).sum(-1, keepdim=True) * sizes / lengths).sqrt()
        factor = factor.masked_fill(lengths < 1e-150, 0.0)  # so short a column adds nothing, however large its e_j
        scaled = columns * factor.unsqueeze(-2)
        return Ellipsoids((scaled @ scaled.mT).unsqueeze(1))

    def along(self, rows: Tensor) -> Tensor:
        """Bounds of ‖zᵀE‖ for every row z of [lanes, n, K]."""
        squares = ((rows.unsqueeze(1) @ self.Q) * rows.unsqueeze(1)).sum(-1)
        rounded = 1e-13 * self._traces().unsqueeze(-1) * rows.square().sum(-1).unsqueeze(1)
        return (squares.clamp_min(0) + rounded).sqrt().sum(1)

    def rows(self) -> Tensor:
        """Bounds of the norms of E's rows, [lanes, K]."""
        squares = self.Q.diagonal(dim1=-2, dim2=-1)
        return (squares.clamp_min(0) + 1e-13 * self._traces().unsqueeze(-1)).sqrt().sum(1)

    def norm(self) -> Tensor:
        """A bound of ‖E‖_F, [lanes]: the largest eigenvalue of Q is at most ‖Q⁴‖_F^{1/4}."""
        traces = self._traces().clamp_min(1e-290)
        power = self.Q / traces[..., None, None]
        power = power @ power
        power = power @ power
        largest = power.square().sum((-1, -2)) ** 0.125
        return (traces * (largest + 1e-13)).sqrt().sum(1)

    def move(self, M: Tensor) -> "Ellipsoids":
        """Ellipsoids around M E."""
        M = M.unsqueeze(1)
        return Ellipsoids(M @ self.Q @ M.mT)

    def scale(self, factor: Tensor) -> "Ellipsoids":
        """Ellipsoids around E X for every X whose norm is at most the factor of its lane."""
        return Ellipsoids(self.Q * factor.square()[:, None, None, None])

    def add(self, *others: "Ellipsoids") -> "Ellipsoids":
        """Ellipsoids around the sums."""
        Q = torch.cat([self.Q, *(other.Q for other in others)], 1)
        while Q.shape[1] > KEPT:
            x, y = (Q[:, m].diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(1e-290).sqrt() for m in range(2))
            pair = Q[:, 0] * (1 + y / x)[:, None, None] + Q[:, 1] * (1 + x / y)[:, None, None]
            Q = torch.cat([pair.unsqueeze(1), Q[:, 2:]], 1)
        return Ellipsoids(Q)

    def _traces(self) -> Tensor:
        return self.Q.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0)
