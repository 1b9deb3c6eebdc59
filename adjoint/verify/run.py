"""Running a subject: one evaluation with its gradients, its comparison with the reference, and a verdict."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.contract import directions
from adjoint.contract.cases import Case, Subject
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import Inputs, widened
from adjoint.core.guarantee import Derived, Empirical, Guarantee, Measurement
from adjoint.core.plan import Plan, plan
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import short


@dataclass(frozen=True)
class Row:
    """The result of one check for one op, dtype and plan.

    Attributes:
        guarantee: the promise that was checked, in words.
        measured: an error with its limit, or a number of comparisons.
        detail: what went wrong, if something did.
        skus: the SKUs of the plans that ran.
    """

    op: str
    check: str
    dtype: str
    plan: str
    guarantee: str
    measured: str
    passed: bool
    detail: str = ""
    skus: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evaluation:
    """Inputs and upstream gradients, with their results: the public outputs and a gradient for each floating input."""

    subject: Subject
    preference: Preference
    inputs: Inputs
    upstream: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @property
    def results(self) -> tuple[Tensor, ...]:
        return (*self.outputs, *self.gradients)

    @cached_property
    def plan(self) -> Plan:
        return plan_of(self.subject, self.inputs, self.preference)

    @property
    def plan_names(self) -> str:
        """The name of the plan, and that of its adjoint if it differs."""
        names = (self.plan.name, self.plan.adjoint.name) if self.plan.adjoint is not None else (self.plan.name,)
        return " + ".join(dict.fromkeys(names))

    @property
    def skus(self) -> tuple[str, ...]:
        """The SKUs of the plan and of its adjoint."""
        return tuple(str(side.sku) for side in (self.plan, self.plan.adjoint) if side is not None)

    @cached_property
    def guarantees(self) -> tuple[dict[str, Guarantee], dict[str, Guarantee]]:
        """The promises of the public outputs and those of the gradients, by name and in order."""
        chosen = self.plan
        assert chosen.adjoint is not None
        public = chosen.operator.outputs[: len(self.outputs)]
        return (
            {name: chosen.guarantee[name] for name in public},
            {name: chosen.adjoint.guarantee[name] for name in self.subject.gradients(self.inputs)},
        )

    def promises(self, flag: str) -> tuple[bool, bool]:
        """Whether all public outputs make a promise about bits, and whether all gradients do."""
        forward, backward = self.guarantees
        return all(getattr(g, flag) for g in forward.values()), all(getattr(g, flag) for g in backward.values())

    def again(self, inputs: Inputs | None = None, upstream: tuple[Tensor, ...] | None = None) -> "Evaluation":
        """Evaluates once more; with other inputs or upstream gradients, if these are stated."""
        inputs, upstream = self.inputs if inputs is None else inputs, self.upstream if upstream is None else upstream
        return differentiate(self.subject, inputs, upstream, self.preference)

    def row(
        self, check: str, dtype: torch.dtype, guarantee: str, measured: str | None = None, wrong: Sequence[str] = ()
    ) -> Row:
        """The row of a check, which passed if nothing is wrong. By default, `measured` is the same as `guarantee`."""
        where = self.subject.name, check, short(dtype), self.plan_names
        return Row(*where, guarantee, measured or guarantee, not wrong, "; ".join(wrong), self.skus)


def as_tuple(value: Any) -> tuple[Tensor, ...]:
    """The floating tensors that a public function returns, in order, including those in nested tuples.

    Integer tensors, such as those of a layout, have no gradient and no error to measure. The family's own tests check
    them.
    """
    if isinstance(value, Tensor):
        return (value,) if value.is_floating_point() else ()
    return tuple(tensor for part in value or () for tensor in as_tuple(part))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def differentiate(subject: Subject, inputs: Inputs, upstream: tuple[Tensor, ...], preference: Preference) -> Evaluation:
    """Computes the outputs and all gradients for some inputs and upstream gradients."""
    return Forward(subject, inputs, preference).backward(upstream)


class Forward:
    """A subject's outputs, with a backward that can run for any number of upstream gradients."""

    def __init__(self, subject: Subject, inputs: Inputs, preference: Preference) -> None:
        self._subject, self._inputs, self._preference = subject, inputs, preference
        self._leaves = subject.leaves(inputs)
        self._outputs = as_tuple(subject(*self._leaves, preference=preference))
        self.outputs = tuple(output.detach() for output in self._outputs)

    def backward(self, upstream: tuple[Tensor, ...], *, keep: bool = False) -> Evaluation:
        """Computes the gradients. With `keep`, another backward can follow."""
        leaves = self._subject.differentiable(self._leaves)
        gradients = torch.autograd.grad(self._outputs, leaves, upstream, retain_graph=keep)
        return Evaluation(self._subject, self._preference, self._inputs, upstream, self.outputs, gradients)


