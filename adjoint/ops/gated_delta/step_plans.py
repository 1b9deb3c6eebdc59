"""Which code serves which decoding step, and what it guarantees."""

from typing import Any

from torch import Tensor

from adjoint.core.guarantee import Guarantee
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta import eager, eager_step
from adjoint.ops.gated_delta.plans import eager_candidate, promise, recorded

_CASES = "the family's cases: rows of their own, paged, several tokens"

_CEILING = 2e-6

_OUT_OF_RANGE = (
    "g above 0 and state_indices out of range are reported: at once on the CPU, by adjoint.check() on a GPU, where g "
    "is then taken as it is, and the row is skipped"
)


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, _, _, state = problem.dtypes
    wide = eager.wide(dtype)
    states = "states" if problem.op.endswith("in_place") else "new_state"
    return {
        name: promise(
            problem,
            recorded(kind, wide, _CEILING, _CASES),
            int(kind != wide),
            out_of_range=_OUT_OF_RANGE,
        )
        for name, kind in (("o", dtype), (states, state))
    }


def _backward_guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, g, beta, state = problem.dtypes
    wide = eager.wide(dtype)
    kinds = {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dstate": state}
    return {
        name: promise(problem, recorded(kind, wide, _CEILING, _CASES), int(kind != wide))
        for name, kind in kinds.items()
    }


def _step(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager_step.forward(*arguments, *outputs)


def _step_in_place(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    out, states = outputs
    all_states = arguments[9]
    eager_step.forward(*(*arguments, out, states if all_states else None, True))


def _step_backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager_step.backward(*(*arguments, outputs))


STEP = (eager_candidate("eager.tokens", _guarantee, _step),)
STEP_IN_PLACE = (eager_candidate("eager.tokens", _guarantee, _step_in_place),)
STEP_BACKWARD = (eager_candidate("eager.tokens", _backward_guarantee, _step_backward),)
