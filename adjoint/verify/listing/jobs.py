"""The list of checks for a device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from adjoint.contract.bad_calls import shared
from adjoint.contract.cases import BadCall, Case, Subject
from adjoint.contract.undrawn import undrawn
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.kernels import why_not_on, why_not_triton
from adjoint.core.plan import Call, select
from adjoint.core.preference import BACKENDS, Preference, resolve
from adjoint.core.problem import short
from adjoint.ops import FAMILIES, cases
from adjoint.ops.names import path_of, unknown_op
from adjoint.verify.checks import bits, framework, numerics
from adjoint.verify.checks.forms import forms
from adjoint.verify.run import Row


@dataclass(frozen=True)
class Job:
    """One check on one op, dtype and backend. `run` never raises: an exception becomes a failed row."""

    label: str
    op: str
    check: str
    dtype: str
    backend: str
    body: Callable[[], list[Row]]

    def run(self) -> list[Row]:
        try:
            return self.body()
        except Exception as error:
            notes = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
            return [self.failure("raised", f"{notes}{type(error).__name__}: {error}")]

    def failure(self, measured: str, detail: str) -> Row:
        """The row of a job that ended without a verdict."""
        return Row(self.op, self.check, self.dtype, self.backend, "", measured, False, detail)


def family_of(module: Any) -> str:
    """The family of a module of cases: "moe" for `adjoint.ops.moe.route.cases`."""
    return str(module.__name__).removeprefix("adjoint.ops.").partition(".")[0]


def subjects(ops: Sequence[str] | None = None) -> list[Subject]:
    """The subjects of the named families, ops or modes ("moe", "swiglu", "swiglu[gate_up]"), or all subjects."""
    every = [
        (
            {family_of(module), subject.function.__name__}
            | {name for path in (subject.name, path_of(subject)) for name in (path, path.partition("[")[0])},
            subject,
        )
        for module in cases()
        for subject in module.SUBJECTS
    ]
    unknown = sorted(set(ops or ()) - set[str]().union(*(names for names, _ in every)))
    if unknown:
        known = list(dict.fromkeys(path_of(subject).partition("[")[0] for _, subject in every))
        known += [path for _, subject in every if "[" in (path := path_of(subject)) and "[" in "".join(unknown)]
        families = f"families are {', '.join(FAMILIES)}; a mode of an op is named as in swiglu[gate_up]; ops"
        raise ArgumentError(unknown_op("verify", unknown, known, families, FAMILIES))
    return [subject for names, subject in every if not ops or names & set(ops)]


def available_backends(device: torch.device) -> list[str]:
    """The backends that can run on a device in this process."""
    return [backend for backend in BACKENDS if backend != "triton" or not why_not_triton(device)]


def on_device(subject: Subject, device: torch.device) -> Subject:
    """The subject with only the cases that are checked on a device."""
    if device.type != "cpu":
        return subject
    return replace(subject, cases=tuple(case for case in subject.cases if not case.heavy))


def served_backends(subject: Subject, device: torch.device) -> Iterator[tuple[str, Subject]]:
    """The backends that serve a subject on a device, each with the subject limited to the dtypes that it serves."""
    for backend in available_backends(device):
        served = _served(subject, backend, device)
        if served is not None:
            yield backend, served


HOPPER = ("sm_90",)
"""The targets of the plans whose names begin with gluon."""


def named_plans(subject: Subject, device: torch.device) -> list[str]:
    """The subject's named plans that can run on a device and are not the first of their backend."""
    available = {*available_backends(device), *(() if why_not_on(device, HOPPER) else ("gluon",))}
    runnable = [plan for plan in subject.plans if {name.partition(".")[0] for name in plan.split("+")} <= available]
    return [plan for plan in runnable if not _is_first(subject, plan, device)]


def _undrawn_call(subject: Subject, case: Case, dtype: torch.dtype) -> Call:
    """The call of a case, for choosing plans: nothing is drawn."""
    return subject.bind(undrawn(case, dtype))


def _is_first(subject: Subject, name: str, device: torch.device) -> bool:
    """Whether a plan is the first of its backend on a device. Then the checks of the backend check it."""
    call = _undrawn_call(subject, subject.cases[0], subject.dtypes[0])
    runnable = [plan for plan in call.operator.candidates() if not plan.why_not_on(device)]
    first_of_backends = {plan.backend: plan.name for plan in reversed(runnable)}
    return name in first_of_backends.values()


def _served(subject: Subject, backend: str, device: torch.device) -> Subject | None:
    """The subject with only the dtypes for which both directions have a plan of a backend.

    An op or a dtype may have no kernels. None if there is no such dtype, or if the dtype that stands for all is not
    among them.
    """

    accepted = ("", why_not_triton(device))  # whether the backend exists here at all is settled elsewhere

    def serves(dtype: torch.dtype) -> bool:
        return all(
            any(plan.backend == backend and plan.refuse(problem) in accepted for plan in operator.candidates())
            for operator, problem in _undrawn_call(subject, subject.cases[0], dtype).problems(device)
        )

    dtypes = tuple(dtype for dtype in subject.dtypes if serves(dtype))
    return replace(subject, dtypes=dtypes) if _default_dtype(subject) in dtypes else None


