"""The plans for Hopper on a CPU: portable kernels in Triton's interpreter, kernels of Gluon in the model."""

from typing import Any
from unittest.mock import patch

from torch import Tensor

from adjoint.core.launch import Setup
from adjoint.core.operator import Operator
from adjoint.core.plan import Call, Candidate
from adjoint.ops.gated_delta.rule.hopper import gradients
from tests.gluon.model import Codes, Schedule, modelled

TARGET = "sm_90"

MULTIPROCESSORS = 3
"""So few that a program has several items, and not all the same number."""


def candidate_of(operator: Operator) -> Candidate:
    """The operator's plan for Hopper alone."""
    (only,) = [candidate for candidate in operator.candidates() if candidate.targets == (TARGET,)]
    return only


def run(
    operator: Operator, arguments: tuple[Any, ...], schedule: Schedule, codes: Codes | None = None
) -> tuple[Tensor, ...]:
    """The outputs of the plan for Hopper; they are full of NaN before it runs."""
    candidate, problem = candidate_of(operator), operator.describe(*arguments)
    if refusal := candidate.refuse(problem):
        raise ValueError(f"{candidate.name} does not take the problem: {refusal}")
    setup = Setup(problem, candidate.schedule_on(problem, TARGET), TARGET)
    assert candidate.setup is not None
    execute = candidate.setup(setup)
    outputs = operator.allocate(*arguments)
    for output in outputs:
        output.fill_(float("nan"))
    with modelled(schedule, codes), patch.object(gradients, "_multiprocessors", lambda device: MULTIPROCESSORS):
        execute(arguments, outputs, None)
    return outputs


def run_both(call: Call, upstream: tuple[Tensor | None, ...], schedule: Schedule) -> tuple[tuple[Tensor, ...], ...]:
    """The outputs of a call, all of them, and its gradients."""
    outputs = run(call.operator, call.arguments, schedule)
    assert call.adjoint is not None and call.adjoint_arguments is not None
    return outputs, run(call.adjoint, call.adjoint_arguments(upstream, outputs), schedule)