def evaluate(
    subject: Subject, case: Case, dtype: torch.dtype, device: torch.device, preference: Preference, seed: int = 0
) -> Evaluation:
    """Evaluates a subject on a case. An error says which case it was."""
    source = generator(seed)
    with naming(case):
        forward = Forward(subject, case.make(dtype, device, source), preference)
        return forward.backward(tuple(case.upstream(output, source) for output in forward.outputs))


@contextmanager
def naming(case: Case) -> Iterator[None]:
    """Notes the name of a case on an error in a block."""
    try:
        yield
    except Exception as error:
        error.add_note(f"case {case.name!r}")
        raise


def plan_of(subject: Subject, inputs: Inputs, preference: Preference) -> Plan:
    positional, named = subject.arguments(inputs)
    return plan(subject.function, *positional, preference=preference, **named)


@dataclass(frozen=True)
class Directions:
    """Both directions of an evaluation, and all outputs of the forward operator."""

    forward: Bound
    backward: Bound
    outputs: tuple[Tensor, ...]

    @property
    def both(self) -> tuple[Bound, Bound]:
        return self.forward, self.backward


def directions_of(evaluation: Evaluation) -> Directions:
    """The plans of an evaluation, for its upstream gradients in their own layout, with arguments and outputs."""
    call, text = evaluation.subject.bind(evaluation.inputs), resolve(evaluation.preference)
    forward = directions.forward(call, text)
    outputs = forward.run()
    return Directions(forward, directions.backward(call, evaluation.upstream, outputs, text), outputs)


def gradients_of(evaluation: Evaluation, backward: Bound, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The outputs of the adjoint that are gradients of an evaluation's inputs, in the order of the inputs."""
    by_name = backward.gradients(results)
    return tuple(by_name[name] for name in evaluation.subject.gradients(evaluation.inputs))


class Comparison(NamedTuple):
    """A result, the exact result, the guarantee of its plan, and the arguments of the reference."""

    name: str
    guarantee: Guarantee
    result: Tensor
    exact: Tensor
    arguments: Inputs

    @property
    def promise(self) -> Measurement:
        """The error, with the promised limit."""
        return self.guarantee.error.measure(self.result, self.exact, *self.arguments)

    def with_bound(self) -> "Comparison":
        """The same comparison with its bound evaluated, so that several results can be measured against it."""
        error = self.guarantee.error
        if not isinstance(error, Derived):
            return self
        bound = error.bound(*self.arguments)
        return self._replace(guarantee=replace(self.guarantee, error=replace(error, bound=lambda *inputs: bound)))

    @property
    def relative_error(self) -> float:
        """‖error‖ / ‖exact‖."""
        return Empirical(0.0, "").measure(self.result, self.exact).value


def compare(evaluation: Evaluation) -> list[Comparison]:
    """Compares each public output and gradient with that of the reference."""
    subject, inputs, upstream = evaluation.subject, widened(evaluation.inputs), widened(evaluation.upstream)
    forward, backward = evaluation.guarantees
    of_gradients = (*upstream, *inputs, *subject.choices(*inputs))
    return [
        Comparison(name, guarantee, result, exact, arguments)
        for promises, results, truth, arguments in (
            (forward, evaluation.outputs, subject.reference(*inputs), inputs),
            (backward, evaluation.gradients, subject.reference_backward(*upstream, *inputs), of_gradients),
        )
        for (name, guarantee), result, exact in zip(promises.items(), results, truth, strict=True)
    ]


def measure(evaluation: Evaluation) -> dict[str, Measurement]:
    """The error of each public output and gradient by name, with the limit of its guarantee."""
    return {comparison.name: comparison.promise for comparison in compare(evaluation)}
