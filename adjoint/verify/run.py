"""Running a subject: one evaluation with its gradients, and its comparison with the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.cases import Case, Subject
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import Inputs, differentiable, leaves, widened
from adjoint.core.guarantee import Guarantee, Measurement
from adjoint.core.plan import Plan, plan
from adjoint.core.preference import Preference, resolve


@dataclass(frozen=True)
class Evaluation:
    """Inputs, upstream gradients, and what came of them: the public outputs, a gradient per floating input."""

    inputs: Inputs
    upstream: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @property
    def results(self) -> tuple[Tensor, ...]:
        return (*self.outputs, *self.gradients)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """The floating tensors a public function returns, in order, those of nested tuples too.

    Whole numbers, such as a layout's, have no gradient and no error to measure: they are for the family's own tests.
    """
    if isinstance(value, Tensor):
        return (value,) if value.is_floating_point() else ()
    return tuple(tensor for part in value for tensor in as_tuple(part))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def differentiate(
    subject: Subject, inputs: Inputs, upstream: tuple[Tensor, ...], preference: Preference, **keywords: Any
) -> Evaluation:
    """Outputs and all gradients for given inputs and upstream gradients."""
    own = leaves(inputs)
    outputs = as_tuple(subject(*own, preference=preference, **keywords))
    gradients = torch.autograd.grad(outputs, differentiable(own), upstream)
    return Evaluation(inputs, upstream, tuple(o.detach() for o in outputs), gradients)


def evaluate(
    subject: Subject, case: Case, dtype: torch.dtype, device: torch.device, preference: Preference, seed: int = 0
) -> Evaluation:
    """A subject on a case."""
    source = generator(seed)
    inputs = case.make(dtype, device, source)
    with torch.no_grad():
        outputs = as_tuple(subject(*inputs, preference=preference))
    upstream = tuple(case.upstream(output, source) for output in outputs)
    return differentiate(subject, inputs, upstream, preference)


def plan_of(subject: Subject, inputs: Inputs, preference: Preference) -> Plan:
    positional, named = subject.arguments(inputs)
    return plan(subject.function, *positional, preference=preference, **named)


def plan_names(chosen: Plan) -> str:
    """The name of a plan, and of its adjoint where that is another."""
    names = (chosen.name, chosen.adjoint.name) if chosen.adjoint is not None else (chosen.name,)
    return " + ".join(dict.fromkeys(names))


@dataclass(frozen=True)
class Directions:
    """Both directions of an evaluation, and all outputs of the forward operator."""

    forward: Bound
    backward: Bound
    outputs: tuple[Tensor, ...]

    @property
    def both(self) -> tuple[Bound, Bound]:
        return self.forward, self.backward


def directions_of(subject: Subject, found: Evaluation, preference: Preference) -> Directions:
    """The plans an evaluation takes, whatever the layout of its upstream gradients, and their arguments."""
    call, text = subject.bind(found.inputs), resolve(preference)
    forward = directions.forward(call, text)
    outputs = forward.run()
    return Directions(forward, directions.backward(call, found.upstream, outputs, text), outputs)


def gradients_of(subject: Subject, inputs: Inputs, backward: Bound, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Those of the adjoint's outputs that are gradients of these inputs, in their order."""
    by_name = backward.gradients(results)
    return tuple(by_name[name] for name in subject.gradients(inputs))


def guarantees_of(subject: Subject, chosen: Plan, found: Evaluation) -> tuple[dict[str, Guarantee], ...]:
    """What the public outputs promise, and what the gradients do, by name and in order."""
    assert chosen.adjoint is not None
    public = chosen.operator.outputs[: len(found.outputs)]
    return (
        {name: chosen.guarantee[name] for name in public},
        {name: chosen.adjoint.guarantee[name] for name in subject.gradients(found.inputs)},
    )


def measure(subject: Subject, chosen: Plan, found: Evaluation) -> dict[str, Measurement]:
    """The error of each public output and gradient beside the limit its guarantee states, by name."""
    inputs, upstream = widened(found.inputs), widened(found.upstream)
    forward, backward = guarantees_of(subject, chosen, found)
    measured = {}
    exact = subject.reference(*inputs)
    for (name, guarantee), output, truth in zip(forward.items(), found.outputs, exact, strict=True):
        measured[name] = guarantee.error.measure(output, truth, *inputs)
    exact = subject.reference_backward(*upstream, *inputs)
    for (name, guarantee), gradient, truth in zip(backward.items(), found.gradients, exact, strict=True):
        measured[name] = guarantee.error.measure(gradient, truth, *upstream, *inputs)
    return measured
