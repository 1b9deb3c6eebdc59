"""Which kernels serve which `embedding` problem, and what they guarantee."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.guarantee import Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.device.sums import IN_RANGE, copy_guarantee, group_sums_bound, invariant_guarantee, sum_error
from adjoint.ops.embedding.embedding import eager
from adjoint.ops.embedding.plans import SEQUENTIAL, TILE, order_in_words, refuse_to_group, tile_in_words
from adjoint.ops.embedding.table import ID_OUT_OF_RANGE, is_counted

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_NUMBER = 2**31 - 1
"""The most ids, and rows, that a lookup can count."""

OUT_OF_RANGE = {
    "raise": "a zero row, reported with position and value: at once on the CPU, by adjoint.check() on a GPU",
    "zero": "a zero row",
}


def forward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    return copy_guarantee("token", OUT_OF_RANGE[problem.options[-1]])


def backward_guarantee(problem: Problem, tile: int) -> dict[str, Guarantee]:
    """The promises of the dense and the sparse gradient, and of a buffer, whose former value is one more term."""
    padding, into = problem.options[-1], problem.op.endswith("_into")
    dtype, out = problem.dtypes[0], problem.dtypes[2 if into else 0]

    def bound(gradient: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        """`table` is the weight, or the buffer before the gradient is added."""
        size, columns = table.shape
        flat = ids.reshape(-1)
        counts = is_counted(flat, size, padding)
        rows, terms = flat[counts].long(), gradient.reshape(-1, columns)[counts]
        if problem.op.endswith("_sparse"):  # the rows that occur
            present, rows = rows.unique(return_inverse=True)
            size = len(present)
        return group_sums_bound(terms, rows, size, tile, dtype, former=table if into else None, out=out)

    untouched = "is left as it was" if into else "is +0"
    return {
        "dweight": invariant_guarantee(
            "row",
            sum_error(bound, f"dout| over the row's tokens{' and its former value' * into}", "a token", dtype),
            dtype,
            # Some libraries round float64 to a 16-bit type through float32.
            device_invariant=not (dtype == torch.float64 and out.itemsize == 2),
            domain=f"{IN_RANGE}; {order_in_words(tile)}",
            special_values=f"as IEEE sums that begin with +0: a row never referenced {untouched}, no sum is −0",
            out_of_range="no gradient",
        )
    }


# ------------------------------------------------------------------------------------------ candidates


def _gather_eagerly(
    plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...] | None, _: Tensor | None
) -> tuple[Tensor, ...]:
    ids, weight, _, out_of_range = arguments
    out, are_right = eager.gather(ids, weight, outputs[0] if outputs else None)
    if out_of_range == "raise" and not are_right:
        report(ID_OUT_OF_RANGE, ids, (ids < 0) | (ids >= weight.shape[0]))
    return (out,)


def _refuse_gather(problem: Problem) -> str:
    return f"numbers ids and rows up to {MAX_NUMBER}, there are more" if problem.layout == "past 31 bits" else ""


EMBEDDING = (
    Candidate(
        name="triton.gather",
        backend="triton",
        kernel="embedding_gather",
        revision=1,
        refuse=_refuse_gather,
        guarantee=forward_guarantee,
        setup=imported("adjoint.ops.embedding.embedding.kernels:gather"),
        schedules=_SCHEDULES,
    ),
    in_pytorch("eager.gather", forward_guarantee, _gather_eagerly),
)


def _backward(form: str) -> tuple[Candidate, ...]:
    """The candidates of a backward: first tiles, which are slow for no distribution of ids, then sequential sums.

    Args:
        form: "dense", "into" or "sparse". The number of rows of a sparse gradient is a result, so its kernels wait.
    """
    orders = {"tiles": TILE, "sequential": SEQUENTIAL}

    def on_kernels(order: str, tile: int) -> Candidate:
        return Candidate(
            name=f"triton.{order}",
            backend="triton",
            kernel="embedding_backward",
            revision=1,
            refuse=refuse_to_group,
            guarantee=partial(backward_guarantee, tile=tile),
            setup=imported(f"adjoint.ops.embedding.embedding.kernels:{form}", tile=tile),
            schedules=_SCHEDULES,
            returns_outputs=form == "sparse",
            waits=lambda problem: form == "sparse",
        )

    def eagerly(order: str, tile: int) -> Candidate:
        runs = {
            "dense": lambda plan, a, out, w: (eager.dense(*a, tile=tile, out=out[0] if out else None),),
            "into": allocating_outputs(lambda plan, a, out, w: eager.into(*a, tile=tile)),
            "sparse": lambda plan, a, out, w: eager.sparse(*a, tile=tile),
        }
        return in_pytorch(
            f"eager.{order}",
            partial(backward_guarantee, tile=tile),
            runs[form],
            lambda problem: {"tile": tile_in_words(tile)},
            waits=lambda problem: True,
        )

    return tuple(candidate(*order) for candidate in (on_kernels, eagerly) for order in orders.items())


EMBEDDING_BACKWARD, EMBEDDING_BACKWARD_INTO, EMBEDDING_BACKWARD_SPARSE = map(_backward, ("dense", "into", "sparse"))
