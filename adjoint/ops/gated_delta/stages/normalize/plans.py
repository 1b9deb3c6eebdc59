"""Which code serves `normalize`, and what it guarantees: the kernels of `l2_norm`, or plain PyTorch in float64."""

from dataclasses import replace

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import Execute, Setup
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.arguments import EPSILON
from adjoint.ops.gated_delta.promises import BACKWARD, FORWARD
from adjoint.ops.gated_delta.stages import in_pytorch
from adjoint.ops.gated_delta.stages.rows import TINY, U, guarantee, refuse, stored, underflow
from adjoint.ops.norm.plans import L2_NORM, L2_NORM_BACKWARD

MAX_SIZE = 1024
"""The longest vector that kernels normalise."""

_DOMAIN = (
    "vectors whose squares, and their products with dy, have sums of magnitudes below half of the largest {}; else the "
    "bound is infinite"
)


def _refuse(problem: Problem) -> str:
    size = problem.sizes[0]
    return refuse(problem) or (
        f"has vectors of up to {MAX_SIZE} elements, these have {size}" if size > MAX_SIZE else ""
    )


def _scaled(x: Tensor) -> tuple[Tensor, Tensor]:
    """y and r, in float64."""
    x = x.double()
    r = x.square().sum(-1, keepdim=True).add_(EPSILON).rsqrt_()
    return x * r, r


def _placed(bound: Tensor, computed: torch.dtype, x: Tensor, dy: Tensor | None = None) -> Tensor:
    """A bound that is infinite outside of the domain."""
    y, r = _scaled(x)
    sums = [x.square()] if dy is None else [x.square(), (dy * x).abs(), (y * dy).abs(), (r * dy).abs()]
    most = torch.finfo(computed).max / 2
    inside = torch.stack([terms.sum(-1, keepdim=True) < most for terms in sums]).all(0)
    return torch.where(inside, bound, torch.inf)


def _terms(dy: Tensor, x: Tensor, floor: float) -> Tensor:
    """The sizes of the terms of dx; numbers that may be subnormal, and lose digits, count as larger by a floor."""
    y, r = _scaled(x)
    y = y.abs() + floor
    return r * (dy.abs() + y * (y * dy.abs()).sum(-1, keepdim=True))


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    """The guarantee of kernels. A sum by halves has an addition for each halving; 16 units are for everything else."""
    (kind,) = problem.dtypes
    steps = max(1, problem.sizes[0] - 1).bit_length() + 16
    domain = _DOMAIN.format("float32")

    def y_bound(x: Tensor) -> Tensor:
        exact = _scaled(x)[0].abs()
        return _placed(stored(exact, steps * U * exact, kind), torch.float32, x)

    def dx_bound(dy: Tensor, x: Tensor) -> Tensor:
        terms = _terms(dy, x, TINY / U)
        bound = stored(terms, 3 * steps * U * terms + _scaled(x)[1] * TINY, kind)
        return _placed(bound, torch.float32, x, dy)

    if problem.op.endswith("_backward"):
        words = "½ ulp + 3·c·u·Σ|terms|, c the halvings of a sum and 16"
        return {"dx": guarantee(kind, "vector", words, dx_bound, domain)}
    return {"y": guarantee(kind, "vector", "½ ulp + c·u·|y|, c the halvings of a sum and 16", y_bound, domain)}


def _eager_bound(problem: Problem, name: str, kinds: dict[str, torch.dtype]) -> Derived:
    """The bound of PyTorch in float64, whose reference rounds as much. It is that of the kernels, but a sum has any
    order, so n replaces its halvings."""
    kind, share = kinds[name], 2.0**-52 * (problem.sizes[0] + 16)

    def y_bound(x: Tensor) -> Tensor:
        exact = _scaled(x)[0].abs()
        return _placed(stored(exact, share * exact, kind, torch.float64), torch.float64, x)

    def dx_bound(dy: Tensor, x: Tensor) -> Tensor:
        y, r = _scaled(x)
        exact = (dy - y * (y * dy).sum(-1, keepdim=True)) * r
        terms = _terms(dy, x, underflow(torch.float64) / share)
        # The reference multiplies by x what it has divided by a length three times, which may underflow.
        before = 3 * share * terms + 2.0**-1072 * x.abs()
        return _placed(stored(exact, before, kind, torch.float64), torch.float64, x, dy)

    words = "½ ulp + (n + 16)·u·|y|" if name == "y" else "½ ulp + 3·(n + 16)·u·Σ|terms|"
    return Derived(f"{words}, n the length of a vector, u = 2⁻⁵²", y_bound if name == "y" else dx_bound)


def _on_kernels(of_l2_norm: Candidate) -> Candidate:
    """The plan of `l2_norm`, which takes ε as an argument."""
    bind = of_l2_norm.setup
    assert bind is not None

    def setup(setup: Setup) -> Execute:
        execute = bind(setup)
        return lambda arguments, outputs, workspace: execute((*arguments, EPSILON), outputs, workspace)

    return replace(of_l2_norm, refuse=_refuse, guarantee=_guarantee, setup=setup)


def _forward(x: Tensor, outputs: tuple[Tensor, ...]) -> None:
    outputs[0].copy_(_scaled(x)[0])


def _backward(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    (y, r), dy = _scaled(x), dy.double()
    return ((dy - y * (y * dy).sum(-1, keepdim=True)) * r,)


_FINITE = _DOMAIN.format("float64")

NORMALIZE = (
    _on_kernels(L2_NORM[0]),
    in_pytorch.forward(_forward, in_pytorch.promised(FORWARD, torch.float64, _FINITE, bound=_eager_bound, y=0)),
)
NORMALIZE_BACKWARD = (
    _on_kernels(L2_NORM_BACKWARD[0]),
    in_pytorch.backward(
        _backward, in_pytorch.promised(BACKWARD, torch.float64, _FINITE, bound=_eager_bound, dx=0), has_need=False
    ),
)
