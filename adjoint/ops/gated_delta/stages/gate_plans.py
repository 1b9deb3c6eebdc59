"""Which kernels serve `gate` and `normalize`, and what they guarantee."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import writing
from adjoint.core.guarantee import Derived, Guarantee, spacing
from adjoint.core.kernels import why_not_triton
from adjoint.core.layout import leading_axes
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.stages.w_u_plans import SCHEDULES

__all__ = ["EPSILON", "GATE", "GATE_BACKWARD", "NORMALIZE", "NORMALIZE_BACKWARD", "RUN"]

RUN = 64
"""Tokens whose terms are one sum, and sums of one of the next level: part of the bits of dA_log and ddt_bias."""

MAX_SIZE = 1024
"""The longest vector that a program normalises."""

MAX_ROWS = 2**31 - 2**16
"""Rows that the kernels' integers count."""

U = 2.0**-24
_TINY = 2.0**-120
"""What exponentials and products that underflow may cost, times factors below 2⁵."""


def _launcher() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.gated_delta.stages.gate_launch")


# ------------------------------------------------------------------------------------------- problems


def lies_as_rows(tensor: Tensor) -> bool:
    """Whether a kernel walks it as it is: rows of adjacent elements, along at most two axes."""
    adjacent = tensor.dim() == 0 or tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return tensor.numel() == 0 or (adjacent and leading_axes(tensor) is not None)


