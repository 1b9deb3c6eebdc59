"""The check of a contender's result against the float64 reference: every element, piece by piece."""

import math
from dataclasses import dataclass

from torch import Tensor

from adjoint.bench.contenders import Contender, Task
from adjoint.contract.inputs import poison as fill_with_poison
from adjoint.contract.inputs import widened
from adjoint.core.guarantee import Empirical, Guarantee, Measurement

OTHERS_LIMIT = 2e-2
"""A contender that promises nothing counts as accurate if its ‖output − exact‖ / ‖exact‖ is at most this."""

WRONG_LIMIT = 0.5
"""The largest such error that counts as inaccurate. A contender with a larger one did other work."""


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison.

    Attributes:
        error: the norm-relative error.
        guarantee: the error in the terms of the guarantee, if there is one.
        failure: why the result is wrong.
        inaccuracy: how large the error of an inaccurate result is. Such a result promises nothing and is not wrong.
        ties: the number of items in which it chose equal values in another order than the reference; None if there is
            no choice.
    """

    error: float
    guarantee: str = ""
    failure: str = ""
    inaccuracy: str = ""
    ties: int | None = None


def poison(contender: Contender) -> None:
    """Poisons the memory that a contender writes to, so that elements that it does not write fail the check."""
    for output in contender.outputs:
        fill_with_poison(output)


def check(
    task: Task,
    outputs: tuple[Tensor, ...],
    guarantee: tuple[Guarantee, ...] | None,
    choices: tuple[Tensor, ...] = (),
) -> Verdict:
    """Compares outputs with those of the reference for the same inputs and the same choices among equal values."""
    count, chosen = len(outputs), task.workload.chosen if choices else None
    ties = None if chosen is None else 0
    squared_errors: list[float] = []
    squared_norms: list[float] = []
    worst: list[Measurement | None] = []
    compared = [0] * len(outputs)
    for piece, (narrow, both) in enumerate(task.workload.subject.cut(task.arguments, (*outputs, *choices))):
        arguments, parts = widened(narrow), both[:count]
        if chosen is None:
            exact = task.exact(piece, arguments)
        else:
            exact, differing = chosen(arguments, both[count:])
            ties = (ties or 0) + differing
        if len(exact) != len(outputs):
            return Verdict(math.nan, failure=f"{len(outputs)} outputs instead of {len(exact)}")
        if not squared_errors:
            squared_errors, squared_norms, worst = [0.0] * len(exact), [0.0] * len(exact), [None] * len(exact)
        for index, (output, truth) in enumerate(zip(parts, exact, strict=True)):
            compared[index] += output.numel()
            if output.shape != truth.shape:
                return Verdict(math.nan, failure=f"shape {tuple(output.shape)} instead of {tuple(truth.shape)}")
            squared_errors[index] += float((output.double() - truth).square().sum())
            squared_norms[index] += float(truth.square().sum())
            if guarantee is not None:
                measured = guarantee[index].error.measure(output, truth, *arguments)
                best = worst[index]
                if best is None or not measured.value <= best.value:
                    worst[index] = measured

    for number, output in zip(compared, outputs, strict=True):
        if number != output.numel():
            return Verdict(math.nan, failure=f"{number} of {output.numel()} elements were compared")
    errors = [math.sqrt(e / n) if n else e for e, n in zip(squared_errors, squared_norms, strict=True)]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    if guarantee is None:
        if error <= OTHERS_LIMIT:
            return Verdict(error, ties=ties)
        excess = f"relative error {error:.2g}, limit {OTHERS_LIMIT:g}"
        if error <= WRONG_LIMIT:  # False for NaN
            return Verdict(error, inaccuracy=excess, ties=ties)
        return Verdict(error, failure=excess, ties=ties)
    promised = [
        # A norm is that of the whole tensor, not of its worst piece.
        Measurement(relative, promise.error.ceiling, "relative") if isinstance(promise.error, Empirical) else measured
        for promise, measured, relative in zip(guarantee, worst, errors, strict=True)
        if measured is not None
    ]
    recorded = [
        Measurement(relative, promise.recorded.ceiling, "relative, of what is recorded")
        for promise, relative in zip(guarantee, errors, strict=True)
        if promise.recorded is not None
    ]
    broken = [str(measured) for measured in (*promised, *recorded) if not measured.holds]
    shown = max(promised, key=_share)
    return Verdict(error, f"{shown.value:.3g} {shown.unit}", "; ".join(broken))


def _share(measured: Measurement) -> float:
    """The share of its limit that an error takes. If the limit is 0, the share is 0 or infinite."""
    if measured.limit:
        return measured.value / measured.limit
    return math.inf if measured.value else 0.0
