"""Small known answers for the first-use check: a case of the op, computed by a plan and by the float64 reference."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from adjoint.contract.cases import Case, Subject
from adjoint.contract.directions import Bound
from adjoint.contract.inputs import Inputs, as_tuple, each, widened
from adjoint.core.errors import Unsupported, WrongResult
from adjoint.core.plan import Call, Plan, select
from adjoint.ops import cases

ENOUGH = 2**14
"""A number of elements that is enough for several tiles. Of the cases with no more elements, the largest is taken."""

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Example:
    """A case that a plan's candidate can compute, and the plan of it."""

    subject: Subject
    case: Case
    dtype: torch.dtype
    plan: Plan
    elements: int

    def inputs(self, device: torch.device) -> tuple[Inputs, torch.Generator]:
        """The inputs, and the generator that draws the upstream gradients."""
        source = torch.Generator().manual_seed(0)
        return self.case.make(self.dtype, device, source), source


def compare(plan: Plan) -> bool:
    """Computes the known answer that is nearest to a plan's problem, and compares; False if there is none.

    Raises:
        WrongResult: an output is not within the guarantee.
    """
    device = plan.problem.device
    with torch.inference_mode(False), torch.autocast(device.type, enabled=False):
        with torch.no_grad():
            example = _nearest(plan, heavy=False) or _nearest(plan, heavy=True)
        if example is None:
            return False
        inputs, source = example.inputs(device)
        compute = _forward if _is_forward(plan, example.subject.bind(inputs)) else _backward
        computed = compute(example, inputs, source)
    if computed is None:
        return False
    results, exact, arguments = computed
    for (name, result), truth in zip(results.items(), exact, strict=True):
        error = example.plan.guarantee[name].error
        measured = error.measure(result.reshape(truth.shape), truth, *arguments)
        if not measured.holds:
            raise WrongResult(
                f"{plan.operator.name}: the plan {plan.name} computes {name} wrongly on {device}: the error is "
                f"{measured}, where it guarantees {error}; SKU {plan.sku}, case {example.case.name!r} of "
                f"{example.subject.name}. Nothing it computes here can be trusted: prefer another plan, and report this"
            )
    return True


# ------------------------------------------------------------------------------------------------- which case


def _nearest(plan: Plan, heavy: bool) -> Example | None:
    return max(_examples(plan, heavy), key=lambda example: _nearness(plan, example), default=None)


def _examples(plan: Plan, heavy: bool) -> Iterator[Example]:
    """The cases of a plan's op that have its element type and that its candidate can compute."""
    for subject in (subject for module in cases() for subject in module.SUBJECTS):
        if not _is_about(plan, subject):
            continue
        for dtype in (dtype for dtype in subject.dtypes if dtype in plan.problem.dtypes):
            for case in (case for case in subject.cases if case.heavy == heavy):
                example = _example(plan, subject, case, dtype)
                if example is not None:
                    yield example


def _is_about(plan: Plan, subject: Subject) -> bool:
    call = subject.bind(subject.cases[0].make(subject.dtypes[0], CPU, torch.Generator().manual_seed(0)))
    return plan.operator is call.operator or plan.operator is call.adjoint


def _is_forward(plan: Plan, call: Call) -> bool:
    return plan.operator is call.operator


def _example(plan: Plan, subject: Subject, case: Case, dtype: torch.dtype) -> Example | None:
    """A case, if a plan's candidate can compute it with the same element type."""
    inputs = case.make(dtype, CPU, torch.Generator().manual_seed(0))
    sizes = [tensor.numel() for tensor in inputs if tensor is not None]
    if not all(sizes):
        return None
    problems = {id(operator): problem for operator, problem in subject.bind(inputs).problems(plan.problem.device)}
    problem = problems.get(id(plan.operator))
    if problem is None or problem.dtypes[0] != plan.problem.dtypes[0] or plan.candidate.refuse(problem):
        return None
    return Example(subject, case, dtype, replace(plan, problem=problem, adjoint=None), sum(sizes))


def _nearness(plan: Plan, example: Example) -> tuple[Any, ...]:
    """A key that is greater for a nearer case. First it says whether the case launches the same compiled kernels."""
    ours, theirs = plan.problem, example.plan.problem
    kernels, own = ({launch.variant for launch in p.launches} for p in (plan, example.plan))
    same = (ours.dtypes == theirs.dtypes, ours.options == theirs.options, ours.layout == theirs.layout)
    shared = len(kernels & own), sum(a == b for a, b in zip(ours.sizes, theirs.sizes, strict=False))
    size = example.elements if example.elements <= ENOUGH else -example.elements
    return (kernels <= own, *same, *shared, size)


# ------------------------------------------------------------------------------------------------ both answers

Computed = tuple[dict[str, Tensor], tuple[Tensor, ...], Inputs]
"""The results by name, the exact results, and the arguments of the reference."""


def _forward(example: Example, inputs: Inputs, source: torch.Generator) -> Computed:
    call = example.subject.bind(inputs)
    with torch.no_grad():
        outputs = example.plan.execute(call.arguments)[: call.public_outputs]
    results = dict(zip(call.operator.outputs, map(torch.Tensor.cpu, outputs), strict=False))
    arguments = _as_reference_takes(inputs)
    return results, as_tuple(example.subject.reference(*arguments)), arguments


def _backward(example: Example, inputs: Inputs, source: torch.Generator) -> Computed | None:
    """The results of the backward; None for an operator that writes over its arguments and so has no outputs."""
    subject, call = example.subject, example.subject.bind(inputs)
    assert call.adjoint_arguments is not None
    with torch.no_grad():
        outputs = _outputs_of(call, example.plan)
        upstream = tuple(example.case.upstream(output, source) for output in outputs[: call.public_outputs])
        arguments = call.adjoint_arguments(upstream, outputs)
        results = example.plan.execute(arguments)
        if not results:
            return None
        gradients = Bound(example.plan, arguments).gradients(results)
    named = {name: gradients[name].cpu() for name in subject.gradients(inputs)}
    taken = _as_reference_takes((*upstream, *inputs))
    return named, as_tuple(subject.reference_backward(*taken)), taken


def _outputs_of(call: Call, plan: Plan) -> tuple[Tensor, ...]:
    """All outputs of the forward, from the plan with the same name if it has one."""
    problem = call.operator.describe(*call.arguments)
    try:
        forward = select(call.operator, problem, f"plan={plan.name}")
    except Unsupported:
        forward = select(call.operator, problem, "")
    return forward.execute(call.arguments)


def _as_reference_takes(inputs: Inputs) -> Inputs:
    """The inputs on the CPU, whose results are independent of the device's, with floating ones in float64."""
    return widened(each(torch.Tensor.cpu, inputs))