def describe(**tensors: Tensor | None) -> tuple[str, tuple[int, ...]]:
    """What is copied before a kernel reads it, in words; the length of a row, and the number of rows."""
    copied = [name for name, tensor in tensors.items() if tensor is not None and not lies_as_rows(tensor)]
    first = next(tensor for tensor in tensors.values() if tensor is not None)
    size = first.shape[-1]
    return f"{', '.join(copied)} copied" if copied else "", (size, first.numel() // size if size else 0)


def levels(rows: int) -> list[int]:
    """Runs of rows, and the sums of each level above, down to one."""
    counts = [-(-rows // RUN)]
    while len(counts) < 2 or counts[-1] > 1:
        counts.append(-(-counts[-1] // RUN))
    return counts


def _refuse(problem: Problem) -> str:
    if torch.float64 in problem.dtypes:
        return "computes in float32; float64 is eager alone"
    size, rows = problem.sizes
    if rows > MAX_ROWS:
        return f"numbers up to {MAX_ROWS} rows, these are {rows}"
    if problem.op.startswith("normalize") and size > MAX_SIZE:
        return f"has vectors of up to {MAX_SIZE} elements, these have {size}"
    return why_not_triton(problem.device)


# ------------------------------------------------------------------------------------------ guarantees


def _stored(exact: Tensor, before: Tensor, kind: torch.dtype) -> Tensor:
    """A bound before rounding, and half a unit in the last place of anything the result may be."""
    before = before + _TINY
    if kind == torch.float32:
        return before
    smallest = torch.finfo(kind).smallest_normal * torch.finfo(kind).eps
    return before + spacing(exact.abs() + before, kind) / 2 + smallest


class _Gates:
    """Exact results, and the share of each that its roundings may be.

    An exponential costs 3·|exponent|·u + 5·u; a + dt_bias is rounded, which moves softplus and σ by at most |t|·u of
    themselves (and less than u where t is positive); all other operations together less than 32·u.
    """

    def __init__(self, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> None:
        t = a + dt_bias
        self.rate, self.softplus, self.slope = A_log.exp(), torch.logaddexp(t, torch.zeros_like(t)), t.sigmoid()
        self.beta, self.other = b.sigmoid(), (-b).sigmoid()
        self.share = U * (3 * A_log.abs() + 4 * t.abs() + 40)
        self.share_of_beta = U * (6 * b.abs() + 40)


def _gate_bounds(problem: Problem) -> dict[str, tuple[torch.dtype, Callable[..., Tensor]]]:
    def g(*inputs: Tensor) -> Tensor:
        m = _Gates(*inputs)
        return m.rate * m.softplus * m.share + m.rate * _TINY + _TINY

    def beta(*inputs: Tensor) -> Tensor:
        m = _Gates(*inputs)
        return m.beta * m.share_of_beta + _TINY

    return {"g": (torch.float32, g), "beta": (torch.float32, beta)}


def _gate_backward_bounds(problem: Problem) -> dict[str, tuple[torch.dtype, Callable[..., Tensor]]]:
    additions = (RUN.bit_length() - 1) * len(levels(problem.sizes[1]))
    kinds = dict(zip(("da", "db", "dA_log", "ddt_bias"), problem.dtypes, strict=True))

    def of(name: str) -> Callable[..., Tensor]:
        def bound(dg: Tensor, dbeta: Tensor, *inputs: Tensor) -> Tensor:
            m = _Gates(*inputs)
            exact = {
                "da": lambda: dg * m.rate * m.slope,
                "db": lambda: dbeta * m.beta * m.other,
                "dA_log": lambda: dg * m.rate * m.softplus,
                "ddt_bias": lambda: dg * m.rate * m.slope,
            }[name]().abs()
            share = m.share_of_beta if name == "db" else m.share
            tiny = (dbeta.abs() if name == "db" else dg.abs() * (1 + m.rate)) * _TINY
            if name in ("da", "db"):
                return _stored(exact, exact * share + tiny, kinds[name])
            columns = exact.shape[-1]
            before = (exact * (share + additions * U) + tiny).reshape(-1, columns).sum(0)
            return _stored(exact.reshape(-1, columns).sum(0), before, kinds[name])

        return bound

    return {name: (kind, of(name)) for name, kind in kinds.items()}


def _normalize_bounds(problem: Problem) -> dict[str, tuple[torch.dtype, Callable[..., Tensor]]]:
    """A sum by halves costs an addition for each halving; 16 for everything else."""
    (kind,) = problem.dtypes
    steps = max(1, problem.sizes[0] - 1).bit_length() + 16

    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
        return x.abs() * scale, scale

    def y(x: Tensor) -> Tensor:
        exact, _ = scaled(x)
        return _stored(exact, steps * U * exact, kind)

    def dx(dy: Tensor, x: Tensor) -> Tensor:
        size, scale = scaled(x)
        terms = scale * (dy.abs() + size * (size * dy.abs()).sum(-1, keepdim=True))
        return _stored(terms, 3 * steps * U * terms + scale * _TINY, kind)

    return {"dx": (kind, dx)} if problem.op.endswith("_backward") else {"y": (kind, y)}


_ORDER = f"tokens in runs of {RUN}, by halves; runs {RUN} at a time likewise: the number of tokens alone decides"
_FORMULAS = {
    "g": "u·(3·|A_log| + 4·|a + dt_bias| + 40) of itself",
    "beta": "u·(6·|b| + 40) of itself",
    "da": "½ ulp + u·(3·|A_log| + 4·|a + dt_bias| + 40) of itself",
    "db": "½ ulp + u·(6·|b| + 40) of itself",
    "dA_log": "½ ulp + the error of its terms, and u·Σ|terms| for each of its additions",
    "ddt_bias": "½ ulp + the error of its terms, and u·Σ|terms| for each of its additions",
    "y": "½ ulp + c·u·|y|, c the halvings of a sum and 16",
    "dx": "½ ulp + 3·c·u·Σ|terms|, c the halvings of a sum and 16",
}


def _promises(
    bounds: Callable[[Problem], dict[str, tuple[torch.dtype, Callable[..., Tensor]]]], domain: str
) -> Callable[[Problem], dict[str, Guarantee]]:
    def promises(problem: Problem) -> dict[str, Guarantee]:
        return {
            name: Guarantee(
                repeatable=True,
                batch_invariant="" if name in ("dA_log", "ddt_bias") else "token" if "gate" in problem.op else "vector",
                device_invariant=False,
                accumulator="float32",
                roundings=int(kind != torch.float32),
                error=Derived(f"{_FORMULAS[name]}, u = 2⁻²⁴; what underflows counts for nothing", bound),
                domain=f"{domain}; {_ORDER}" if name in ("dA_log", "ddt_bias") else domain,
            )
            for name, (kind, bound) in bounds(problem).items()
        }

    return promises


# ------------------------------------------------------------------------------------------ candidates


def _candidate(
    kernel: str,
    direction: str,
    guarantee: Callable[[Problem], dict[str, Guarantee]],
    numeric: Callable[[Problem], dict[str, Any]] = lambda problem: {},
) -> tuple[Candidate]:
    return (
        Candidate(
            name="triton.rows",
            backend="triton",
            kernel=kernel,
            revision=1,
            refuse=_refuse,
            guarantee=guarantee,
            run=writing(lambda *a: getattr(_launcher(), direction)(*a)),
            prepare=lambda plan: _launcher().prepare(plan),
            numeric=numeric,
            schedules=SCHEDULES,
            workspace_bytes=lambda problem: _launcher().regions(problem).bytes,
        ),
    )


_FINITE = "every finite input of which e^{A_log} and the results are finite"
_SHORT = "vectors whose squares, and their products with dy, have sums that are finite in float32"

GATE = _candidate("gated_delta_gate", "gate", _promises(_gate_bounds, _FINITE))
GATE_BACKWARD = _candidate(
    "gated_delta_gate_backward",
    "gate_backward",
    _promises(_gate_backward_bounds, _FINITE),
    lambda problem: {"run": RUN},
)
NORMALIZE = _candidate("gated_delta_normalize", "normalize", _promises(_normalize_bounds, _SHORT))
NORMALIZE_BACKWARD = _candidate(
    "gated_delta_normalize_backward", "normalize_backward", _promises(_normalize_bounds, _SHORT)
)
