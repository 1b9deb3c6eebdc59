"""The quick set of checks: the fewest cases on which every op, plan and promise of a machine is checked once.

A stop is a case of a subject in one dtype, by one plan. Stops that cost little are tried first. A stop is taken if it
adds a plan, a kernel, a promise or, in PyTorch, a dtype. All checks of a plan then run at each stop, so that its
kernels are compiled once. `coverage` says what a promise is.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from adjoint.contract.cases import Subject
from adjoint.contract.inputs import Inputs
from adjoint.contract.undrawn import undrawn
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Plan, select
from adjoint.core.preference import Preference, resolve
from adjoint.verify.checks import bits, framework, numerics
from adjoint.verify.checks.digests import digests
from adjoint.verify.checks.forms import call_of, forms
from adjoint.verify.listing.coverage import PROMISES, Promise
from adjoint.verify.listing.jobs import Job, bad_calls, job_of, named_plans, on_device, served_backends, subjects
from adjoint.verify.run import Row

ENOUGH = 2**14
"""A number of elements that is enough for several tiles and few enough for every check. Of the cases with no more
elements, the largest comes first."""

LARGE = 4 * ENOUGH
"""A case with more elements is tried in only one dtype."""

CPU = torch.device("cpu")

Check = Callable[[Subject, torch.dtype, torch.device, Preference], list[Row]]


class Stop(NamedTuple):
    """A case of a subject in one dtype, computed by the plans that a preference chooses.

    `is_first` says that it is the first stop of its backend, which has more checks. A stop has only values that can
    travel between processes.
    """

    subject: str
    dtype: torch.dtype
    preference: Preference
    case: str
    is_first: bool


def stops(ops: Sequence[str] | None, device: torch.device) -> list[Stop]:
    """The stops of the named ops, or of all ops, on a device."""
    seen: set[Any] = set()
    chosen: list[Stop] = []
    for subject in (on_device(subject, device) for subject in subjects(ops)):
        started: set[Any] = set()
        for option in _options(subject, device):
            backend = option.preference.backend or option.preference.plan
            facts = {*option.facts, (subject.name, backend)}
            if not facts <= seen:
                first = backend not in started
                chosen.append(Stop(subject.name, option.dtype, option.preference, option.case, first))
                started.add(backend)
                seen |= facts
    return chosen


def jobs_at(chosen: Sequence[Stop], ops: Sequence[str] | None, device: torch.device) -> list[Job]:
    """A job for each stop, and one for each folder of ops with the calls that its ops must refuse."""
    by_name = {subject.name: subject for subject in subjects(ops)}
    listing = []
    for stop in chosen:
        own = checks_at(stop, by_name[stop.subject], device)
        label = own[0].label.rpartition(":")[0] + f", {stop.case}"
        listing.append(replace(own[0], label=label, check="every promise", body=partial(_run_all, own)))
    return listing + _refusals({subject.function for subject in by_name.values()}, device)


def checks_at(stop: Stop, subject: Subject, device: torch.device) -> list[Job]:
    """The checks of a stop, one by one."""
    (case,) = (case for case in subject.cases if case.name == stop.case)
    there = replace(subject, cases=(case,))
    checks: dict[str, Check] = {
        "accuracy": partial(numerics.accuracy, cases=(case,)),
        "repeats": bits.repeats,
        "batch invariance": bits.invariance,
        "device invariance": bits.devices,
        "poison": bits.poison,
    }
    if stop.dtype.itemsize == 2:
        checks["arithmetic"] = numerics.arithmetic
    if subject.forms:
        checks["forms"] = forms
    if subject.specials:
        checks["special values"] = numerics.specials
    if stop.is_first:
        checks["upstream layouts"] = bits.upstreams
        if device.type == "cuda":
            checks["capture"] = framework.capture
    checks["digest"] = digests
    return [job_of(there, name, stop.dtype, device, stop.preference, check) for name, check in checks.items()]


def _run_all(checks: Sequence[Job]) -> list[Row]:
    return [row for check in checks for row in check.run()]


def _refusals(functions: set[Any], device: torch.device) -> list[Job]:
    """The calls that ops must refuse, in one job for each folder."""
    by_folder: dict[str, list[Job]] = {}
    for job in bad_calls(functions, device):
        by_folder.setdefault(job.op, []).append(job)
    return [
        replace(own[0], label=f"{folder}: calls to refuse", body=partial(_run_all, own))
        for folder, own in by_folder.items()
    ]


# ----------------------------------------------------------------------------------------------- choice


class _Option(NamedTuple):
    """A possible stop, with its cost and the facts that it would check."""

    cost: int
    dtype: torch.dtype
    preference: Preference
    case: str
    facts: frozenset[Any]


def _options(subject: Subject, device: torch.device) -> list[_Option]:
    """Every case, dtype and preference of a subject, in the order in which they are tried."""
    requests = [(Preference(backend=backend), served.dtypes) for backend, served in served_backends(subject, device)]
    requests += [(Preference(plan=plan), subject.dtypes) for plan in named_plans(subject, device)]
    default = torch.bfloat16 if torch.bfloat16 in subject.dtypes else subject.dtypes[0]
    options, large = [], {case.name for case in subject.cases if case.heavy}
    for dtype in sorted(subject.dtypes, key=lambda dtype: dtype != default):
        for case in subject.cases:
            if case.name in large and dtype != default:  # one dtype is enough for what only large cases show
                continue
            inputs = undrawn(case, dtype)
            sizes = [tensor.numel() for tensor in inputs if tensor is not None]
            if not all(sizes):
                continue
            if sum(sizes) > LARGE:
                large.add(case.name)
            for preference, dtypes in requests:
                facts = _facts(subject, inputs, dtype, preference, device) if dtype in dtypes else frozenset[Any]()
                if facts:
                    options.append(_Option(sum(sizes), dtype, preference, case.name, facts))
    return sorted(options, key=_order)


def _order(option: _Option) -> tuple[bool, int]:
    is_large = option.cost > ENOUGH
    return is_large, option.cost if is_large else -option.cost


def _facts(
    subject: Subject, inputs: Inputs, dtype: torch.dtype, preference: Preference, device: torch.device
) -> frozenset[Any]:
    """The plans with the kernels that they launch, and the promises of the results that checks see.

    There are none if the plan that is asked for does not take the case.
    """
    call, text = subject.bind(inputs), resolve(preference)
    facts: set[Any] = set()
    visible = {*call.operator.outputs[: call.public_outputs], *subject.gradients(inputs)}
    try:
        for plan in (select(operator, problem, text) for operator, problem in call.problems(device)):
            facts.update(_of_plan(plan, visible))
            if plan.backend == "eager":  # here a further dtype needs no further compilation
                facts.add((plan.operator.name, plan.name, dtype))
        for form in subject.forms:
            for operator, problem in call_of(form, subject, inputs).problems(device):
                facts.update(_of_plan(select(operator, problem, text), set()))
    except Unsupported:
        return frozenset()
    return frozenset(facts)


def _of_plan(plan: Plan, visible: set[str]) -> Iterator[Any]:
    """The plan with its kernels, and the promises of the visible outputs."""
    yield plan.operator.name, plan.name, frozenset(launch.kernel.name for launch in plan.launches)
    for output, guarantee in plan.guarantee.items():
        for promise in PROMISES if output in visible else ():
            if getattr(guarantee, promise):
                yield Promise(plan.operator.name, plan.name, output, promise)
