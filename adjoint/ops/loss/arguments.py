"""What both losses take besides the logits: labels and options, their checks, and the error of a label's value."""

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.arguments import require_flag, require_floating, require_ids, require_integer
from adjoint.core.errors import ArgumentError, Fault, register_fault
from adjoint.core.problem import short, wide_dtype

REDUCTIONS = ("mean", "sum", "none")

SMALLEST, LARGEST = 2.0**-126, 2.0**127
"""The smallest and the largest softcap; LARGEST also limits z_loss. float32 can represent both numbers."""

_POSITIVE = "None or a positive number, from 2^-126 to 2^127"

MAX_CLASSES = 2**24
"""The most columns of logits for which the kernels' integers and sums are made."""


class Loss(NamedTuple):
    """The options, in the order in which operators take them; a softcap of 0 is none."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    reduction: str
    shift: bool
    log_probabilities: bool

    @property
    def is_total(self) -> bool:
        """Whether one number is all there is: then every token has the same upstream gradient, whatever it is."""
        return self.reduction != "none" and not self.log_probabilities


PLAIN = Loss(-100, 0.0, 0.0, 0.0, "mean", False, False)
"""The options of a call that names none."""

OPTIONS = (
    "int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction, bool shift, "
    "bool log_probabilities"
)


def _label_fault(op: str, classes: str) -> Fault:
    return register_fault(
        f"{op}: labels must be ignore_index, or at least 0 and less than {classes}, "
        "got {value} at position {position} (counted in order)"
    )


LABEL_OUT_OF_RANGE = {
    "cross_entropy": _label_fault("cross_entropy", "the last axis of logits"),
    "linear_cross_entropy": _label_fault("linear_cross_entropy", "the number of rows of weight"),
}


def options(
    op: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    reduction: str,
    shift: bool,
    log_probabilities: bool,
) -> Loss:
    """The options of a call, as plain numbers."""
    if (
        type(ignore_index) is int
        and type(label_smoothing) is float
        and type(z_loss) is float
        and softcap is None
        and type(shift) is bool
        and type(log_probabilities) is bool
    ):  # as most calls have them, which saves half of the time
        return Loss(ignore_index, label_smoothing, z_loss, 0.0, reduction, shift, log_probabilities)
    if softcap is not None and not (_is_number(softcap) and SMALLEST <= softcap <= LARGEST):
        raise ArgumentError(f"{op}: softcap must be {_POSITIVE}, got {softcap!r}")
    ignore_index = require_integer(op, "ignore_index", ignore_index)
    require_flag(op, "shift", shift)
    require_flag(op, "return_log_probabilities", log_probabilities)
    if not _is_number(label_smoothing) or not _is_number(z_loss):
        name, value = ("z_loss", z_loss) if _is_number(label_smoothing) else ("label_smoothing", label_smoothing)
        raise ArgumentError(f"{op}: {name} must be a number, got {value!r}")
    return Loss(
        ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0), reduction, shift, log_probabilities
    )


def _is_number(value: Any) -> bool:
    """Requires a number, of Python or numpy, that a float can represent."""
    if type(value) is float:
        return True
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def check_options(op: str, loss: Loss) -> None:
    """Raises for values that no loss has."""
    if loss == PLAIN:
        return
    if loss.reduction not in REDUCTIONS:
        names = ", ".join(map(repr, REDUCTIONS))
        raise ArgumentError(f"{op}: reduction must be one of {names}, got {loss.reduction!r}")
    if not 0 <= loss.label_smoothing <= 1:
        raise ArgumentError(f"{op}: label_smoothing must be from 0 to 1, got {loss.label_smoothing!r}")
    if not 0 <= loss.z_loss <= LARGEST:
        raise ArgumentError(f"{op}: z_loss must be at least 0 and finite, at most 2^127, got {loss.z_loss!r}")
    if loss.softcap and not SMALLEST <= loss.softcap <= LARGEST:
        raise ArgumentError(f"{op}: softcap must be {_POSITIVE}, got {loss.softcap!r}")
    if not -(2**63) <= loss.ignore_index < 2**63:
        raise ArgumentError(f"{op}: ignore_index must be an integer of 64 bits, got {loss.ignore_index}")


def check_labels(op: str, labels: Tensor, like_name: str, like: Tensor, loss: Loss) -> None:
    """Requires integers, one for each row of another tensor; with `shift`, at least one axis."""
    require_ids(op, "labels", labels, like_name, like)
    if labels.shape != like.shape[:-1]:
        as_in_torch = labels.shape == like.shape[:1] + like.shape[2:]
        raise ArgumentError(
            f"{op}: labels must have the shape of {like_name} without its last axis, {tuple(like.shape[:-1])}, got "
            f"{tuple(labels.shape)}"
            + f"; classes that are the second axis, as torch has them, become the last by {like_name}.movedim(1, -1)"
            * as_in_torch
        )
    if loss.shift and labels.dim() == 0:
        raise ArgumentError(f"{op}: shift=True needs an axis of time, the last of labels, got labels without axes")


def check_upstream(
    op: str, loss: Loss, tokens: tuple[int, ...], like: Tensor, upstream: Mapping[str, Tensor | None]
) -> None:
    """Requires upstream gradients with the shapes of the outputs (one number, or one per token), in the wide type."""
    kind, shapes = wide_dtype(like.dtype), {"dloss": () if loss.reduction != "none" else tokens}
    for name, gradient in upstream.items():
        if gradient is None:
            continue
        require_floating(op, name, gradient)
        shape = tuple(shapes.get(name, tokens))
        if tuple(gradient.shape) != shape:
            raise ArgumentError(f"{op}: {name} must have shape {shape}, got {tuple(gradient.shape)}")
        if gradient.dtype != kind or gradient.device != like.device:
            raise ArgumentError(
                f"{op}: {name} must be {short(kind)} on {like.device}, got {short(gradient.dtype)} on {gradient.device}"
            )


def check_saved(op: str, like: Tensor, targets: Tensor, sizes: Tensor, count: Tensor) -> None:
    """Requires saved results of a forward: a class and a logsumexp for each row of another tensor, and a count."""
    tokens, kind = math.prod(like.shape[:-1]), wide_dtype(like.dtype)
    expected = {"targets": (targets, torch.int32, tokens), "sizes": (sizes, kind, tokens), "count": (count, kind, 1)}
    for name, (tensor, dtype, number) in expected.items():
        if tensor.dtype != dtype or tuple(tensor.shape) != (number,) or tensor.device != like.device:
            raise ArgumentError(
                f"{op}: {name} must be {short(dtype)} of shape ({number},) on {like.device}, as the forward gives it, "
                f"got {short(tensor.dtype)} of shape {tuple(tensor.shape)} on {tensor.device}"
            )
