"""Which kernels serve which embedding problem, and what they guarantee."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import Run, in_pytorch, writing
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.kernels import why_not_triton
from adjoint.core.plan import Candidate, Plan
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.device import grouping
from adjoint.device.sums import additions, sum_bound, wide
from adjoint.ops.embedding import eager

SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

TILE_BITS = 5
TILE = 1 << TILE_BITS
"""Tokens of a tile, and tiles of a tile of the next level: part of every sum's bits."""

SEQUENTIAL = 2**30
"""The tile of the plans that have none: longer than any group."""

WEIGHTS_BLOCK = 128
"""Columns the gradient of per-sample weights takes at once: part of its bits."""

NEED_WEIGHT, NEED_WEIGHTS = 1, 2
"""Bits of the gradients a bag's backward computes: the table's, and the per-sample weights'."""

MAX_NUMBER = 2**31 - 1
"""Ids and rows a lookup can count."""


def triton_part(module: str) -> Any:
    """A module that imports Triton, on first use."""
    from importlib import import_module

    return import_module(f"adjoint.ops.embedding.{module}")


def refuse(problem: Problem) -> str:
    """Why the kernels cannot serve a problem."""
    if problem.layout == "past 31 bits":
        return f"numbers ids and rows up to {MAX_NUMBER}, there are more"
    if problem.op != "embedding":
        count, rows = problem.sizes[:2]
        if count > grouping.MAX_COUNT:
            return f"groups up to {grouping.MAX_COUNT} ids, these are {count}"
        if rows > grouping.MAX_GROUPS:
            return f"groups by at most {grouping.MAX_GROUPS} rows, these are {rows}"
    return why_not_triton(problem.device)


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
            out_of_range=OUT_OF_RANGE[problem.options[0]],
        )
    }


def order_in_words(tile: int) -> str:
    if tile == SEQUENTIAL:
        return "every row's tokens are added in their order"
    return f"a row's tokens are added in their order within tiles of {tile}, tiles in a fixed tree of their number"


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
            found, rows = rows.unique(return_inverse=True)
            size = len(found)
        terms = gradient.reshape(-1, table.shape[1])[counts]
        number = torch.bincount(rows, minlength=size)[:, None]
        before = table if into else gradient.new_zeros(size, table.shape[1])
        exact = before.index_add(0, rows, terms)
        magnitude = before.abs().index_add(0, rows, terms.abs())
        limit = sum_bound(exact, magnitude, number, additions(number, tile) + into, problem.dtypes[0], out)
        return limit.masked_fill_(number == 0, 0)

    accumulator = str(wide(problem.dtypes[0])).removeprefix("torch.")
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


def tiled(problem: Problem, tile: int) -> dict[str, Any]:
    return {"tile": "none" if tile == SEQUENTIAL else tile}


def _report(ids: Tensor, rows: int) -> None:
    from adjoint.core.errors import report
    from adjoint.ops.embedding.faults import ID_OUT_OF_RANGE

    report(ID_OUT_OF_RANGE, ids, (ids < 0) | (ids >= rows))


def _gather_eagerly(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    ids, weight, out_of_range = arguments
    if out_of_range == "raise":
        _report(ids, weight.shape[0])
    eager.gather(ids, weight, outputs[0])


def _forward_workspace(problem: Problem) -> int:
    if "ids" not in problem.layout:
        return 0
    return int(triton_part("launch").copied_ids(problem.sizes[0], problem.dtypes[1]).bytes)


EMBEDDING = (
    Candidate(
        name="triton.gather",
        backend="triton",
        kernel="embedding_gather",
        revision=1,
        refuse=refuse,
        guarantee=forward_guarantee,
        run=writing(lambda plan, a, out, workspace: triton_part("launch").gather(plan, a[0], a[1], out[0], workspace)),
        prepare=lambda plan: triton_part("launch").prepare_gather(plan),
        schedules=SCHEDULES,
        workspace_bytes=_forward_workspace,
    ),
    in_pytorch("eager.gather", forward_guarantee, writing(_gather_eagerly)),
)


def _triton(name: str, tile: int, run: Run, waits: bool) -> Candidate:
    return Candidate(
        name=f"triton.{name}",
        backend="triton",
        kernel="embedding_backward",
        revision=1,
        refuse=refuse,
        guarantee=lambda problem: backward_guarantee(problem, tile),
        run=run,
        prepare=lambda plan: triton_part("backward").sums(plan, tile).prepare(),
        numeric=lambda problem: tiled(problem, tile),
        schedules=SCHEDULES,
        workspace_bytes=lambda problem: triton_part("backward").regions(problem, tile).bytes,
        waits=lambda problem: waits,
    )


def _eager(name: str, tile: int, run: Run) -> Candidate:
    return in_pytorch(
        f"eager.{name}",
        lambda problem: backward_guarantee(problem, tile),
        run,
        lambda problem: tiled(problem, tile),
        waits=lambda problem: True,
    )


def _candidates(
    in_triton: Callable[[int], Run], in_pytorch: Callable[[int], Run], waits: bool = False
) -> tuple[Candidate, ...]:
    """Tiles first: no distribution of ids is slow. Then strictly sequential sums.

    Args:
        waits: whether the kernels wait for the device, because how many rows there are is a result.
    """
    orders = (("tiles", TILE), ("sequential", SEQUENTIAL))
    return (
        *(_triton(name, tile, in_triton(tile), waits) for name, tile in orders),
        *(_eager(name, tile, in_pytorch(tile)) for name, tile in orders),
    )


def _sparse_eagerly(tile: int) -> Run:
    def run(plan: Plan, arguments: tuple[Any, ...], outputs: Any, workspace: Any) -> tuple[Tensor, ...]:
        gradient, ids, rows, padding = arguments
        found, sums = eager.gradient_rows(gradient, ids, rows, padding, tile)
        return found, sums.to(gradient.dtype)

    return run


EMBEDDING_BACKWARD = _candidates(
    lambda tile: writing(lambda plan, a, out, w: triton_part("backward").dense(plan, tile, a, out[0], w)),
    lambda tile: writing(lambda plan, a, out, w: eager.dense(a[0], a[1], a[2], a[3], tile, out[0])),
)
EMBEDDING_BACKWARD_INTO = _candidates(
    lambda tile: writing(lambda plan, a, out, w: triton_part("backward").into(plan, tile, a, w)),
    lambda tile: writing(lambda plan, a, out, w: eager.into(a[0], a[1], a[2], a[3], tile)),
)
EMBEDDING_BACKWARD_SPARSE = _candidates(
    lambda tile: lambda plan, a, out, w: triton_part("backward").sparse(plan, tile, a, w),
    _sparse_eagerly,
    waits=True,
)
