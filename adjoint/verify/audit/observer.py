"""What an audit records of every call: results and gradients beside float64, bounds, inputs outside the domain."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.contract.cases import Subject
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import as_tuple, widened
from adjoint.core.guarantee import Guarantee
from adjoint.core.op import Op
from adjoint.core.plan import Plan, select
from adjoint.ops import cases
from adjoint.verify.audit.domain import outside

DEFINITION, IN_FLOAT64 = "definition", "float64 plan"
"""The references of a comparison: the op's definition, where it is stated for these options, or else the plan in
PyTorch in float64, which `verify` compares with the definition."""


@dataclass
class Entry:
    """One result of one call.

    Attributes:
        layer: the module that made the call.
        measured, limit, unit: the error, its promised limit, and the unit of both; None if nothing could be compared.
        reference: the name of the reference.
        remarks: inputs outside the domain, results that are not finite, and reasons why something was not compared.
        is_finite: whether the result is finite.
    """

    layer: str
    op: str
    direction: str
    output: str
    plan: str
    measured: float | None = None
    limit: float | None = None
    unit: str = ""
    promise: str = ""
    reference: str = ""
    remarks: list[str] = field(default_factory=list)
    is_finite: bool = True

    @property
    def share(self) -> float:
        """The error as a share of the promised limit; 0 if nothing was measured."""
        if self.measured is None or self.limit is None:
            return 0.0
        if self.measured != self.measured:
            return float("inf")
        return self.measured / self.limit if self.limit else (float("inf") if self.measured else 0.0)

    @property
    def is_broken(self) -> bool:
        return self.share > 1


class Observer:
    """Watches the calls that modules make, and compares each one while its tensors exist. It keeps only numbers."""

    def __init__(self, model: nn.Module) -> None:
        self.entries: list[Entry] = []
        self._layers: list[str] = []
        self._handles: list[Any] = []
        for name, module in model.named_modules():
            self._handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self._layers.append(name)),  # type: ignore[misc]
                module.register_forward_hook(lambda *_: self._leave(), always_call=True),
            ]

    def _leave(self) -> None:
        self._layers.pop()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __call__(self, op: Op, arguments: tuple[Any, ...], form: str, preference: str, run: Callable[[], Any]) -> Any:
        layer = self._layers[-1] if self._layers else ""
        overwritten = op.overwrites or (form and op.forms[form].adjoint.overwrites)
        if overwritten:  # the comparison needs the arguments as they were before the call
            arguments_now = tuple(x.clone() if isinstance(x, Tensor) else x for x in arguments)
        else:
            arguments_now = arguments
        results = run()
        call = _Call(op, arguments_now, form, preference, layer or "the model")
        with torch.no_grad():
            self.entries += call.of_forward(as_tuple(results))
        node = next((x.grad_fn for x in as_tuple(results) if isinstance(x, Tensor) and x.grad_fn is not None), None)
        if node is not None and not op.forms[form].adjoint.buffers:
            node.register_hook(lambda gradients, upstream: self._see_backward(call, gradients, upstream))
        return results

    def _see_backward(self, call: "_Call", gradients: Sequence[Any], upstream: Sequence[Any]) -> None:
        with torch.no_grad():
            self.entries += call.of_backward(gradients, upstream)


@dataclass(frozen=True)
class _Call:
    """A call of an op, with its arguments (without `keep`) as they were before it ran."""

    op: Op
    arguments: tuple[Any, ...]
    form: str
    preference: str
    layer: str

    @property
    def inputs(self) -> tuple[Any, ...]:
        return tuple(x.detach() if isinstance(x, Tensor) else x for x in self.arguments[: self.op.input_count])

    @property
    def options(self) -> tuple[Any, ...]:
        return self.arguments[self.op.input_count :]

    def _complete(self, inputs: tuple[Any, ...], keep: bool) -> tuple[Any, ...]:
        return (*inputs, *self.options, keep) if self.op.kept else (*inputs, *self.options)

    # ------------------------------------------------------------------------------------------ forward

    def of_forward(self, results: tuple[Any, ...]) -> list[Entry]:
        named = dict(zip(self.op.inputs, self.inputs, strict=True))
        names = [option.split("=")[0].split()[-1] for option in self.op.options.split(",") if option.strip()]
        remarks = list(outside(self.op.name, named, dict(zip(names, self.options, strict=False))))
        shown = {
            name: x.detach()
            for name, x in zip(self.op.outputs, results, strict=False)
            if _is_measured(x) and name not in self.op.constant
        }
        entries = [Entry(self.layer, self.op.label, "forward", name, "") for name in shown]
        try:
            exact_inputs = widened(self.inputs)
            operator = self.op.forward
            keep = torch.is_grad_enabled()
            plan = select(operator, operator.describe(*self._complete(self.inputs, keep)), self.preference)
            subject = _subject(self.op, self.inputs, self.options)
            ordered = _ordered(self.op, exact_inputs)
            if subject is not None:
                truth = dict(zip(self.op.outputs, subject.reference(*ordered), strict=False))
            else:
                truth = dict(zip(operator.outputs, self._in_float64(exact_inputs), strict=False))
            self._measure(entries, shown, truth, plan, ordered, subject)
        except Exception as error:  # the audit says what it could not compare, and goes on
            remarks.append(f"not compared: {type(error).__name__}: {error}")
        return self._finish(entries, shown, remarks, bool(remarks))

    def _in_float64(self, inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """All outputs of the forward, from the plan in PyTorch."""
        operator, complete = self.op.forward, self._complete(inputs, keep=True)
        return select(operator, operator.describe(*complete), "backend=eager").execute(complete)

    # ----------------------------------------------------------------------------------------- backward

    def of_backward(self, gradients: Sequence[Any], upstream: Sequence[Any]) -> list[Entry]:
        op = self.op
        tensors = [name for name, x in zip(op.inputs, self.inputs, strict=True) if isinstance(x, Tensor)]
        shown = {f"d{name}": x for name, x in zip(tensors, gradients, strict=False) if _is_measured(x)}
        remarks = [
            f"the gradient of {name[1:]} that comes in is not finite"
            for name, x in zip(op.upstream, upstream, strict=False)
            if x is not None and not bool(x.isfinite().all())
        ]
        entries = [Entry(self.layer, op.label, "backward", name, "") for name in shown]
        try:
            used, plain = op.forms[self.form], op.forms[""]
            absences = (None,) * (len(op.upstream) - len(upstream))
            upstream_gradients = (*upstream[: len(op.upstream)], *absences)
            buffers = op.forward.allocate(*self._complete(self.inputs, keep=True))
            arguments = used.arguments(upstream_gradients, (*self.inputs, *self.options), buffers, ())
            plan = select(used.operator, used.operator.describe(*arguments), self.preference)
            del buffers, arguments
            exact_inputs = widened(self.inputs)
            outputs = self._in_float64(exact_inputs)
            exact_upstream = widened(upstream_gradients)
            subject, ordered = _subject(op, self.inputs, self.options), _ordered(op, exact_inputs)
            complete = [
                torch.zeros_like(output) if gradient is None else gradient
                for gradient, output in zip(exact_upstream, outputs, strict=False)
            ]
            absent = op.absent(*self.arguments) if op.absent else ()
            complete = [x for x, name in zip(complete, op.upstream, strict=True) if name[1:] not in absent]
            if subject is not None:
                slopes = subject.reference_backward(*complete, *ordered)
                truth = dict(zip(subject.gradients(ordered), slopes, strict=True))
            else:
                exact_arguments = plain.arguments(exact_upstream, (*exact_inputs, *self.options), outputs, ())
                eager = select(plain.operator, plain.operator.describe(*exact_arguments), "backend=eager")
                truth = Bound(eager, exact_arguments).gradients(eager.execute(exact_arguments))
            about = subject or _any_subject(op)
            choices = about.choices(*ordered) if about is not None else ()
            self._measure(entries, shown, truth, plan, (*complete, *ordered, *choices), subject)
        except Exception as error:
            remarks.append(f"not compared: {type(error).__name__}: {error}")
        return self._finish(entries, shown, remarks, bool(remarks))

    # ------------------------------------------------------------------------------------------ both

    def _measure(
        self,
        entries: list[Entry],
        shown: dict[str, Tensor],
        truth: dict[str, Tensor],
        plan: Plan,
        arguments: tuple[Any, ...],
        subject: Subject | None,
    ) -> None:
        for entry in entries:
            guarantee: Guarantee = plan.guarantee[entry.output]
            exact = truth[entry.output]
            error = guarantee.error.measure(shown[entry.output].reshape(exact.shape), exact, *arguments)
            entry.plan, entry.measured, entry.limit, entry.unit = plan.name, error.value, error.limit, error.unit
            entry.promise, entry.reference = str(guarantee.error), DEFINITION if subject else IN_FLOAT64

    def _finish(
        self, entries: list[Entry], shown: dict[str, Tensor], remarks: list[str], has_cause: bool
    ) -> list[Entry]:
        for entry in entries:
            entry.remarks += remarks
            if not bool(shown[entry.output].isfinite().all()):
                entry.is_finite = False
                where = "" if has_cause else ", and every input is"
                entry.remarks.append(f"{entry.output} is not finite{where}")
        return entries


def _is_measured(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


# ---------------------------------------------------------------------------------------------- subjects


@cache
def _subjects() -> dict[str, list[tuple[Subject, tuple[Any, ...]]]]:
    """The subjects of every operator, each with the options of its call."""
    by_operator: dict[str, list[tuple[Subject, tuple[Any, ...]]]] = {}
    for subject in (subject for module in cases() for subject in module.SUBJECTS):
        inputs = subject.cases[0].make(subject.dtypes[0], torch.device("cpu"), torch.Generator().manual_seed(0))
        call = subject.bind(inputs)
        count = len(call.operator.tensors)
        if {*subject.inputs} <= {*call.operator.tensors}:
            by_operator.setdefault(call.operator.name, []).append((subject, call.arguments[count:]))
    return by_operator


def _candidates(op: Op) -> Iterator[tuple[Subject, tuple[Any, ...]]]:
    for subject, options in _subjects().get(op.name, ()):
        yield subject, options[: len(options) - 1] if op.kept else options


def _subject(op: Op, inputs: tuple[Any, ...], options: tuple[Any, ...]) -> Subject | None:
    """The subject with the definition of a call with these options and inputs; None if there is none."""
    present = {name for name, x in zip(op.inputs, inputs, strict=True) if x is not None}
    return next((s for s, own in _candidates(op) if own == options and present <= {*s.inputs}), None)


def _any_subject(op: Op) -> Subject | None:
    return next((subject for subject, _ in _candidates(op)), None)


def _ordered(op: Op, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs in the order of the public function, in which references and bounds take them."""
    about = _any_subject(op)
    if about is None:
        return inputs
    named = dict(zip(op.inputs, inputs, strict=True))
    return tuple(named[name] for name in about.inputs)