def jobs(ops: Sequence[str] | None = None, device: torch.device | str = "cpu", thorough: bool = False) -> list[Job]:
    """Every check of the named ops on a device. `thorough` runs even checks that hardly depend on the dtype for every
    dtype."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    chosen = subjects(ops)
    listing = []
    for subject in (on_device(subject, device) for subject in chosen):
        for backend, served in served_backends(subject, device):
            listing += _backend_jobs(served, backend, device, thorough)
        listing += [job for plan in named_plans(subject, device) for job in _named_plan(subject, plan, device)]
    return listing + bad_calls({subject.function for subject in chosen}, device)


Check = Callable[[Subject, torch.dtype, torch.device, Preference], list[Row]]

_OF_A_PLAN: dict[str, Check] = {
    "accuracy": numerics.accuracy,
    "special values": numerics.specials,
    "repeats": bits.repeats,
    "batch invariance": bits.invariance,
    "device invariance": bits.devices,
    "poison": bits.poison,
}
"""The checks that depend only on the plan."""

_OF_A_BACKEND: dict[str, Check] = {
    "accuracy": numerics.accuracy,
    "special values": numerics.specials,
    "mistakes are caught": numerics.mistakes,
    "repeats": bits.repeats,
    "batch invariance": bits.invariance,
    "device invariance": bits.devices,
    "upstream layouts": bits.upstreams,
    "poison": bits.poison,
}


def _backend_jobs(subject: Subject, backend: str, device: torch.device, thorough: bool) -> list[Job]:
    preference, default = Preference(backend=backend), _default_dtype(subject)
    listing = []
    for dtype in subject.dtypes:
        checks = dict(_OF_A_BACKEND)
        if thorough or dtype == default:  # each schedule needs another compilation
            checks["schedules"] = bits.schedules
        checks |= _of_arithmetic(dtype) | _of_forms(subject)
        exhaustive = tuple(subject.exhaustive(dtype)) if dtype.itemsize == 2 else ()
        if exhaustive:
            checks["exhaustive"] = partial(numerics.accuracy, cases=exhaustive, check="exhaustive")
        listing += [job_of(subject, name, dtype, device, preference, check) for name, check in checks.items()]
    if torch.float64 in subject.dtypes:
        listing.append(job_of(subject, "gradients", torch.float64, device, preference, numerics.gradients))
    in_torch = [framework.registration, framework.compilation, framework.modes, framework.recompilation]
    if device.type == "cuda":
        in_torch += [framework.streams, framework.capture]
    dtypes = subject.dtypes if thorough else (default,)
    return listing + [
        job_of(subject, check.__name__, dtype, device, preference, check) for check in in_torch for dtype in dtypes
    ]


def _named_plan(subject: Subject, plan: str, device: torch.device) -> list[Job]:
    """The checks of a plan that is not its backend's first, on the cases that it takes."""
    preference = Preference(plan=plan)
    return [
        job_of(served, name, dtype, device, preference, check)
        for dtype in subject.dtypes
        if (served := _with_cases_of(subject, dtype, device, preference)).cases
        for name, check in (_OF_A_PLAN | _of_arithmetic(dtype) | _of_forms(subject)).items()
    ]


def _with_cases_of(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> Subject:
    """The subject with the cases that a plan takes in a dtype."""

    def takes(case: Case) -> bool:
        call = _undrawn_call(subject, case, dtype)
        try:
            return all(select(operator, problem, resolve(preference)) for operator, problem in call.problems(device))
        except Unsupported:
            return False

    return replace(subject, cases=tuple(filter(takes, subject.cases)))


def _of_arithmetic(dtype: torch.dtype) -> dict[str, Check]:
    """The check that compares results with the arithmetic of a wider type, for dtypes that have one."""
    return {"arithmetic": numerics.arithmetic} if dtype.itemsize in numerics.WIDER else {}


def _of_forms(subject: Subject) -> dict[str, Check]:
    """The check that compares other forms of the call with the plain one, for subjects that have any."""
    return {"forms": forms} if subject.forms else {}


def _default_dtype(subject: Subject) -> torch.dtype:
    """The dtype that stands for all where a check does not depend on it."""
    return torch.bfloat16 if torch.bfloat16 in subject.dtypes else subject.dtypes[0]


def job_of(
    subject: Subject, name: str, dtype: torch.dtype, device: torch.device, preference: Preference, check: Check
) -> Job:
    """The job of a check on a subject and dtype, with plans that meet a preference."""
    named = str(preference.plan)
    backend = preference.backend or ("triton" if "triton" in named or "gluon" in named else "eager")
    plan = preference.plan or backend
    label = f"{subject.name} {short(dtype)} {'plan ' if preference.plan == backend else ''}{plan}: {name}"
    return Job(label, subject.name, name, short(dtype), backend, partial(check, subject, dtype, device, preference))


def bad_calls(functions: set[Any], device: torch.device) -> list[Job]:
    """The calls that ops must refuse: those that all ops share, and the op's own."""
    listing = []
    for module in cases():
        own = {subject.function: subject for subject in reversed(module.SUBJECTS)}  # the first mode of each
        if functions & own.keys():
            op = module.__name__.removeprefix("adjoint.ops.").removesuffix(".cases")
            calls = [bad for subject in reversed(own.values()) for bad in shared(subject)]
            listing += [_bad_call(bad, op, device) for bad in (*calls, *module.BAD_CALLS)]
    return listing


def _bad_call(bad: BadCall, family: str, device: torch.device) -> Job:
    def body() -> list[Row]:
        try:
            bad.call(device)
            wrong = "nothing was raised"
        except bad.error as error:
            missing = ", ".join(word for word in bad.words if word not in str(error))
            wrong = f"the message lacks {missing}: {error}" if missing else ""
        return [Row(family, "bad input", "", "", bad.error.__name__, bad.name, not wrong, wrong)]

    return Job(f"{family}: {bad.name}", family, "bad input", "", "", body)
