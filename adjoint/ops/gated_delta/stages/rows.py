"""The common parts of the kernel plans of `gate` and `normalize`, which both process rows of adjacent elements."""

from collections.abc import Callable

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.launch import imported
from adjoint.core.layout import copied_layout
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.promises import Promises

MAX_ROWS = 2**31 - 2**16
"""The most rows that the kernels' integers can count."""

U = 2.0**-24
TINY = 2.0**-120
"""The most that exponentials and products lose by underflow, times factors below 2⁵."""


def underflow(computed: torch.dtype) -> float:
    """The same loss for a type of the arithmetic; for float64 it is 2⁻⁹⁹⁰."""
    return TINY if computed == torch.float32 else 2.0**-990


Bounds = dict[str, tuple[torch.dtype, Callable[..., Tensor]]]
"""The dtype of each result, and the bound of its error."""


def describe(**tensors: Tensor | None) -> tuple[str, tuple[int, ...]]:
    """Words about the tensors that are copied before a kernel reads them; and the length and the number of rows."""
    first = next(tensor for tensor in tensors.values() if tensor is not None)
    size = first.shape[-1]
    return copied_layout(tensors), (size, first.numel() // size if size else 0)


def refuse(problem: Problem) -> str:
    if torch.float64 in problem.dtypes:
        return "computes in float32; float64 is eager alone"
    rows = problem.sizes[1]
    return f"numbers up to {MAX_ROWS} rows, these are {rows}" if rows > MAX_ROWS else ""


def stored(exact: Tensor, before: Tensor, kind: torch.dtype, computed: torch.dtype = torch.float32) -> Tensor:
    """The bound before rounding, plus half a unit in the last place of the largest value that the result may have.

    Torch rounds float64 to 16-bit types through float32.
    """
    before = before + underflow(computed)
    if kind == computed:
        return before
    if computed == torch.float64 and kind.itemsize == 2:
        before = before + U * (exact.abs() + before)
    smallest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    return before + spacing(exact.abs() + before, kind) / 2 + smallest


def guarantee(kind: torch.dtype, item: str, formula: str, bound: Callable[..., Tensor], domain: str) -> Guarantee:
    """The guarantee of a result of kernels: equal bits of an item at every place, and a derived error."""
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
    kernel: str, module: str, refuse: Callable[[Problem], str], guarantee: Promises, schedules: Schedules
) -> Candidate:
    direction = "backward" if kernel.endswith("_backward") else "forward"
    return Candidate(
        name="triton.rows",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=guarantee,
        setup=imported(f"{module}:{direction}"),
        schedules=schedules,
    )
