"""Which code serves `normalize`, and what it guarantees."""

from pathlib import Path

import torch
from torch import Tensor

from adjoint.core.guarantee import Guarantee
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.promises import BACKWARD, FORWARD
from adjoint.ops.gated_delta.stages import in_pytorch
from adjoint.ops.gated_delta.stages.normalize import eager
from adjoint.ops.gated_delta.stages.rows import TINY, Bounds, U, guarantee, on_kernels, refuse, stored

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_SIZE = 1024
"""The longest vector that a program normalises."""


def _refuse(problem: Problem) -> str:
    size = problem.sizes[0]
    return refuse(problem) or (
        f"has vectors of up to {MAX_SIZE} elements, these have {size}" if size > MAX_SIZE else ""
    )


def _bounds(problem: Problem) -> Bounds:
    """A sum by halves costs an addition for each halving; 16 for everything else."""
    (kind,) = problem.dtypes
    steps = max(1, problem.sizes[0] - 1).bit_length() + 16

    def scaled(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()
        return x.abs() * scale, scale

    def y(x: Tensor) -> Tensor:
        exact, _ = scaled(x)
        return stored(exact, steps * U * exact, kind)

    def dx(dy: Tensor, x: Tensor) -> Tensor:
        size, scale = scaled(x)
        terms = scale * (dy.abs() + size * (size * dy.abs()).sum(-1, keepdim=True))
        return stored(terms, 3 * steps * U * terms + scale * TINY, kind)

    return {"dx": (kind, dx)} if problem.op.endswith("_backward") else {"y": (kind, y)}


_DOMAIN = "vectors whose squares, and their products with dy, have sums that are finite in float32"
_FORMULAS = {
    "y": "½ ulp + c·u·|y|, c the halvings of a sum and 16",
    "dx": "½ ulp + 3·c·u·Σ|terms|, c the halvings of a sum and 16",
}


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    return {
        name: guarantee(kind, "vector", _FORMULAS[name], bound, _DOMAIN)
        for name, (kind, bound) in _bounds(problem).items()
    }


_KERNELS = ("adjoint.ops.gated_delta.stages.normalize.kernels", _refuse, _guarantee, _SCHEDULES)
_FINITE = "every finite input whose results are finite"

NORMALIZE = (
    on_kernels("gated_delta_normalize", *_KERNELS),
    in_pytorch.forward(eager.forward, in_pytorch.promised(FORWARD, torch.float64, _FINITE, y=0)),
)
NORMALIZE_BACKWARD = (
    on_kernels("gated_delta_normalize_backward", *_KERNELS),
    in_pytorch.backward(eager.backward, in_pytorch.promised(BACKWARD, torch.float64, _FINITE, dx=0), has_need=False),
)
