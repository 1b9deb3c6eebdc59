"""The check of other forms of a call: they reuse, overwrite or add to the caller's memory, or give sparse gradients."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Case, Subject
from adjoint.contract.forms import Form, Outcome
from adjoint.contract.inputs import Inputs, differentiable, each, leaves, widened
from adjoint.core.guarantee import Guarantee
from adjoint.core.plan import Call, bind, select
from adjoint.core.preference import Preference, resolve
from adjoint.verify.checks.bits import BitComparison, eager_twin
from adjoint.verify.checks.guarded import Guarded
from adjoint.verify.checks.numerics import case_of
from adjoint.verify.run import Evaluation, Row, as_tuple, evaluate

OFFSETS = (64, 65)
"""The offsets at which the memory that a form writes to begins: an aligned address, and an unaligned one."""


def forms(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Every other form gives the bits of the plain form, on repetition too, and writes to no memory but its own.

    A form that adds to existing numbers is within its error statement instead. Where it promises the same bits on every
    device, they are those of PyTorch on the CPU.
    """
    rows = []
    for form in subject.forms:
        promise = "within its bound" if form.exact else "the bits of the plain form"
        comparison = BitComparison(subject, dtype, device, preference, "forms", f"{form.name}: {promise}")
        for case in cases_of(subject, dtype):
            evaluation = evaluate(subject, case, dtype, device, preference)
            if form.takes(evaluation.inputs):
                comparison.plan = evaluation.plan_names
                _compare(comparison, form, case, evaluation)
        rows.append(comparison.row())
    return rows


def cases_of(subject: Subject, dtype: torch.dtype) -> Iterator[Case]:
    """The cases of the subject, and cases of its special values."""
    yield from subject.cases
    yield from (case_of(special) for special in subject.specials if not special.dtypes or dtype in special.dtypes)


def _compare(comparison: BitComparison, form: Form, case: Case, evaluation: Evaluation) -> None:
    first: tuple[Tensor, ...] | None = None
    for offset in OFFSETS:
        results, guarded = _run(form, evaluation, evaluation.preference, offset)
        comparison.hold(all(each.is_intact() for each in guarded), f"{case.name}: wrote outside its memory")
        if form.exact is None:
            comparison.equal(case.name, results, evaluation.results[: len(results)])
        elif first is None:
            first = results
            _compare_sums(comparison, form, case, evaluation, results)
        else:
            comparison.equal(f"{case.name}: again", results, first)


def _compare_sums(
    comparison: BitComparison, form: Form, case: Case, evaluation: Evaluation, results: tuple[Tensor, ...]
) -> None:
    """Compares results that were added to existing numbers with their error statements and with PyTorch on the CPU."""
    assert form.exact is not None
    promises = promises_of(form, evaluation.subject, evaluation.inputs, evaluation.preference)
    keywords = _widened(form.keywords(evaluation.inputs))
    exact = form.exact(widened(evaluation.upstream), widened(evaluation.inputs), keywords)
    for (name, promise), result, (truth, arguments) in zip(promises.items(), results, exact, strict=True):
        error = promise.error.measure(result, truth, *arguments)
        comparison.hold(error.holds, f"{case.name}: {name} is {error} off")
    if all(promise.device_invariant for promise in promises.values()):
        inputs, upstream = each(Tensor.cpu, evaluation.inputs), tuple(x.cpu() for x in evaluation.upstream)
        there = Evaluation(
            evaluation.subject, evaluation.preference, inputs, upstream, evaluation.outputs, evaluation.gradients
        )
        on_cpu, _ = _run(form, there, eager_twin(evaluation.preference), OFFSETS[0])
        comparison.equal(f"{case.name}: on the CPU", tuple(x.cpu() for x in results), on_cpu)


def _widened(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in keywords.items()}


def _run(
    form: Form, evaluation: Evaluation, preference: Preference, offset: int
) -> tuple[tuple[Tensor, ...], list[Guarded]]:
    """The results of a form, and the guarded memory that was allocated for it to write to."""
    subject, guarded = evaluation.subject, []

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        guarded.append(Guarded.copy(value, offset))
        return guarded[-1].tensor

    named = zip(subject.inputs, evaluation.inputs, strict=True)
    inputs = tuple(own(x) if name in form.overwrites else x for name, x in named)
    keywords = {name: own(value) for name, value in form.keywords(evaluation.inputs).items()}
    gradients: tuple[Tensor | None, ...] = ()
    if form.is_differentiable:
        inputs = leaves(inputs)
        outputs = as_tuple(subject(*inputs, **keywords, preference=preference))
        gradients = torch.autograd.grad(outputs, differentiable(inputs), evaluation.upstream, allow_unused=True)
    else:
        with torch.no_grad():
            outputs = as_tuple(subject(*inputs, **keywords, preference=preference))
    values = tuple(output.detach() for output in outputs)
    results = form.results(Outcome(values, gradients, each(Tensor.detach, inputs), keywords, evaluation.inputs))
    if any(result is None for result in results):
        raise ValueError(f"{form.name}: a gradient is not there")
    return tuple(result for result in results if result is not None), guarded


def call_of(form: Form, subject: Subject, inputs: Inputs) -> Call:
    """The operators that a call in another form runs, with their arguments."""
    positional, named = subject.arguments(inputs)
    return bind(subject.function, *positional, **named, **form.keywords(inputs))


def promises_of(form: Form, subject: Subject, inputs: Inputs, preference: Preference) -> dict[str, Guarantee]:
    """The promises of a form's results, by the names that the results have in the plain form."""
    call, text = call_of(form, subject, inputs), resolve(preference)
    stated: dict[str, Guarantee] = {}
    device = next(x.device for x in inputs if x is not None)
    for operator, problem in call.problems(device):
        stated |= select(operator, problem, text).guarantee
    plain = subject.bind(inputs)
    names = plain.operator.outputs[: plain.public_outputs]
    if form.is_differentiable:
        names = (*names, *subject.gradients(inputs))
    return {name: stated[form.output(name)] for name in names if form.output(name) in stated}
