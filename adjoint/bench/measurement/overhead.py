"""The host cost of one call: what a small tensor pays before and after its arithmetic.

    host cost = the whole call − the arithmetic of its plan

It is shown beside the same work as a user writes it in torch, and beside torch in float64 with one rounding, which is
the computation of the plan `eager`.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F

import adjoint
from adjoint.bench.measurement.timing import synchronize
from adjoint.core.problem import short

TARGET = 12.0
"""The microseconds of host cost that a call on the CPU may have."""

SHAPE = (4, 64)
DTYPES = (torch.float32, torch.bfloat16)
CALLS = 20  # calls of one contender in a row: enough for the clock, few enough to avoid interruptions


@dataclass(frozen=True)
class Overhead:
    """The microseconds of a call, for one op and dtype."""

    op: str
    dtype: str
    device: str
    plan: str
    whole: float
    arithmetic: float
    torch: float
    torch_in_float64: float

    @property
    def host(self) -> float:
        return self.whole - self.arithmetic

    @property
    def inside(self) -> bool:
        return self.host <= TARGET


_TORCH: dict[Any, tuple[int, Callable[..., torch.Tensor]]] = {
    adjoint.silu: (1, F.silu),
    adjoint.swiglu: (2, lambda gate, up: F.silu(gate) * up),
}
"""The number of tensors that each function takes, and the same work in torch."""


def overhead(device: torch.device, batches: int = 400) -> list[Overhead]:
    """Measures silu and swiglu without gradients. On a GPU it measures only the launch, and does not wait for it."""
    with torch.no_grad():
        return [_one(function, dtype, device, batches) for function in _TORCH for dtype in DTYPES]


def _one(function: Any, dtype: torch.dtype, device: torch.device, batches: int) -> Overhead:
    count, composition = _TORCH[function]
    inputs = tuple(torch.randn(SHAPE, device=device).to(dtype) for _ in range(count))
    plan = adjoint.plan(function, *inputs).prepare()
    arguments = (*inputs, *plan.problem.options)
    times = _medians(
        {
            "whole": lambda: function(*inputs),
            "arithmetic": lambda: plan.execute(arguments),
            "torch": lambda: composition(*inputs),
            "torch_in_float64": lambda: composition(*(tensor.double() for tensor in inputs)).to(dtype),
        },
        device,
        batches,
    )
    return Overhead(function.__name__, short(dtype), device.type, plan.name, **times)


def _medians(functions: dict[str, Callable[[], Any]], device: torch.device, batches: int) -> dict[str, float]:
    """The microseconds of a call of each function. They are measured in turns: the median over batches after a first
    one."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(batches + 1):
        for name, function in functions.items():
            synchronize(device)
            start = perf_counter()
            for _ in range(CALLS):
                function()
            times[name].append((perf_counter() - start) * 1e6 / CALLS)
    return {name: statistics.median(values[1:]) for name, values in times.items()}
