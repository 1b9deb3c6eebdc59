"""What plans of the gated delta rule promise for the inputs of a call, and whether results keep it."""

from typing import Any

from torch import Tensor

from adjoint.contract.inputs import Inputs, widened
from adjoint.core.guarantee import Guarantee, rounding_error
from adjoint.core.op.operator import Operator
from adjoint.ops.gated_delta.rule import _rule

FORWARD, BACKWARD = _rule.forward, _rule.forms[""].operator
OUTPUTS = ("o", "final_state")
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def arguments_of(inputs: Inputs, scale: float, normalize: bool = False) -> tuple[Any, ...]:
    """The arguments of the forward, which gives final states, checks no values and keeps what a backward needs."""
    return (*inputs, scale, normalize, True, False, True)


def guarantees_of(operator: Operator, arguments: tuple[Any, ...], plan: str) -> dict[str, Guarantee]:
    """What a plan promises for a problem, whether or not it could run here."""
    (candidate,) = (candidate for candidate in operator.candidates() if candidate.name == plan)
    return dict(candidate.guarantee(operator.describe(*arguments)))


def bounds_of(
    plan: str, inputs: Inputs, upstream: tuple[Tensor | None, Tensor | None], scale: float, normalize: bool = False
) -> dict[str, Tensor]:
    """The bounds of all outputs and gradients."""
    arguments = arguments_of(inputs, scale, normalize)
    forward, saved = guarantees_of(FORWARD, arguments, plan), FORWARD.allocate(*arguments)[2]
    backward = guarantees_of(BACKWARD, (*upstream, *inputs, saved, scale, normalize, 63), plan)
    wide, slopes = widened(inputs), widened(upstream)
    bounds = {name: forward[name].error.bound(*wide) for name in OUTPUTS}  # type: ignore[union-attr]
    return bounds | {name: backward[name].error.bound(*slopes, *wide) for name in GRADIENTS}  # type: ignore[union-attr]


def error_norms(got: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """Norms of errors, as the bound has them: along the axes that it does not have.

    A result that overflows counts as the number after the largest, as in `Derived`.
    """
    error = rounding_error(got, exact)
    axes = error.dim() - bound.dim()
    return error.flatten(-axes).norm(dim=-1) if axes else error


def shares(
    plan: str,
    inputs: Inputs,
    upstream: tuple[Tensor | None, Tensor | None],
    results: dict[str, Tensor],
    exact: dict[str, Tensor],
    scale: float,
    normalize: bool = False,
) -> dict[str, Tensor]:
    """Errors over their bounds, of every result; NaN counts as endless, but nothing where nothing is promised."""
    bounds = bounds_of(plan, inputs, upstream, scale, normalize)
    over_bounds = {}
    for name, got in results.items():
        error = error_norms(got, exact[name], bounds[name])
        free = (error == 0) | bounds[name].isposinf()
        over_bounds[name] = (error / bounds[name]).masked_fill(free, 0.0).nan_to_num(nan=float("inf"))
    return over_bounds


def assert_gradients_are_as_promised(
    plan: str,
    inputs: Inputs,
    upstream: tuple[Tensor | None, Tensor | None],
    results: tuple[Tensor, ...],
    exact: list[Tensor],
    scale: float = 0.5,
    normalize: bool = False,
) -> None:
    """Those that are there are within their bounds for these inputs."""
    named = [dict(zip(GRADIENTS, x, strict=False)) for x in (results, exact)]
    for name, share in shares(plan, inputs, upstream, *named, scale, normalize).items():
        assert float(share.max()) <= 1.0 if share.numel() else True, (name, float(share.max()))
