"""Which kernel serves a rotation, and what it guarantees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import imported
from adjoint.core.plan import Candidate, Plan, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.rotary.rotary import bounds, eager

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

DOMAIN = "every input whose products with cos and sin are in the range of the arithmetic's type"
SPECIAL_VALUES = (
    "products and sums are IEEE's: 0·∞ and ∞ − ∞ give NaN, and NaN reaches both columns of its pair; columns that are "
    "not rotated keep their bits"
)

NEED_Q, NEED_K = 1, 2
"""Bits of the gradients a backward computes."""

Tensors = tuple[Any, Any, Tensor, Tensor, Any, Any]
"""q, k, cos, sin and what is written of q and k."""


class Rotation(NamedTuple):
    """One operator, as the kernel, plain PyTorch and the bounds see it alike.

    Attributes:
        outputs: its names, of what is made of q and of k.
        tensors: what it reads and writes, from the arguments and outputs of the operator; None for both sides of
            what is not there or not needed.
        adjoint: whether it rotates back.
        in_place: whether what is written is what is read.
    """

    outputs: tuple[str, str]
    tensors: Callable[[tuple[Any, ...], tuple[Tensor, ...]], Tensors]
    adjoint: bool = False
    in_place: bool = False


def _forward_tensors(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Tensors:
    q, k, cos, sin = arguments[:4]
    return q, k, cos, sin, outputs[0], None if k is None else outputs[1]


def _own_tensors(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Tensors:
    q, k, cos, sin = arguments[:4]
    return q, k, cos, sin, q, k


def _backward_tensors(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> Tensors:
    """The gradient of an input whose rotated one nobody used is 0."""
    drotated_q, drotated_k, cos, sin = arguments[:4]
    need = arguments[-1]
    sides = []
    for upstream, gradient, bit in ((drotated_q, outputs[0], NEED_Q), (drotated_k, outputs[1], NEED_K)):
        if need & bit and upstream is None:
            gradient.zero_()
        sides.append((upstream, gradient) if need & bit and upstream is not None else (None, None))
    return sides[0][0], sides[1][0], cos, sin, sides[0][1], sides[1][1]


def _guarantee(of: Rotation, problem: Problem) -> dict[str, Guarantee]:
    """The same of kernels and of plain PyTorch: they do the same operations."""
    dtype, (interleaved, rotary_dim) = problem.dtypes[0], problem.options[:2]
    bound = bounds.rotated_back if of.adjoint else bounds.rotated

    def error(place: int) -> Derived:
        """Of what is made of the tensor at a place, before the tables, which are the last two."""

        def largest(*tensors: Tensor) -> Tensor:
            *_, cos, sin = tensors
            return bound(tensors[place], cos, sin, rotary_dim, interleaved, dtype)

        return Derived(f"{bounds.in_words(dtype)}: docs/rotary.md", largest)

    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant="token",
            prefix_invariant=True,
            device_invariant=True,
            accumulator=short(wide_dtype(dtype)),
            roundings=1,
            error=error(place),
            domain=DOMAIN,
            special_values=SPECIAL_VALUES,
        )
        for place, name in enumerate(of.outputs)
    }


def _candidates(of: Rotation) -> tuple[Candidate, Candidate]:
    """The candidates of an operator, best first."""

    def run(plan: Plan, arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], workspace: Tensor | None) -> None:
        q, k, cos, sin, rotated_q, rotated_k = of.tensors(arguments, outputs)
        interleaved, rotary_dim = plan.problem.options[:2]
        for x, y in ((q, rotated_q), (k, rotated_k)):
            if x is not None and y is not None:
                eager.rotate(x, y, cos, sin, rotary_dim, interleaved, of.adjoint)

    on_kernels = Candidate(
        name="triton.rows",
        backend="triton",
        kernel="rotary_rows",
        revision=1,
        refuse=lambda problem: "",
        guarantee=lambda problem: _guarantee(of, problem),
        setup=imported("adjoint.ops.rotary.rotary.kernels:rows", of=of),
        schedules=_SCHEDULES,
    )
    return on_kernels, in_pytorch("eager", lambda problem: _guarantee(of, problem), allocating_outputs(run))


ROTARY = _candidates(Rotation(("rotated_q", "rotated_k"), _forward_tensors))
ROTARY_IN_PLACE = _candidates(Rotation(("q", "k"), _own_tensors, in_place=True))
ROTARY_BACKWARD = _candidates(Rotation(("dq", "dk"), _backward_tensors, adjoint=True))
