"""Which kernels serve which `embedding_bag` problem, and what they guarantee."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, Compute, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import IN_RANGE, group_sums_bound, invariant_guarantee, sum_bound
from adjoint.ops.embedding.bag import eager
from adjoint.ops.embedding.plans import TILE, order_in_words, refuse_to_group

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

WEIGHTS_BLOCK = 128
"""The columns that the gradient of per-sample weights takes at once. They are part of its bits."""

NEED_WEIGHT, NEED_WEIGHTS = 1, 2
"""The bits of the gradients in the mask of a backward: those of the table and of the per-sample weights."""


def forward_options(problem: Problem) -> tuple[str, int, bool]:
    """mode, padding and include_last_offset. In a backward they come after the number of rows."""
    first = int(problem.op == "embedding_bag_backward")
    mode, padding, include_last_offset = problem.options[first : first + 3]
    return mode, padding, include_last_offset


# ------------------------------------------------------------------------------------------- guarantee

_OUT_OF_RANGE = (
    "an entry that counts for nothing, reported with position and value: at once on the CPU, by adjoint.check() "
    "on a GPU; offsets out of order are reported likewise, and bags are then what lies within bounds"
)
_SUM = "½ ulp + γ·Σ|terms|, γ = n·u / (1 − n·u), n the roundings a term goes through"


def _read(
    problem: Problem, ids: Tensor, weight: Tensor, offsets: Tensor | None = None, samples: Tensor | None = None
) -> tuple[str, eager.Bags, Tensor, Tensor]:
    """The mode, the bags, which entries count, and the factors of these entries."""
    mode, padding, include_last_offset = forward_options(problem)
    bags = eager.find_bags(ids, offsets, weight.shape[0], padding, include_last_offset, raises=False)
    entries = bags.counts.nonzero()[:, 0]
    if mode == "mean":
        return mode, bags, entries, 1 / bags.used.double()[bags.bag_of[entries]]
    factors = torch.ones_like(ids, dtype=torch.float64) if samples is None else samples
    return mode, bags, entries, factors.reshape(-1)[entries]


def _forward_bound(problem: Problem, ids: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    mode, bags, entries, factors = _read(problem, ids, weight, *others)
    number = len(bags.starts)
    if mode == "max":
        return weight.new_zeros(number, weight.shape[1])
    rows, bag = weight[bags.ids[entries].long()], bags.bag_of[entries]
    # A product or a division besides.
    bound = group_sums_bound(
        rows * factors[:, None], bag, number, TILE, problem.dtypes[0], roundings=2, count=bags.ends - bags.starts
    )
    if mode == "mean":  # sums are divided when all is added
        sums = rows.new_zeros(bound.shape).index_add_(0, bag, rows.abs())
        bound = bound.masked_fill(sums + bound > torch.finfo(wide_dtype(problem.dtypes[0])).max, torch.inf)
    return bound


def _weight_bound(problem: Problem, dout: Tensor, ids: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    mode, bags, entries, factors = _read(problem, ids, weight, *others)
    bag = bags.bag_of[entries]
    terms = dout[bag] * factors[:, None]
    if mode == "max":
        winners = torch.empty(dout.shape, dtype=torch.int32, device=ids.device)
        eager.forward(bags, weight, None, "max", TILE, torch.empty_like(dout), winners)
        terms = terms.masked_fill(winners[bag] != entries[:, None], 0)
    rows = bags.ids[entries].long()
    return group_sums_bound(terms, rows, weight.shape[0], TILE, problem.dtypes[0], roundings=3)


def _weights_bound(problem: Problem, dout: Tensor, ids: Tensor, weight: Tensor, *others: Tensor | None) -> Tensor:
    _, bags, entries, _ = _read(problem, ids, weight, *others)
    products = dout.new_zeros(ids.numel(), weight.shape[1])
    products[entries] = dout[bags.bag_of[entries]] * weight[bags.ids[entries].long()]
    columns = torch.tensor(weight.shape[1], device=ids.device)
    steps, magnitude = columns // WEIGHTS_BLOCK + 9, products.abs().sum(1)
    return sum_bound(products.sum(1), magnitude, columns, steps, problem.dtypes[0]).view(ids.shape)


def forward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, is_maximum = problem.dtypes[0], forward_options(problem)[0] == "max"
    error = "0: the largest row's value is copied" if is_maximum else _SUM
    integers = Derived("0: integers", lambda *inputs: torch.zeros((), device="cpu"))
    order = order_in_words(TILE).replace("row", "bag").replace("tokens", "entries")
    return {
        "out": invariant_guarantee(
            "bag",
            Derived(error, partial(_forward_bound, problem)),
            dtype,
            roundings=int(not is_maximum),
            domain="every input" if is_maximum else f"{IN_RANGE}; {order}",
            special_values="as IEEE sums that begin with +0; an empty bag is +0",
            out_of_range=_OUT_OF_RANGE,
            ties="the first of equal entries; NaN above every number" if is_maximum else "",
        ),
        "extra": invariant_guarantee("bag", integers, dtype, roundings=0, domain="what the backward needs to know"),
    }


def backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    orders = {
        "dweight": ("row", _weight_bound, order_in_words(TILE).replace("tokens", "entries")),
        "dper_sample_weights": (
            "entry", _weights_bound, f"columns {WEIGHTS_BLOCK} apart are added in their order, then halves"
        ),
    }  # fmt: skip
    return {
        name: invariant_guarantee(
            item,
            Derived(_SUM, partial(bound, problem)),
            problem.dtypes[0],
            domain=f"{IN_RANGE}; {order}",
            special_values="as IEEE sums that begin with +0",
            out_of_range="no gradient",
        )
        for name, (item, bound, order) in orders.items()
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
    numbers = {"mode": forward_options(problem)[0], "tile": TILE}
    return {**numbers, "weights_block": WEIGHTS_BLOCK} if sums_weights else numbers


def _candidates(
    direction: str, guarantee: Callable[[Problem], dict[str, Guarantee]], in_eager: Compute
) -> tuple[Candidate, ...]:
    return (
        Candidate(
            name="triton.bags",
            backend="triton",
            kernel=f"embedding_bag_{direction}",
            revision=1,
            refuse=refuse_to_group,
            guarantee=guarantee,
            setup=imported(f"adjoint.ops.embedding.bag.kernels:{direction}"),
            schedules=_SCHEDULES,
        ),
        in_pytorch("eager.bags", guarantee, allocating_outputs(in_eager), _numeric, waits=lambda problem: True),
    )


EMBEDDING_BAG = _candidates("forward", forward_guarantee, _forward)
EMBEDDING_BAG_BACKWARD = _candidates("backward", backward_guarantee, _backward)
