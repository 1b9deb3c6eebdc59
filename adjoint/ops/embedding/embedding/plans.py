"""Which kernels serve which `embedding` problem, and what they guarantee."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate, Plan, Run, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.device.sums import additions, sum_bound
from adjoint.ops.embedding.embedding import eager
from adjoint.ops.embedding.faults import ID_OUT_OF_RANGE
from adjoint.ops.embedding.plans import SEQUENTIAL, TILE, order_in_words, refuse_to_group

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_NUMBER = 2**31 - 1
"""Ids and rows a lookup can count."""


# ------------------------------------------------------------------------------------------- guarantee


COPY = Derived("0: bytes are copied", lambda ids, weight: torch.zeros(*ids.shape, weight.shape[1], device=ids.device))

OUT_OF_RANGE = {
    "raise": "a zero row, reported with position and value: at once on the CPU, by adjoint.check() on a GPU",
    "zero": "a zero row",
}


def forward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    return {
        "out": Guarantee(
            repeatable=True,
            batch_invariant="token",
            device_invariant=True,
            accumulator="none",
            roundings=0,
            error=COPY,
            special_values="copied, payloads of NaN included",
            out_of_range=OUT_OF_RANGE[problem.options[-1]],
        )
    }


def backward_guarantee(problem: Problem, tile: int) -> dict[str, Guarantee]:
    """For the dense and the sparse gradient; and for a buffer, whose former value is one more term."""
    padding, into = problem.options[-1], problem.op.endswith("_into")
    out = problem.dtypes[2] if into else problem.dtypes[0]

    def bound(gradient: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        """`table` is the weight, or the buffer before the gradient is added."""
        flat = ids.reshape(-1)
        counts = (flat >= 0) & (flat < table.shape[0]) & (flat != padding)
        rows, size = flat[counts].long(), table.shape[0]
        if problem.op.endswith("_sparse"):  # the rows that occur
            present, rows = rows.unique(return_inverse=True)
            size = len(present)
        terms = gradient.reshape(-1, table.shape[1])[counts]
        number = torch.bincount(rows, minlength=size)[:, None]
        before = table if into else gradient.new_zeros(size, table.shape[1])
        exact = before.index_add(0, rows, terms)
        magnitude = before.abs().index_add(0, rows, terms.abs())
        limit = sum_bound(exact, magnitude, number, additions(number, tile) + into, problem.dtypes[0], out)
        return limit.masked_fill_(number == 0, 0)

    accumulator = str(wide_dtype(problem.dtypes[0])).removeprefix("torch.")
    untouched = "is left as it was" if into else "is +0"
    return {
        "dweight": Guarantee(
            repeatable=True,
            batch_invariant="row",
            # Some libraries round float64 to a 16-bit type by way of float32.
            device_invariant=not (problem.dtypes[0] == torch.float64 and out.itemsize == 2),
            accumulator=accumulator,
            roundings=1,
            error=Derived(
                f"½ ulp + γ·Σ|dout| over the row's tokens{' and its former value' * into}, γ = n·u / (1 − n·u), "
                f"u = 2^{_exponent(accumulator)}, n the additions a token goes through",
                bound,
            ),
            domain=f"every input; {order_in_words(tile)}",
            special_values=f"as IEEE sums that begin with +0: a row never referenced {untouched}, no sum is −0",
            out_of_range="no gradient",
        )
    }


def _exponent(accumulator: str) -> int:
    return -53 if accumulator == "float64" else -24


# ------------------------------------------------------------------------------------------ candidates


def _gather_eagerly(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    ids, weight, _, out_of_range = arguments
    if out_of_range == "raise":
        report(ID_OUT_OF_RANGE, ids, (ids < 0) | (ids >= weight.shape[0]))
    eager.gather(ids, weight, outputs[0])


def _refuse_gather(problem: Problem) -> str:
    return f"numbers ids and rows up to {MAX_NUMBER}, there are more" if problem.layout == "past 31 bits" else ""


def _gather(setup: Setup) -> Execute:
    from adjoint.ops.embedding.embedding import kernels

    return kernels.gather(setup)


EMBEDDING = (
    Candidate(
        name="triton.gather",
        backend="triton",
        kernel="embedding_gather",
        revision=1,
        refuse=_refuse_gather,
        guarantee=forward_guarantee,
        setup=_gather,
        schedules=_SCHEDULES,
    ),
    in_pytorch("eager.gather", forward_guarantee, allocating_outputs(_gather_eagerly)),
)


def _backward(form: str, in_eager: Callable[[int], Run]) -> tuple[Candidate, ...]:
    """Tiles first: no distribution of ids is slow. Then strictly sequential sums.

    Args:
        form: "dense", "into" or "sparse": how many rows the last one has is a result, so its kernels wait.
        in_eager: the path in plain PyTorch for a tile.
    """

    def on_kernels(order: str, tile: int) -> Candidate:
        def setup(setup: Setup) -> Execute:
            from adjoint.ops.embedding.embedding import kernels

            setup.add_numeric(**_numeric(tile))
            execute: Execute = getattr(kernels, form)(setup, tile)
            return execute

        return Candidate(
            name=f"triton.{order}",
            backend="triton",
            kernel="embedding_backward",
            revision=1,
            refuse=refuse_to_group,
            guarantee=lambda problem: backward_guarantee(problem, tile),
            setup=setup,
            schedules=_SCHEDULES,
            returns_outputs=form == "sparse",
            waits=lambda problem: form == "sparse",
        )

    def eagerly(order: str, tile: int) -> Candidate:
        return in_pytorch(
            f"eager.{order}",
            lambda problem: backward_guarantee(problem, tile),
            in_eager(tile),
            lambda problem: _numeric(tile),
            waits=lambda problem: True,
        )

    orders = (("tiles", TILE), ("sequential", SEQUENTIAL))
    return (*(on_kernels(*order) for order in orders), *(eagerly(*order) for order in orders))


def _numeric(tile: int) -> dict[str, Any]:
    return {"tile": "none" if tile == SEQUENTIAL else tile}


EMBEDDING_BACKWARD = _backward(
    "dense", lambda tile: allocating_outputs(lambda plan, a, out, w: eager.dense(*a, tile=tile, out=out[0]))
)
EMBEDDING_BACKWARD_INTO = _backward(
    "into", lambda tile: allocating_outputs(lambda plan, a, out, w: eager.into(*a, tile=tile))
)
EMBEDDING_BACKWARD_SPARSE = _backward("sparse", lambda tile: lambda plan, a, out, w: eager.sparse(*a, tile=tile))
