"""Whether a contender's result is right: against the float64 reference, every element, piece by piece."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from adjoint.bench.contenders import Contender, Task
from adjoint.core.guarantee import Empirical, Guarantee, Measurement

OTHERS_LIMIT = 2e-2
"""The largest ‖output − exact‖ / ‖exact‖ of a contender that promises nothing."""

_PIECE = 2**24  # elements of one tensor that are compared at once, so that float64 copies stay small


@dataclass(frozen=True)
class Verdict:
    """The norm-relative error, the error its guarantee states where there is one, and why it fails."""

    error: float
    guarantee: str = ""
    failure: str = ""


def poison(contender: Contender) -> None:
    """Fills the memory a contender writes to with NaN: what it leaves unwritten will not pass."""
    for output in contender.outputs:
        output.fill_(float("nan"))


def check(task: Task, outputs: tuple[Tensor, ...], guarantee: tuple[Guarantee, ...] | None) -> Verdict:
    """Compares outputs with the reference on the same inputs."""
    squared_errors: list[float] = []
    squared_norms: list[float] = []
    worst: list[Measurement | None] = []
    for piece in _pieces(task, outputs):
        arguments = tuple(tensor[piece].double() for tensor in task.arguments)
        exact = task.reference(*arguments)
        if len(exact) != len(outputs):
            return Verdict(math.nan, failure=f"{len(outputs)} outputs instead of {len(exact)}")
        if not squared_errors:
            squared_errors, squared_norms, worst = [0.0] * len(exact), [0.0] * len(exact), [None] * len(exact)
        for index, (whole, truth) in enumerate(zip(outputs, exact, strict=True)):
            output = whole[piece]
            if output.shape != truth.shape:
                return Verdict(math.nan, failure=f"shape {tuple(output.shape)} instead of {tuple(truth.shape)}")
            squared_errors[index] += float((output.double() - truth).square().sum())
            squared_norms[index] += float(truth.square().sum())
            if guarantee is not None:
                measured = guarantee[index].error.measure(output, truth, *arguments)
                best = worst[index]
                if best is None or not measured.value <= best.value:
                    worst[index] = measured

    errors = [math.sqrt(e / n) if n else e for e, n in zip(squared_errors, squared_norms, strict=True)]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    if guarantee is None:
        passed = error <= OTHERS_LIMIT  # False for NaN
        return Verdict(error, failure="" if passed else f"relative error {error:.2g}, limit {OTHERS_LIMIT:g}")
    found = [
        # A norm is a matter of the whole tensor, not of its worst piece.
        Measurement(relative, promise.error.ceiling, "relative") if isinstance(promise.error, Empirical) else measured
        for promise, measured, relative in zip(guarantee, worst, errors, strict=True)
        if measured is not None
    ]
    broken = [str(measured) for measured in found if not measured.holds]
    shown = max(found, key=lambda measured: measured.value / measured.limit)
    return Verdict(error, f"{shown.value:.3g} {shown.unit}", "; ".join(broken))


def _pieces(task: Task, outputs: tuple[Tensor, ...]) -> Iterator[tuple[slice, ...]]:
    """Index expressions that cut every tensor of a task along the axis its items follow each other."""
    axis = task.workload.subject.batch_axis
    items = task.inputs[0].shape[axis]
    largest = max(tensor.numel() for tensor in (*task.inputs, *outputs))
    step = max(1, _PIECE * items // max(1, largest))
    for begin in range(0, items, step):
        yield (slice(None),) * axis + (slice(begin, begin + step),)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
