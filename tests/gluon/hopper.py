"""The plans for Hopper on a CPU: portable kernels in Triton's interpreter, kernels of Gluon in the model."""

from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor

from adjoint.contract.inputs import widened
from adjoint.core import launch
from adjoint.core.guarantee import Guarantee, Measurement
from adjoint.core.launch import Setup
from adjoint.core.op.operator import Operator
from adjoint.core.plan import Call, Candidate
from tests.gluon.model.programs import Schedule
from tests.gluon.model.translation import Codes, modelled
from tests.gluon.rule.examples import Example

TARGET = "sm_90"

MULTIPROCESSORS = 3
"""So few that a program has several items, and not all the same number."""


HALVES, WHOLE_V = {"spans_in_halves": 10**9, "spans_ahead": 0}, {"spans_in_halves": 0, "spans_ahead": 0}
"""Parameters of the rule's schedule with which every span's columns of V are halved, and with which none are."""

AHEAD = {"spans_ahead": 10**9, "tokens_ahead": 1, "tokens_apart": 1}
"""Those with which states are scanned ahead of the outputs, and further inverses of one sequence computed beside."""

BESIDE = {"tokens_beside": 1}
"""Those with which gradients of one sequence may be computed beside its reverse scan."""


def candidate_of(operator: Operator) -> Candidate:
    """The plan of the operator for Hopper alone."""
    return next(candidate for candidate in operator.candidates() if candidate.targets == (TARGET,))


def run(
    operator: Operator,
    arguments: tuple[Any, ...],
    schedule: Schedule,
    codes: Codes | None = None,
    parameters: Mapping[str, int] | None = None,
    programs: int = MULTIPROCESSORS,
) -> tuple[Tensor, ...]:
    """The outputs of a plan for Hopper, with its schedule but for some parameters; they are full of NaN before it
    runs."""
    candidate, problem = candidate_of(operator), operator.describe(*arguments)
    if refusal := candidate.refuse(problem):
        raise ValueError(f"{candidate.name} does not take the problem: {refusal}")
    setup = Setup(problem, candidate.schedule_on(problem, TARGET) | dict(parameters or {}), TARGET)
    assert candidate.setup is not None
    execute = candidate.setup(setup)
    outputs = operator.allocate(*arguments)
    for output in outputs:
        output.fill_(float("nan") if output.is_floating_point() else -1)
    with modelled(schedule, codes), patch.object(launch, "multiprocessors", lambda device: programs):
        execute(arguments, outputs, None)
    return outputs


def run_both(call: Call, upstream: tuple[Tensor | None, ...], schedule: Schedule) -> tuple[tuple[Tensor, ...], ...]:
    """The outputs of a call, all of them, and its gradients."""
    outputs = run(call.operator, call.arguments, schedule)
    return outputs, run_backward(call, upstream, outputs, schedule)


def run_backward(
    call: Call, upstream: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...], schedule: Schedule, **options: Any
) -> tuple[Tensor, ...]:
    """The gradients of a call with these outputs."""
    assert call.adjoint is not None and call.adjoint_arguments is not None
    return run(call.adjoint, call.adjoint_arguments(upstream, outputs), schedule, **options)


def named(call: Call, outputs: tuple[Tensor, ...], slopes: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Outputs and gradients by name, without the states that the backward reads."""
    assert call.adjoint is not None
    pairs = zip((*call.operator.outputs, *call.adjoint.outputs), (*outputs, *slopes), strict=True)
    return {name: result for name, result in pairs if name != "saved" and result.numel()}


def results(example: Example, schedule: Schedule) -> dict[str, Tensor]:
    """Outputs and gradients of the plan for Hopper, by name."""
    call = example.call
    return named(call, *run_both(call, example.upstream(), schedule))


def promises(example: Example) -> dict[str, Guarantee]:
    """What the plan for Hopper promises of every output and gradient."""
    call = example.call
    assert call.adjoint is not None and call.adjoint_arguments is not None
    kept = call.operator.allocate(*call.arguments)
    sides = (call.operator, call.arguments), (call.adjoint, call.adjoint_arguments(example.upstream(), kept))
    stated: dict[str, Guarantee] = {}
    for operator, arguments in sides:
        stated |= candidate_of(operator).guarantee(operator.describe(*arguments))
    return stated


def errors(example: Example, results: Mapping[str, Tensor]) -> Iterator[tuple[str, str, Measurement]]:
    """The error of each result beside what is promised of it, and beside what is recorded."""
    stated, call = promises(example), example.call
    inputs, slopes = widened(example.inputs), widened(example.upstream())
    for (name, result), exact in zip(results.items(), example.exact(), strict=True):
        arguments = inputs if name in call.operator.outputs else (*slopes, *inputs)
        promise = stated[name]
        assert promise.recorded is not None
        yield name, "promised", promise.error.measure(result, exact, *arguments)
        yield name, "recorded", promise.recorded.measure(result, exact)
