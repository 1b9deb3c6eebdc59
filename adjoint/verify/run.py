"""Running a subject: one evaluation with its gradients, and its comparison with the reference."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adjoint.core.cases import Case, Subject
from adjoint.core.guarantee import Measurement
from adjoint.core.plan import Plan, plan
from adjoint.core.preference import Preference


@dataclass(frozen=True)
class Evaluation:
    """Inputs, upstream gradients, and what came of them."""

    inputs: tuple[Tensor, ...]
    upstream: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @property
    def results(self) -> tuple[Tensor, ...]:
        return (*self.outputs, *self.gradients)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def differentiate(
    subject: Subject, inputs: tuple[Tensor, ...], upstream: tuple[Tensor, ...], preference: Preference, **keywords: Any
) -> Evaluation:
    """Outputs and all gradients for given inputs and upstream gradients."""
    leaves = tuple(tensor.detach().requires_grad_() for tensor in inputs)
    outputs = as_tuple(subject(*leaves, preference=preference, **keywords))
    gradients = torch.autograd.grad(outputs, leaves, upstream)
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


def plan_of(subject: Subject, inputs: tuple[Tensor, ...], preference: Preference) -> Plan:
    return plan(subject.function, *inputs, preference=preference, **subject.keywords)


def measure(subject: Subject, chosen: Plan, found: Evaluation) -> dict[str, Measurement]:
    """The error of each output and gradient beside the limit its guarantee states, by name."""
    assert chosen.adjoint is not None
    inputs = tuple(tensor.double() for tensor in found.inputs)
    upstream = tuple(tensor.double() for tensor in found.upstream)
    measured = {}
    exact = subject.reference(*inputs)
    for (name, guarantee), output, truth in zip(chosen.guarantee.items(), found.outputs, exact, strict=True):
        measured[name] = guarantee.error.measure(output, truth, *inputs)
    exact = subject.reference_backward(*upstream, *inputs)
    for (name, guarantee), gradient, truth in zip(
        chosen.adjoint.guarantee.items(), found.gradients, exact, strict=True
    ):
        measured[name] = guarantee.error.measure(gradient, truth, *upstream, *inputs)
    return measured
