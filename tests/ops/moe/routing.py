"""Routing problems, and the answer to them by another way: Python's sort, exact fractions of floats, autograd."""

import math
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.core.guarantee import absolute_error
from adjoint.ops.moe.route import reference

HALF, SINGLE = torch.bfloat16, torch.float32
INFINITY, NAN = math.inf, math.nan


def adversarial(experts: int, dtype: torch.dtype, tokens: int = 11) -> Tensor:
    """Equal logits, duplicated maxima, infinities, NaN, zeros of both signs, gaps of one denormal."""
    generator = torch.Generator().manual_seed(experts)
    logits = (3 * torch.randn(tokens, experts, generator=generator)).to(dtype)
    info = torch.finfo(dtype)
    logits[0] = 1.0
    logits[1] = logits[1].sign()
    logits[2, ::2] = -INFINITY
    logits[3, ::3] = NAN
    logits[4] = -INFINITY
    logits[5, experts // 2] = INFINITY
    logits[6] = NAN
    logits[7] = torch.arange(experts).remainder(17).to(dtype) * info.smallest_normal * info.eps
    logits[8] = 0.0
    logits[8, ::2] = -0.0
    logits[9, -1] = logits[9].max()
    bits = logits.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    bits[3, 0] = torch.full((), INFINITY, dtype=dtype).view(bits.dtype) + 1  # the NaN nearest to infinity
    return logits


def by_rank(values: list[float], among: range | None = None) -> list[int]:
    """Places, largest value first, ties by the lower place, NaN last: Python's own sort."""
    places = range(len(values)) if among is None else among
    return sorted(places, key=lambda place: (math.isnan(values[place]), -values[place], place))


def chosen_by_sorting(
    logits: Tensor, k: int, score: str, bias: Tensor | None, num_groups: int, groups_kept: int
) -> list[list[int]]:
    """The selection, token by token, on lists of Python's floats, which are rounded to the type of the weights."""
    rounded = float if logits.dtype == torch.float64 else _rounded
    selection = []
    for row in logits.double().tolist():
        values = row
        if score == "sigmoid" or bias is not None:
            values = [rounded(s) for s in _scores(row, score)]
            if bias is not None:
                values = [rounded(v + b) for v, b in zip(values, bias.double().tolist(), strict=True)]
        size = len(values) // num_groups
        allowed = set(range(num_groups))
        if groups_kept < num_groups:
            sums = []
            for group in range(num_groups):
                best = by_rank(values, range(group * size, (group + 1) * size))[:2]
                sums.append(rounded(sum(values[place] for place in best)))
            allowed = set(by_rank(sums)[:groups_kept])
        selection.append([place for place in by_rank(values) if place // size in allowed][:k])
    return selection


def _rounded(value: float) -> float:
    """To float32; sums of two float32 are exact in float64 but for their last bits, which do not matter here."""
    return float(torch.tensor(value, dtype=torch.float64).float())


def _scores(row: list[float], score: str) -> list[float]:
    if score == "sigmoid":
        return [1 / (1 + math.exp(-x)) if x > -700 else (0.0 if x == x else x) for x in row]
    there = [x for x in row if x == x]
    top = max(there, default=-INFINITY)
    if math.isinf(top):
        return [NAN] * len(row)
    total = math.fsum(math.exp(x - top) for x in there)
    return [math.exp(x - top) / total if x == x else x for x in row]


def wrongs(logits: Tensor, k: int, backend: str, seed: int = 0, **options: Any) -> list[str]:
    """What is wrong with a call and its gradient, in words; nothing, when all is as stated."""
    score, bias = options.get("score", "softmax"), options.get("bias")
    groups = options.get("num_groups", 1), options.get("groups_kept", 1)
    renormalize = options.get("renormalize", True)
    x = logits.detach().requires_grad_()
    preference = adjoint.Preference(backend=backend)
    weights, indices = adjoint.moe.route(x, k, preference=preference, **options)
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(weights.shape, generator=generator).to(weights)
    (gradient,) = torch.autograd.grad(weights, x, upstream)
    mistakes = []
    rows = logits.detach().reshape(-1, logits.shape[-1]).double()
    as_given = logits.detach().reshape(rows.shape)
    if indices.reshape(-1, k).tolist() != chosen_by_sorting(as_given, k, score, bias, *groups):
        mistakes.append("indices")
    exact = rows.clone().requires_grad_()
    flat = indices.reshape(-1, k)
    truth = reference.weights_of(exact, flat, score, renormalize)
    plan = adjoint.plan(adjoint.moe.route, logits, k, preference=preference, **options)
    measured = plan.guarantee["weights"].error.measure(weights.detach().view(-1, k), truth.detach(), rows, bias)
    if not measured.holds:
        mistakes.append(f"weights: {measured}")
    assert plan.adjoint is not None
    (dtruth,) = torch.autograd.grad(truth, exact, upstream.view(-1, k).double())
    if logits.dtype == torch.float64:  # autograd takes 1 − σ from a rounded σ, which is not exact enough
        dtruth = reference.route_backward(upstream.view(-1, k), rows, flat, score, renormalize)
    statement = plan.adjoint.guarantee["dlogits"].error
    limit = statement.bound(upstream.view(-1, k).double(), rows, flat)  # type: ignore[union-attr]
    finite = truth.detach().isfinite().all(1) & dtruth.isfinite().all(1)
    error = absolute_error(gradient.view(rows.shape), dtruth)[finite]
    if not bool((error <= limit[finite]).all()):
        mistakes.append(f"gradient: {float((error / limit[finite]).max())} of its bound")
    return mistakes
