"""What the kernels of `gate` and `normalize` have in common: tensors as rows of adjacent elements, and guarantees."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.layout import leading_axes
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.stages.copies import layout_of, readable

MAX_ROWS = 2**31 - 2**16
"""Rows that the kernels' integers count."""

U = 2.0**-24
TINY = 2.0**-120
"""What exponentials and products that underflow may cost, times factors below 2⁵."""


# --------------------------------------------------------------------------------------------- layout


def _lies_as_rows(tensor: Tensor) -> bool:
    """Whether a kernel reads it as it is: rows of adjacent elements, along at most two axes."""
    adjacent = tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return tensor.numel() == 0 or (adjacent and leading_axes(tensor) is not None)


def describe(**tensors: Tensor | None) -> tuple[str, tuple[int, ...]]:
    """What is copied before a kernel reads it, in words; the length of a row, and the number of rows."""
    copied = [name for name, tensor in tensors.items() if tensor is not None and not _lies_as_rows(tensor)]
    first = next(tensor for tensor in tensors.values() if tensor is not None)
    size = first.shape[-1]
    return layout_of(copied), (size, first.numel() // size if size else 0)


class Rows(NamedTuple):
    """A tensor as kernels read it: row n begins at (n // inner)·outer + (n % inner)·step."""

    tensor: Tensor
    inner: int
    outer: int
    step: int

    @staticmethod
    def of(name: str, tensor: Tensor, memory: Any) -> "Rows":
        tensor = readable(name, tensor, memory)
        axes = leading_axes(tensor)
        assert axes is not None
        return Rows(tensor, max(1, axes[0]), *axes[1:])

    @property
    def aligned(self) -> bool:
        return self.tensor.data_ptr() % 16 == 0 and not (self.outer % 16 or self.step % 16)


# ------------------------------------------------------------------------------------------ guarantees

Bounds = dict[str, tuple[torch.dtype, Callable[..., Tensor]]]
"""Of each result, its dtype and the bound of its error."""


def refuse(problem: Problem) -> str:
    if torch.float64 in problem.dtypes:
        return "computes in float32; float64 is eager alone"
    rows = problem.sizes[1]
    return f"numbers up to {MAX_ROWS} rows, these are {rows}" if rows > MAX_ROWS else ""


def stored(exact: Tensor, before: Tensor, kind: torch.dtype) -> Tensor:
    """A bound before rounding, and half a unit in the last place of anything the result may be."""
    before = before + TINY
    if kind == torch.float32:
        return before
    smallest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    return before + spacing(exact.abs() + before, kind) / 2 + smallest


def guarantee(kind: torch.dtype, item: str, formula: str, bound: Callable[..., Tensor], domain: str) -> Guarantee:
    """What kernels promise of a result: equal bits, of an item wherever it stands, and an error that is derived."""
    return Guarantee(
        repeatable=True,
        batch_invariant=item,
        device_invariant=False,
        accumulator="float32",
        roundings=int(kind != torch.float32),
        error=Derived(f"{formula}, u = 2⁻²⁴; what underflows counts for nothing", bound),
        domain=domain,
    )


def on_kernels(
    kernel: str,
    module: str,
    refuse: Callable[[Problem], str],
    guarantee: Callable[[Problem], dict[str, Guarantee]],
    schedules: Schedules,
) -> Candidate:
    """A plan on kernels; their module, which imports Triton, is imported on first use."""
    direction = "backward" if kernel.endswith("_backward") else "forward"
    return Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=guarantee,
        setup=lambda setup: getattr(import_module(module), direction)(setup),
        schedules=schedules,
    )
