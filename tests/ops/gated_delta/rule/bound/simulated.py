"""The arithmetic of the kernels for 16-bit types in plain PyTorch, all lanes at once: what is rounded, and where.

So fast that thousands of problems can be climbed on a CPU. Sums are torch's; what is rounded to 16 bits, and what is
multiplied in two parts, is as in `rule/triton` and `rule/hopper`. A lane is a sequence and a value head.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64


def rounded(x: Tensor, kind: torch.dtype) -> Tensor:
    return x.to(kind).float()


def parts(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two numbers of a type that nearly add up to x."""
    high = rounded(x, kind)
    return high, rounded(x - high, kind)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a·b as three products of bfloat16 parts."""
    (a_high, a_low), (b_high, b_low) = parts(a, torch.bfloat16), parts(b, torch.bfloat16)
    return a_high @ b_high + (a_high @ b_low + a_low @ b_high)


def inverse(A: Tensor, block: int) -> Tensor:
    """(I + A)⁻¹: diagonal blocks by substitution in float32, then pairs of blocks."""
    T = torch.eye(CHUNK).expand_as(A).clone()
    for begin in range(0, CHUNK, block):
        here = slice(begin, begin + block)
        for i in range(1, block):
            row = A[:, begin + i : begin + i + 1, begin : begin + i]
            T[:, begin + i, begin : begin + i] = -(row @ T[:, here, here][:, :i, :i])[:, 0]
    while block < CHUNK:
        for begin in range(0, CHUNK, 2 * block):
            x, y = slice(begin, begin + block), slice(begin + block, begin + 2 * block)
            T[:, y, x] = -product(T[:, y, y], product(A[:, y, x], T[:, x, x]))
        block *= 2
    return T


class _Chunk:
    """What is computed from k, q and gates alone."""

    def __init__(self, rule: "Rule", q: Tensor, k: Tensor, g: Tensor, beta: Tensor) -> None:
        self.q, self.k, self.beta = q, k, beta
        G = g.double().cumsum(-1)
        high = G.float()
        self.start = high.exp() + high.exp() * (G - high).float()
        self.end = (G[:, -1:] - G).float().exp()
        past = torch.ones(CHUNK, CHUNK, dtype=torch.bool).tril()
        between = high.unsqueeze(-1) - high.unsqueeze(-2)
        self.D = between.masked_fill(~past, -torch.inf).exp()
        A = beta.unsqueeze(-1) * ((k @ k.mT) * self.D).tril(-1)
        T = inverse(A, rule.block) - torch.eye(CHUNK)
        if rule.hopper:
            T = sum(parts(T, torch.bfloat16)).tril(-1)
        self.T_high, self.T_low = parts(T, rule.kind)
        self.qk, self.kk = q @ k.mT, k @ k.mT
        self.P = self.qk * self.D  # without the scale, which either plan multiplies at another place


@dataclass(frozen=True)
class Rule:
    """One of the plans on kernels: the portable one, or that for Hopper."""

    kind: torch.dtype
    hopper: bool
    scale: float

    @property
    def block(self) -> int:
        """Rows of the diagonal blocks that are inverted by substitution."""
        return 32 if self.hopper else 2

    def _chunks(self, *tokens: Tensor) -> list[tuple[Tensor, ...]]:
        padded = []
        for x in tokens:
            missing = -x.shape[1] % CHUNK
            x = torch.cat([x.float(), x.new_zeros(x.shape[0], missing, *x.shape[2:]).float()], 1)
            padded.append(x.split(CHUNK, 1))
        return list(zip(*padded, strict=True))

    def _scan(self, c: _Chunk, v: Tensor, S: Tensor, two: bool) -> tuple[Tensor, Tensor]:
        """v' of a chunk, and the next state; T in two parts in the backward."""
        predicted = c.k @ rounded(S, self.kind)
        r = c.beta.unsqueeze(-1) * v - (c.beta * c.start).unsqueeze(-1) * predicted
        narrow = rounded(r, self.kind)
        new = r + c.T_high @ narrow
        if two:
            new = new + c.T_low @ narrow
        carried = rounded(c.end.unsqueeze(-1) * new, self.kind)
        return new, c.start[:, -1, None, None] * S + c.k.mT @ carried

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Outputs [lanes, T, V], the final state, and the states at the start of every 16th chunk."""
        out, saved, length = [], [], v.shape[1]
        for at, (q_c, k_c, v_c, g_c, b_c) in enumerate(self._chunks(q, k, v, g, beta)):
            if at % 16 == 0:
                saved.append(S)
            c = _Chunk(self, q_c, k_c, g_c, b_c)
            new, after = self._scan(c, v_c, S, two=False)
            seen = q_c @ rounded(S, self.kind)
            if self.hopper:
                high, low = parts(new, self.kind)
                scores = rounded((c.qk * self.scale) * c.D, self.kind)
                total = (c.start * self.scale).unsqueeze(-1) * seen + scores @ high + scores @ low
            else:
                high, low = parts(c.P, self.kind)
                narrow = rounded(new, self.kind)
                total = self.scale * (c.start.unsqueeze(-1) * seen + high @ narrow + low @ narrow)
            out.append(total.to(self.kind))
            S = after
        return torch.cat(out, 1)[:, :length], S, saved

    def backward(
        self, do: Tensor, dS: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, saved: list[Tensor]
    ) -> tuple[Tensor, ...]:
        """The gradients of q, k, v, g, beta and the initial state."""
        kind, length, left, S = self.kind, v.shape[1], [], saved[0]
        chunks = self._chunks(q, k, v, g, beta, do)
        for at, (q_c, k_c, v_c, g_c, b_c, _) in enumerate(chunks):
            if at % 16 == 0:
                S = saved[at // 16]
            c = _Chunk(self, q_c, k_c, g_c, b_c)
            new, after = self._scan(c, v_c, S, two=True)
            left.append((c, rounded(S, kind), rounded(new, kind)))
            S = after
        results = []
        for (_, _, v_c, _, _, do_c), (c, S, new) in reversed(list(zip(chunks, left, strict=True))):
            Y = (self._turned if self.hopper else self._by_W)(c, do_c, dS)
            dS_stored = rounded(dS, kind)
            high, low = parts((c.start * self.scale).unsqueeze(-1) * do_c, kind)
            carried = rounded(-(c.beta * c.start).unsqueeze(-1) * Y, kind)
            dS = c.start[:, -1, None, None] * dS + c.q.mT @ low + c.q.mT @ high + c.k.mT @ carried
            results.append(self._gradients(c, v_c, do_c, S, new, rounded(Y, kind), dS_stored))
        flat = [torch.cat(x[::-1], 1)[:, :length] for x in zip(*results, strict=True)]
        return *(x.to(kind) for x in flat[:3]), *flat[3:], dS

    def _by_W(self, c: _Chunk, do: Tensor, dS: Tensor) -> Tensor:
        """Y of the portable plan: W dS + Tᵀ Pᵀ do."""
        kind = self.kind
        T = (c.T_high + c.T_low + torch.eye(CHUNK)) * c.end.unsqueeze(-1)
        high, low = parts(T, kind)
        W = rounded(high.mT @ c.k + low.mT @ c.k, kind)
        P = (c.qk * self.scale) * c.D
        high, low = parts(P, kind)
        P_T = P + high @ c.T_high + low @ c.T_high + high @ c.T_low
        high, low = parts(P_T, kind)
        local = rounded(high.mT @ do + low.mT @ do, kind)
        high, low = parts(dS, kind)
        return W @ low + W @ high + local

    def _turned(self, c: _Chunk, do: Tensor, dS: Tensor) -> Tensor:
        """Y of the plan for Hopper: Tᵀ (k̃ dS + Pᵀ do)."""
        high, low = parts((c.qk * self.scale) * c.D, self.kind)
        of_scores = low.mT @ do + high.mT @ do
        high, low = parts(dS, self.kind)
        R = (c.k @ low + c.k @ high) * c.end.unsqueeze(-1) + of_scores
        high, low = parts(R, self.kind)
        return R + c.T_high.mT @ low + c.T_low.mT @ high + c.T_high.mT @ high

    def _gradients(
        self, c: _Chunk, v: Tensor, do: Tensor, S: Tensor, new: Tensor, Y: Tensor, dS: Tensor
    ) -> tuple[Tensor, ...]:
        kind, beta = self.kind, c.beta.unsqueeze(-1)

        def row_products(x: Tensor, y: Tensor) -> Tensor:
            return ((x if self.hopper else rounded(x, kind)) * y).sum(-1)

        M = (do @ new.mT) * (c.D * self.scale)
        N = -(Y @ new.mT) * c.D.tril(-1)
        narrow_M, narrow_E = rounded(M, kind), rounded(beta * N, kind)
        do_S = (c.start * self.scale).unsqueeze(-1) * (do @ S.mT)
        Y_S = c.start.unsqueeze(-1) * (Y @ S.mT)
        new_dS = c.end.unsqueeze(-1) * (new @ dS.mT)
        dq = do_S + narrow_M @ c.k
        dk = narrow_M.mT @ c.q + (narrow_E + narrow_E.mT) @ c.k - beta * Y_S + new_dS
        of_keys = row_products(Y_S, c.k)
        dbeta = (Y * v).sum(-1) + (N * c.kk).sum(-1) - of_keys
        Z = beta * N * c.kk + (M * c.qk).tril(-1)
        if not self.hopper:
            Z = sum(parts(Z, kind))  # type: ignore[assignment]
        passing = Z.flip(-2).cumsum(-2).flip(-2).tril(-1).sum(-1)
        since = row_products(do_S, c.q) - c.beta * of_keys
        until = row_products(new_dS, c.k)
        dg = passing + since.flip(-1).cumsum(-1).flip(-1) + until.cumsum(-1) - until
        dg = dg + (c.start[:, -1] * (S * dS).sum((-1, -2))).unsqueeze(-1)
        return dq, dk, beta * Y, dg, dbeta
