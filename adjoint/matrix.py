"""The op matrix: every op and plan, the dtypes it takes, where it runs and what it promises, read from the code."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from adjoint.contract.cases import Case, Subject
from adjoint.core.errors import ArgumentError
from adjoint.core.guarantee import Guarantee
from adjoint.core.kernels import NVIDIA, TARGETS
from adjoint.core.op.operator import Operator
from adjoint.core.plan import Candidate
from adjoint.core.problem import Problem, short
from adjoint.ops import cases
from adjoint.ops.names import path_of, unknown_op

PLACES = ("cpu", *TARGETS)
"""The CPU, and the architectures that kernels are built for."""


@dataclass(frozen=True)
class Entry:
    """A plan of one direction of an op, for dtypes and places of which it promises the same.

    Attributes:
        promises: for each output, its promises about bits and the kind of its statement about error.
    """

    op: str
    direction: str
    plan: str
    backend: str
    dtypes: tuple[str, ...]
    places: tuple[str, ...]
    promises: tuple[tuple[str, str], ...]

    @property
    def where(self) -> str:
        """The places, in few words."""
        gpus = set(self.places) - {"cpu"}
        words = ["CPU"] * ("cpu" in self.places)
        if gpus == set(TARGETS):
            words.append("every GPU")
        elif gpus == set(NVIDIA):
            words.append("NVIDIA")
        else:
            words += [place for place in PLACES if place in gpus]
        return ", ".join(words)

    @property
    def what(self) -> str:
        """The promises in words. Outputs with the same promises share one statement."""
        named: dict[str, list[str]] = {}
        for output, promise in self.promises:
            named.setdefault(promise, []).append(output)
        return "; ".join(f"{', '.join(outputs)}: {promise}" for promise, outputs in named.items())


def entries(ops: Sequence[str] = ()) -> list[Entry]:
    """The matrix of the named ops, or of all: in the order of the package, forward before backward, best plans first.

    Raises:
        ArgumentError: there is no op of that name.
    """
    merged: dict[tuple[str, str, str, str, Promises], dict[str, list[str]]] = {}
    for op, direction, candidate, dtype, place, promises in _facts(ops):
        places = merged.setdefault((op, direction, candidate.name, candidate.backend, promises), {})
        if dtype not in places.setdefault(place, []):
            places[place].append(dtype)
    rows = []
    for (op, direction, plan, backend, promises), places in merged.items():
        by_dtypes: dict[tuple[str, ...], list[str]] = {}
        for place, dtypes in places.items():
            by_dtypes.setdefault(tuple(dtypes), []).append(place)
        rows += [
            Entry(op, direction, plan, backend, dtypes, tuple(alike), promises) for dtypes, alike in by_dtypes.items()
        ]
    return rows


Promises = tuple[tuple[str, str], ...]
Directions = tuple[tuple[Operator, Problem], ...]


def _facts(ops: Sequence[str]) -> Iterator[tuple[str, str, Candidate, str, str, Promises]]:
    """Every plan of an op that serves a case in some dtype and place, with its promises there, some repeatedly."""
    modes: dict[str, list[Subject]] = {}
    for subject in (subject for module in cases() for subject in module.SUBJECTS):
        modes.setdefault(path_of(subject).partition("[")[0], []).append(subject)
    called = {op: {op, op.rpartition(".")[2]} for op in modes}
    if unknown := sorted(set(ops).difference(*called.values())):
        raise ArgumentError(unknown_op("ops", unknown, list(modes)))
    for op, subjects in modes.items():
        if ops and not called[op] & set(ops):
            continue
        posed = [(dtype, calls) for subject in subjects for dtype, calls in _calls(subject)]
        for index, direction in enumerate(("forward", "backward")):
            for candidate in dict.fromkeys(
                c for _, calls in posed for call in calls for c in call[index][0].candidates()
            ):
                for dtype, calls in posed:
                    problems = [call[index][1] for call in calls if candidate in call[index][0].candidates()]
                    for place in PLACES:
                        served = next((p for p in _at(problems, place) if not candidate.why_not_for(p)), None)
                        if served is not None:
                            yield op, direction, candidate, short(dtype), place, _promises(candidate, served)


def _calls(subject: Subject) -> Iterator[tuple[torch.dtype, list[Directions]]]:
    """The problems of a subject's cases by dtype, in both directions. Heavy cases are included if a plan needs them."""
    for dtype in subject.dtypes:
        light, heavy = ([case for case in subject.cases if case.heavy == kind] for kind in (False, True))
        calls = [_problems(subject, case, dtype) for case in light]
        problems = [direction for call in calls for direction in call]
        if any(
            all(candidate.refuse(problem) for other, problem in problems if other is operator)
            for operator in {operator.name: operator for operator, _ in problems}.values()
            for candidate in operator.candidates()
        ):
            calls += [_problems(subject, case, dtype) for case in heavy]
        yield dtype, calls


def _problems(subject: Subject, case: Case, dtype: torch.dtype) -> Directions:
    cpu = torch.device("cpu")
    return tuple(subject.bind(case.make(dtype, cpu, torch.Generator().manual_seed(0))).problems(cpu))


def _at(problems: list[Problem], place: str) -> Iterator[Problem]:
    """The problems as a place poses them."""
    if place == "cpu":
        return iter(problems)
    return (problem._replace(device=torch.device(TARGETS[place][0]), target=place) for problem in problems)


def _promises(candidate: Candidate, problem: Problem) -> Promises:
    def words(guarantee: Guarantee) -> str:
        bits = "no promise about bits" if guarantee.flags == "none" else guarantee.flags
        return f"{bits}; error {guarantee.error.kind}"

    return tuple((output, words(guarantee)) for output, guarantee in candidate.guarantee(problem).items())


def as_markdown(table: list[Entry]) -> str:
    """The matrix as a table of Markdown for each op."""
    lines: list[str] = []
    for op in dict.fromkeys(entry.op for entry in table):
        lines += [f"## `{op}`", "", "| plan | direction | dtypes | runs on | promises |", "|---|---|---|---|---|"]
        for entry in table:
            if entry.op == op:
                cells = (f"`{entry.plan}`", entry.direction, ", ".join(entry.dtypes), entry.where, entry.what)
                lines.append("| " + " | ".join(cells).replace("\n", " ") + " |")
        lines.append("")
    return "\n".join(lines)
