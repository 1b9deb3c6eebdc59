"""Which code serves which decoding step, and what it guarantees."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.candidates import writing
from adjoint.core.guarantee import Guarantee
from adjoint.core.kernels import why_not_triton
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem
from adjoint.core.schedules import Schedules
from adjoint.ops.gated_delta import eager, eager_step
from adjoint.ops.gated_delta.plans import DOMAIN, eager_candidate, promise, recorded

SCHEDULES = Schedules(Path(__file__).with_name("step_schedules.json"))

_CASES = "the family's cases: rows of their own, paged, several tokens"

_CEILING = 2e-6

_OUT_OF_RANGE = (
    "g above 0 and state_indices out of range are reported: at once on the CPU, by adjoint.check() on a GPU, where g "
    "is then taken as it is, and the row is skipped"
)


def _guarantee(problem: Problem) -> dict[str, Guarantee]:
    dtype, _, _, state = problem.dtypes[:4]
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
    dtype, g, beta, state = problem.dtypes[:4]
    wide = eager.wide(dtype)
    kinds = {"dq": dtype, "dk": dtype, "dv": dtype, "dg": g, "dbeta": beta, "dstate": state}
    return {
        name: promise(problem, recorded(kind, wide, _CEILING, _CASES), int(kind != wide))
        for name, kind in kinds.items()
    }


def _tiles_guarantee(problem: Problem) -> dict[str, Guarantee]:
    """Every sum over K has the order of halves; a row's tokens go one after the other in one program."""
    dtype, _, _, state = problem.dtypes[:4]
    states = "states" if problem.op.endswith("in_place") else "new_state"
    return {
        name: Guarantee(
            repeatable=True,
            batch_invariant="row",
            prefix_invariant=True,
            device_invariant=False,
            accumulator="float32",
            roundings=int(kind != torch.float32),
            error=recorded(kind, torch.float32, _CEILING, _CASES),
            domain=DOMAIN,
            out_of_range=_OUT_OF_RANGE,
        )
        for name, kind in (("o", dtype), (states, state))
    }


def _refuse(problem: Problem) -> str:
    if problem.dtypes[0] == torch.float64:
        return "computes in float32, these are float64"
    return why_not_triton(problem.device)


def _launch() -> Any:
    """The module that imports Triton, on first use."""
    return import_module("adjoint.ops.gated_delta.step_launch")


def _tiles() -> Candidate:
    return Candidate(
        name="triton.tiles",
        backend="triton",
        kernel="gated_delta_step_tiles",
        revision=1,
        refuse=_refuse,
        guarantee=_tiles_guarantee,
        run=writing(lambda plan, arguments, outputs, _: _launch().forward(plan, arguments, outputs, _)),
        prepare=lambda plan: _launch().prepare(plan),
        schedules=SCHEDULES,
        any_layout=True,
    )


def _step(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager_step.forward(*arguments, *outputs)


def _step_in_place(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    out, states = outputs
    all_states = arguments[9]
    eager_step.forward(*(*arguments, out, states if all_states else None, True))


def _step_backward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    eager_step.backward(*(*arguments, outputs))


STEP = (_tiles(), eager_candidate("eager.tokens", _guarantee, _step))
STEP_IN_PLACE = (_tiles(), eager_candidate("eager.tokens", _guarantee, _step_in_place))
STEP_BACKWARD = (eager_candidate("eager.tokens", _backward_guarantee, _step_backward),)
