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
"""The bits of the gradients in the mask of a backward."""

Tensors = tuple[Any, Any, Tensor, Tensor, Any, Any]
"""q, k, cos, sin, and the results for q and k."""


class Rotation(NamedTuple):
    """One operator, in a form that serves the kernel, plain PyTorch and the bounds.

    Attributes:
        outputs: the names of the results for q and for k.
        tensors: gives the tensors that it reads and writes, from the arguments and outputs of the operator. If one is
            absent or not needed, both the input and its result are None.
        adjoint: whether it rotates back.
        in_place: whether it writes to the tensors that it reads.
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
    """The tensors of a backward. If nobody used a rotated input, the gradient of that input is 0."""
    drotated_q, drotated_k, cos, sin = arguments[:4]
    need = arguments[-1]
    sides = []
    for upstream, gradient, bit in ((drotated_q, outputs[0], NEED_Q), (drotated_k, outputs[1], NEED_K)):
        if need & bit and upstream is None:
            gradient.zero_()
        sides.append((upstream, gradient) if need & bit and upstream is not None else (None, None))
    return sides[0][0], sides[1][0], cos, sin, sides[0][1], sides[1][1]


def _guarantee(of: Rotation, problem: Problem) -> dict[str, Guarantee]:
    """The guarantee, which is the same for kernels and plain PyTorch, because they do the same operations."""
    dtype, (interleaved, rotary_dim) = problem.dtypes[0], problem.options[:2]
    bound = bounds.rotated_back if of.adjoint else bounds.rotated

    def error(place: int) -> Derived:
        """The error of the result for the tensor at a place. The last two tensors are the tables."""

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
