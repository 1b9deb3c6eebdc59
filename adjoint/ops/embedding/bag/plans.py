"""Which kernels serve which `embedding_bag` problem, and what they guarantee."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import additions, sum_bound
from adjoint.ops.embedding.bag import eager
from adjoint.ops.embedding.plans import TILE, order_in_words, refuse_to_group

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

WEIGHTS_BLOCK = 128
"""Columns the gradient of per-sample weights takes at once: part of its bits."""

NEED_WEIGHT, NEED_WEIGHTS = 1, 2
"""Bits of the gradients a backward computes: the table's, and the per-sample weights'."""


def forward_options(problem: Problem) -> tuple[str, int, bool]:
    """mode, padding, include_last_offset; in a backward they stand behind the number of rows."""
    first = int(problem.op == "embedding_bag_backward")
    mode, padding, include_last_offset = problem.options[first : first + 3]
    return mode, padding, include_last_offset


def mode_of(problem: Problem) -> str:
    return forward_options(problem)[0]


# ------------------------------------------------------------------------------------------- guarantee

_OUT_OF_RANGE = (
    "an entry that counts for nothing, reported with position and value: at once on the CPU, by adjoint.check() "
    "on a GPU; offsets out of order are reported likewise, and bags are then what lies within bounds"
)


def _bags(ids: Tensor, weight: Tensor, offsets: Tensor | None, problem: Problem) -> eager.Bags:
    _, padding, include_last_offset = forward_options(problem)
    return eager.find_bags(ids, offsets, weight.shape[0], padding, include_last_offset, raises=False)


def _factors(bags: eager.Bags, problem: Problem, per_sample_weights: Tensor | None) -> Tensor | None:
    if mode_of(problem) == "mean":
        if len(bags.starts) == 0:
            return torch.zeros(len(bags.ids), dtype=torch.float64, device=bags.ids.device)
        return 1 / bags.used.clamp_min(1).double()[bags.bag_of]
    return None if per_sample_weights is None else per_sample_weights.reshape(-1)


def _forward_bound(problem: Problem) -> Callable[..., Tensor]:
    def bound(
        ids: Tensor, weight: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        bags = _bags(ids, weight, offsets, problem)
        shape = (len(bags.starts), weight.shape[1])
        if mode_of(problem) == "max":
            return weight.new_zeros(shape)
        terms = weight[torch.where(bags.counts, bags.ids, 0).long()] * bags.counts[:, None]
        factors = _factors(bags, problem, per_sample_weights)
        if factors is not None:
            terms = terms * factors[:, None]
        exact = terms.new_zeros(shape).index_add_(0, bags.bag_of, terms)
        magnitude = terms.new_zeros(shape).index_add_(0, bags.bag_of, terms.abs())
        count = (bags.ends - bags.starts)[:, None]
        steps = additions(count, TILE) + 2  # a product or a division besides
        return sum_bound(exact, magnitude, count + 2, steps, problem.dtypes[0])

    return bound


def _weight_bound(problem: Problem) -> Callable[..., Tensor]:
    def bound(
        dout: Tensor,
        ids: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        bags = _bags(ids, weight, offsets, problem)
        entries = bags.counts.nonzero()[:, 0]
        rows = bags.ids[entries].long()
        terms = dout[bags.bag_of[entries]]
        factors = _factors(bags, problem, per_sample_weights)
        if factors is not None:
            terms = terms * factors[entries][:, None]
        if mode_of(problem) == "max":
            extra = torch.empty(len(bags.starts), weight.shape[1], dtype=torch.int32, device=ids.device)
            eager.forward(bags, weight, None, "max", TILE, torch.empty_like(weight[:0].new_empty(extra.shape)), extra)
            terms = terms.masked_fill(extra[bags.bag_of[entries]] != entries[:, None], 0)
        exact = torch.zeros_like(weight).index_add_(0, rows, terms)
        magnitude = torch.zeros_like(weight).index_add_(0, rows, terms.abs())
        count = torch.bincount(rows, minlength=weight.shape[0])[:, None]
        return sum_bound(exact, magnitude, count + 3, additions(count, TILE) + 3, problem.dtypes[0])

    return bound


def _weights_bound(problem: Problem) -> Callable[..., Tensor]:
    def bound(
        dout: Tensor,
        ids: Tensor,
        weight: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        bags = _bags(ids, weight, offsets, problem)
        rows = torch.where(bags.counts, bags.ids, 0).long()
        products = dout[bags.bag_of] * weight[rows] * bags.counts[:, None]
        columns = torch.tensor(weight.shape[1], device=ids.device)
        steps = columns // WEIGHTS_BLOCK + 9
        magnitude = products.abs().sum(1)
        return sum_bound(products.sum(1), magnitude, columns, steps, problem.dtypes[0]).view(ids.shape)

    return bound


def _promise(problem: Problem, item: str, error: Derived, roundings: int = 1, **words: Any) -> Guarantee:
    accumulator = str(wide_dtype(problem.dtypes[0])).removeprefix("torch.")
    return Guarantee(
        repeatable=True,
        batch_invariant=item,
        device_invariant=True,
        accumulator=accumulator,
        roundings=roundings,
        error=error,
        **words,
    )


_SUM = "½ ulp + γ·Σ|terms|, γ = n·u / (1 − n·u), n the roundings a term goes through"


def forward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    mode = mode_of(problem)
    error = Derived("0: the largest row's value is copied" if mode == "max" else _SUM, _forward_bound(problem))
    ties = "the first of equal entries; NaN above every number" if mode == "max" else ""
    extra = Derived("0: integers", lambda *inputs: torch.zeros(()))
    return {
        "out": _promise(
            problem,
            "bag",
            error,
            0 if mode == "max" else 1,
            domain=f"every input; {order_in_words(TILE).replace('row', 'bag').replace('tokens', 'entries')}",
            special_values="as IEEE sums that begin with +0; an empty bag is +0",
            out_of_range=_OUT_OF_RANGE,
            ties=ties,
        ),
        "extra": _promise(problem, "bag", extra, 0, domain="what the backward needs to know"),
    }


def backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    words: dict[str, Any] = {"special_values": "as IEEE sums that begin with +0", "out_of_range": "no gradient"}
    return {
        "dweight": _promise(
            problem,
            "row",
            Derived(_SUM, _weight_bound(problem)),
            domain=f"every input; {order_in_words(TILE).replace('tokens', 'entries')}",
            **words,
        ),
        "dper_sample_weights": _promise(
            problem,
            "entry",
            Derived(_SUM, _weights_bound(problem)),
            domain=f"every input; columns {WEIGHTS_BLOCK} apart are added in their order, then halves",
            **words,
        ),
    }


# ------------------------------------------------------------------------------------------ candidates


def _forward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    ids, weight, offsets, per_sample_weights, mode, padding, include_last_offset, _ = arguments
    bags = eager.find_bags(ids, offsets, weight.shape[0], padding, include_last_offset, raises=True)
    eager.forward(bags, weight, per_sample_weights, mode, TILE, *outputs)


def _backward(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    dout, ids, weight, offsets, per_sample_weights, extra, rows, mode, padding, include_last_offset, need = arguments
    bags = eager.find_bags(ids, offsets, rows, padding, include_last_offset, raises=False)
    if need & NEED_WEIGHT:
        eager.backward(bags, dout, per_sample_weights, extra, mode, TILE, outputs[0])
    if need & NEED_WEIGHTS:
        eager.weights_backward(bags, dout, weight, WEIGHTS_BLOCK, outputs[1])


def _numeric(problem: Problem) -> dict[str, Any]:
    sums_weights = problem.op == "embedding_bag_backward" and problem.options[-1] & NEED_WEIGHTS
    return {"mode": mode_of(problem), "tile": TILE} | ({"weights_block": WEIGHTS_BLOCK} if sums_weights else {})


def _candidates(
    direction: str, guarantee: Callable[[Problem], dict[str, Guarantee]], in_eager: Any
) -> tuple[Candidate, ...]:
    def setup(setup: Setup) -> Execute:
        from adjoint.ops.embedding.bag import kernels

        setup.add_numeric(**_numeric(setup.problem))
        return kernels.forward(setup) if direction == "forward" else kernels.backward(setup)

    return (
        Candidate(
            name="triton.bags",
            backend="triton",
            kernel=f"embedding_bag_{direction}",
            revision=1,
            refuse=refuse_to_group,
            guarantee=guarantee,
            setup=setup,
            schedules=_SCHEDULES,
        ),
        in_pytorch("eager.bags", guarantee, allocating_outputs(in_eager), _numeric, waits=lambda problem: True),
    )


EMBEDDING_BAG = _candidates("forward", forward_guarantee, _forward)
EMBEDDING_BAG_BACKWARD = _candidates("backward", backward_guarantee, _backward)
