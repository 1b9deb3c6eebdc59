"""Which promises are checked: the promises of plans about their outputs, without those that the listed checks cover.

A promise is a field of a `Guarantee` that states something, for one output of one plan of one operator. This module
also lists the figures that a machine should have on record.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch

from adjoint.contract.cases import Case, Subject
from adjoint.contract.undrawn import undrawn
from adjoint.core.guarantee import Guarantee
from adjoint.core.kernels import why_not_triton
from adjoint.core.layout import to_meta
from adjoint.core.plan import Call, select
from adjoint.core.preference import Preference, resolve
from adjoint.verify.checks.bits import eager_twin
from adjoint.verify.checks.forms import call_of
from adjoint.verify.figures import Place, due_of, is_on_kernels
from adjoint.verify.listing.jobs import Job, available_backends, named_plans, served_backends, subjects

PROMISES = (
    "repeatable",
    "batch_invariant",
    "prefix_invariant",
    "device_invariant",
    "accumulator",
    "roundings",
    "error",
    "special_values",
    "out_of_range",
    "ties",
)

BY_CHECK: dict[str, tuple[str, ...]] = {
    "accuracy": ("error",),
    "exhaustive": ("error",),
    "repeats": ("repeatable",),
    "poison": ("repeatable",),
    "batch invariance": ("batch_invariant",),
    "device invariance": ("device_invariant",),
    "arithmetic": ("accumulator", "roundings"),
    "special values": ("special_values",),
}
"""The promises that each check tests. "poison" compares the bits of all outputs of two runs."""


class Promise(NamedTuple):
    operator: str
    plan: str
    output: str
    promise: str


def _stated(operator: str, plan: str, guarantees: Mapping[str, Guarantee]) -> Iterator[Promise]:
    for output, guarantee in guarantees.items():
        for promise in PROMISES:
            if getattr(guarantee, promise):
                yield Promise(operator, plan, output, promise)


def made(device: torch.device | str, ops: Sequence[str] | None = None) -> set[Promise]:
    """Every promise on a device of every plan that takes a case, for the named ops or for all ops."""
    device = torch.device(device)
    backends, accepted = available_backends(device), ("", why_not_triton(device))
    promises: set[Promise] = set()
    for subject in subjects(ops):
        for dtype, case in product(subject.dtypes, _cases(subject, device)):
            inputs = undrawn(case, dtype)
            forms = (form for form in subject.forms if form.takes(inputs))
            calls = [subject.bind(inputs), *(call_of(form, subject, inputs) for form in forms)]
            for operator, problem in (each for call in calls for each in call.problems(device)):
                for plan in operator.candidates():
                    if plan.backend in backends and plan.refuse(problem) in accepted:
                        promises.update(_stated(operator.name, plan.name, plan.guarantee(problem)))
    return promises


def checked(jobs: Iterable[Job], device: torch.device | str) -> set[Promise]:
    """The promises that these jobs test."""
    device = torch.device(device)
    promises: set[Promise] = set()
    known: dict[Any, list[_Direction]] = {}
    for job in jobs:
        if job.check not in BY_CHECK:
            continue
        subject, dtype, _, preference = job.body.args  # type: ignore[attr-defined]
        if job.check == "special values" and not any(not s.dtypes or dtype in s.dtypes for s in subject.specials):
            continue
        for case in _cases(subject, device):
            key = subject.name, dtype, case.name, preference
            if key not in known:
                known[key] = _directions(subject, case, dtype, preference, device)
            promises.update(_held(job.check, known[key], device))
            if job.check == "device invariance" and _compares_devices(known[key], device):
                eager = eager_twin(preference)  # the other side of the comparison
                promises.update(_held(job.check, _directions(subject, case, dtype, eager, device), None))
    return promises


def implied(jobs: Iterable[Job], device: torch.device | str) -> dict[Promise, Promise]:
    """The promises of other forms, each with the promise of the plain form from which it follows.

    It follows because it is the same promise, and the jobs that compare both forms show that their bits are the same.
    """
    device = torch.device(device)
    follows: dict[Promise, Promise] = {}
    for job in (job for job in jobs if job.check == "forms"):
        subject, dtype, _, preference = job.body.args  # type: ignore[attr-defined]
        for case, form in product(_cases(subject, device), subject.forms):
            inputs = undrawn(case, dtype)
            if not form.takes(inputs):
                continue
            plain, other = (
                _promised(call, preference, device) for call in (subject.bind(inputs), call_of(form, subject, inputs))
            )
            for name, (operator, plan, guarantee) in plain.items():
                output = form.output(name)
                if output not in other:
                    continue
                own_operator, own_plan, own = other[output]
                for promise in PROMISES:
                    if promise == "error" or getattr(own, promise) == getattr(guarantee, promise):
                        followed = Promise(operator, plan, name, promise)
                        follows[Promise(own_operator, own_plan, output, promise)] = followed
    return follows


def _promised(call: Call, preference: Preference, device: torch.device) -> dict[str, tuple[str, str, Guarantee]]:
    """The operator, plan and guarantee of every output of both directions."""
    text = resolve(preference)
    plans = [select(operator, problem, text) for operator, problem in call.problems(device)]
    return {name: (p.operator.name, p.name, guarantee) for p in plans for name, guarantee in p.guarantee.items()}


class _Direction(NamedTuple):
    """A plan that serves a case.

    Attributes:
        narrow: the names of the results that "arithmetic" compares: 16-bit inputs gave them.
        results: the promises of the results that checks see.
        outputs: the promises of all outputs.
    """

    operator: str
    plan: str
    backend: str
    narrow: frozenset[str]
    results: dict[str, Guarantee]
    outputs: Mapping[str, Guarantee]


def _compares_devices(sides: list[_Direction], device: torch.device) -> bool:
    """Whether every result promises the same bits on every device, and kernels or a GPU are compared with the CPU."""
    promised = all(guarantee.device_invariant for side in sides for guarantee in side.results.values())
    return promised and (device.type != "cpu" or any(side.backend != "eager" for side in sides))


def _held(check: str, sides: list[_Direction], device: torch.device | None) -> Iterator[Promise]:
    """The promises that a check tests on a case; if `device` is None, all that it could test."""
    if check == "repeats" and not all(g.repeatable for side in sides for g in side.results.values()):
        return
    if check == "device invariance" and device is not None and not _compares_devices(sides, device):
        return
    for side in sides:
        for stated in _stated(side.operator, side.plan, side.outputs if check == "poison" else side.results):
            rounded_once = stated.output in side.narrow and side.outputs[stated.output].roundings <= 1
            if stated.promise in BY_CHECK[check] and (check != "arithmetic" or rounded_once):
                yield stated


def _cases(subject: Subject, device: torch.device) -> list[Case]:
    return [case for case in subject.cases if device.type != "cpu" or not case.heavy]


def _directions(
    subject: Subject, case: Case, dtype: torch.dtype, preference: Preference, device: torch.device
) -> list[_Direction]:
    """The plans of both directions, with the promises of the outputs that checks see."""
    inputs = undrawn(case, dtype)
    call = subject.bind(inputs)
    text = resolve(preference)
    outputs = call.operator.allocate(*map(to_meta, call.arguments))[: call.public_outputs]
    floating = sum(output.is_floating_point() for output in outputs)
    forward = {name: x.dtype for name, x in zip(call.operator.outputs[:floating], outputs, strict=False)}
    backward = dict(zip(subject.gradients(inputs), (x.dtype for x in subject.differentiable(inputs)), strict=True))
    sides = []
    for (operator, problem), seen in zip(call.problems(device), (forward, backward), strict=True):
        plan = select(operator, problem, text)
        results = {name: plan.guarantee[name] for name in seen}
        compared = (dtype, torch.float32) if dtype.itemsize == 2 else ()
        narrow = frozenset(name for name, kind in seen.items() if kind in compared)
        sides.append(_Direction(operator.name, plan.name, plan.backend, narrow, results, plan.guarantee))
    return sides


def due(machine: str, device: torch.device | str, chosen: Iterable[Subject]) -> set[tuple[Place, str]]:
    """Each case and output of the chosen subjects that has a figure on a machine; plans are chosen as for `device`."""
    device = torch.device(device)
    figures: set[tuple[Place, str]] = set()
    for subject in chosen:
        preferences = [(Preference(backend=name), served.dtypes) for name, served in served_backends(subject, device)]
        preferences += [(Preference(plan=plan), subject.dtypes) for plan in named_plans(subject, device)]
        for preference, dtypes in preferences:
            if device.type == "cpu" and is_on_kernels(preference) != (machine == "interpreter"):
                continue
            for dtype in dtypes:
                if dtype != torch.float64:
                    stated = due_of(subject, dtype, preference, machine, device)
                    figures.update((place, output) for place, outputs in stated.items() for output in outputs)
    return figures
