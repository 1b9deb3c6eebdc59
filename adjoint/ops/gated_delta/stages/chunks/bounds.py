"""How far the stages without kernels may be from the exact ones, for the very inputs of a call.

A stage that is a few products of its inputs is computed again, in float64, by numbers that carry their errors
(`core.running`). `carry` goes from chunk to chunk, where the sizes of errors, multiplied with sizes, would grow without
end: its states' errors are bounded in their norms, which the transitions of chunks do not let grow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.running import NOISE, Arithmetic, Running
from adjoint.ops.gated_delta.arguments import RESET
from adjoint.ops.gated_delta.rule.bound import arithmetic as of_rule
from adjoint.ops.gated_delta.rule.bound.chunk import inverse_error
from adjoint.ops.gated_delta.stages.chunks.carry_bound import CarryBound
from adjoint.ops.gated_delta.stages.in_chunks import Chunks

SUBSTITUTED = 16
"""The number of rows of a diagonal block that is inverted by substitution."""

FORMULA = "what its operations round, carried on to the result: docs/gated-delta-error.md"

Results = dict[str, Tensor]
"""Bounds by the names of the results."""


def derived(stage: Callable[..., Results], axes: dict[str, int] | None = None) -> Callable[..., Derived]:
    """Makes the error statement of a result. `stage(problem, kinds, *inputs)` gives the bounds of all results."""

    def of(problem: Problem, name: str, kinds: dict[str, torch.dtype]) -> Derived:
        def bound(*inputs: Any) -> Tensor:
            if inputs[-1] is not None and inputs[-1].is_floating_point():  # cu_seqlens, the last input, is absent
                inputs = (*inputs, None)
            return stage(problem, kinds, *inputs)[name]

        return Derived(FORMULA, bound, (axes or {}).get(name, 0))

    return of


def _chunk(problem: Problem) -> int:
    return int(problem.options[0])


class _Stage:
    """The inputs of a stage by chunks, as numbers with errors."""

    def __init__(self, problem: Problem, like: Tensor, cu_seqlens: Tensor | None, chunk: int) -> None:
        self.wide = wide_dtype(problem.dtypes[0])
        self.arithmetic = Arithmetic.of(self.wide, self.wide)
        self.chunks = Chunks(like, cu_seqlens, chunk)

    def of(self, x: Tensor, repeat: int = 1) -> Running:
        return Running(self.arithmetic, self.chunks.gather(x, torch.float64, repeat))

    def decays(self, G: Running, diagonal: int) -> Running:
        """D, from an exact G."""
        apart = G.map(lambda x: x.unsqueeze(-1)) - G.map(lambda x: x.unsqueeze(-2))
        is_there = self.chunks.decays(torch.zeros_like(G.exact), diagonal) > 0
        return apart.map(lambda x: torch.where(is_there, x, 0.0)).exp().map(lambda x: torch.where(is_there, x, 0.0))

    def result(self, x: Running, kind: torch.dtype, repeat: int = 1) -> Tensor:
        """The bound of a result of tokens, summed over repeated heads."""
        if repeat > 1:
            x = x.map(lambda y: y.unflatten(1, (-1, repeat))).sum(2)
        return self.chunks.tokens(x.stored(self.wide, kind))


def _column(x: Running) -> Running:
    return x.map(lambda y: y.unsqueeze(-1))


# ------------------------------------------------------------------------------------- cumulative_decay


def cumulative_decay(problem: Problem, kinds: dict[str, torch.dtype], *inputs: Any) -> Results:
    *upstream, g, cu_seqlens = inputs
    stage, least = _Stage(problem, g, cu_seqlens, _chunk(problem)), RESET[wide_dtype(problem.dtypes[0])]
    stage.arithmetic, stage.wide = Arithmetic.of(torch.float64, torch.float64), torch.float64
    if not upstream:
        return {"G": stage.result(stage.of(g.clamp_min(least)).cumsum(-1), kinds["G"])}
    sums = stage.of(upstream[0]).map(lambda x: x.flip(-1)).cumsum(-1).map(lambda x: x.flip(-1))
    return {"dg": stage.result(sums, kinds["dg"]).masked_fill(g < least, 0.0)}


# ------------------------------------------------------------------------------------------------- gram


def gram(problem: Problem, kinds: dict[str, torch.dtype], *inputs: Any) -> Results:
    *upstream, k, beta, G, cu_seqlens = inputs
    stage, repeat = _Stage(problem, k, cu_seqlens, _chunk(problem)), beta.shape[2] // max(1, k.shape[2])
    keys, strength, D = stage.of(k, repeat), _column(stage.of(beta)), stage.decays(stage.of(G), -1)
    products = keys @ keys.mT
    if not upstream:
        return {"A": stage.result(products * D * strength, kinds["A"])}
    N = stage.of(upstream[0]) * D
    through, E = N * products, N * strength
    of_gates = through * strength
    return {
        "dk": stage.result((E + E.mT) @ keys, kinds["dk"], repeat),
        "dbeta": stage.result(through.sum(-1), kinds["dbeta"]),
        "dG": stage.result(of_gates.sum(-1) - of_gates.sum(-2), kinds["dG"]),
    }


# ------------------------------------------------------------------------------------------------ solve


def solve(problem: Problem, kinds: dict[str, torch.dtype], *inputs: Any) -> Results:
    *upstream, A, cu_seqlens = inputs
    size = A.shape[-1]
    stage = _Stage(problem, A, cu_seqlens, size)
    lower = stage.of(A).exact.tril(-1)
    one = torch.eye(size, dtype=lower.dtype, device=lower.device)
    exact = torch.linalg.solve_triangular(lower + one, one.expand_as(lower), upper=False, unitriangular=True)
    a = of_rule.Arithmetic(stage.wide, block=min(size, SUBSTITUTED))
    own, given = exact.flatten(0, 1), lower.flatten(0, 1)
    error = of_rule.SLACK * inverse_error(a, own, given, torch.zeros_like(given), a.sum_of(size)).view_as(exact)
    T = Running(stage.arithmetic, exact, error + stage.arithmetic.tiny * (1 + exact.abs().sum((-1, -2), keepdim=True)))
    if not upstream:
        return {"T": stage.result(T.map(torch.tril), kinds["T"])}
    product = T.mT @ stage.of(upstream[0]) @ T.mT
    return {"dA": stage.result(product.map(lambda x: x.tril(-1)), kinds["dA"])}


# ----------------------------------------------------------------------------------------------- output


def output(problem: Problem, kinds: dict[str, torch.dtype], *inputs: Any) -> Results:
    *upstream, q, k, values, states, G, cu_seqlens = inputs
    scale = float(problem.options[1])
    stage, repeat = _Stage(problem, q, cu_seqlens, _chunk(problem)), values.shape[2] // max(1, q.shape[2])
    chunks = stage.chunks
    queries, keys, new, decay = stage.of(q, repeat), stage.of(k, repeat), stage.of(values), stage.of(G)
    S = Running(stage.arithmetic, states[chunks.state_places])
    start, D, scores = _column(decay.exp()), stage.decays(decay, 0), queries @ keys.mT
    if not upstream:
        out = ((queries @ S) * start + (scores * D) @ new) * scale
        return {"o": stage.result(out, kinds["o"])}
    slope = stage.of(upstream[0]) * scale
    M = (slope @ new.mT) * D
    dq = (slope @ S.mT) * start
    through = (M * scores).map(lambda x: x.tril(-1))
    dG = (queries * dq).sum(-1) + through.sum(-1) - through.sum(-2)
    # In the reference a token's decay to itself comes from a difference of equal numbers, whose gradients cancel.
    dG.error = dG.error + NOISE * (M.size * scores.size).diagonal(dim1=-2, dim2=-1)
    dstates = torch.zeros_like(states)
    dstates[chunks.state_places] = ((queries * start).mT @ slope).stored(stage.wide, kinds["dstates"])
    return {
        "dq": stage.result(dq + M @ keys, kinds["dq"], repeat),
        "dk": stage.result(M.mT @ queries, kinds["dk"], repeat),
        "dvalues": stage.result((scores * D).mT @ slope, kinds["dvalues"]),
        "dstates": dstates,
        "dG": stage.result(dG, kinds["dG"]),
    }


# ------------------------------------------------------------------------------------------------ carry

CARRY_AXES = {"values": 1, "states": 2, "final_state": 2, "dk": 1, "dw": 1, "du": 1, "dstate": 2}


def carry(problem: Problem, kinds: dict[str, torch.dtype], *inputs: Any) -> Results:
    *_, cu_seqlens = inputs
    upstream, tensors = (inputs[:3], inputs[3:8]) if len(inputs) > 6 else ((), inputs[:5])
    bound = CarryBound(wide_dtype(problem.dtypes[0]), kinds, tensors, cu_seqlens, _chunk(problem))
    return bound.gradients(*upstream) if upstream else bound.results()
