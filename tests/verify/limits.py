"""What plans promise of a named case, as numbers: `python -m tests.verify.limits` writes them to limits.json anew.

A limit is ‖bound‖ / ‖exact‖ for a derived bound, the ceiling of an empirical one, and ulp for an enumerated one, on the
largest case that the plan takes and a CPU is asked for. No plan has to run for it, so those of GPUs are among them.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from adjoint.contract.cases import Case, Inputs, Subject
from adjoint.contract.inputs import widened
from adjoint.contract.undrawn import undrawn
from adjoint.core.guarantee import Derived, Empirical, ErrorStatement, Guarantee
from adjoint.core.kernels import targets
from adjoint.core.op.operator import forget
from adjoint.core.problem import short
from adjoint.ops.gated_delta.values import tokens
from adjoint.verify import figures
from adjoint.verify.listing import jobs
from adjoint.verify.listing.jobs import subjects
from adjoint.verify.run import generator

_CHOOSING = (targets, jobs)
PATH = Path(__file__).with_name("limits.json")

Limits = dict[str, dict[str, dict[str, dict[str, float]]]]
"""By subject, plan, output and dtype."""


@contextmanager
def pretended_hopper() -> Iterator[torch.device]:
    """A GPU that plans are chosen for and nothing runs on."""
    able = patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = [patch.object(module, "why_not_triton", lambda device: "") for module in _CHOOSING]
    forget()
    with able, chosen[0], chosen[1]:
        yield torch.device("cuda")
    forget()


SMALL = {
    name: (
        Case("heads of 64", tokens((1, 130, 1, 2, 64, 64), decay=0.1)),
        Case("heads of 64 and 128", tokens((1, 130, 1, 2, 64, 128), decay=0.1)),
    )
    for name in ("gated_delta_rule", "gated_delta_rule[normalize_qk]")
}
"""Cases for plans that otherwise take heavy ones alone, whose bounds take long to evaluate."""


def limits() -> Limits:
    """Those of every plan, output and dtype."""
    found: Limits = {}
    for subject in subjects():
        for dtype in subject.dtypes:
            of_subject = found.setdefault(subject.name, {})
            heavy = [case for case in subject.cases if case.heavy]
            for case in (*_by_size(subject, dtype), *SMALL.get(subject.name, ()), *heavy):
                if _has_all(subject, dtype, of_subject):
                    break
                for plan, output, limit in _limits_of(subject, case, dtype, of_subject):
                    of_subject.setdefault(plan, {}).setdefault(output, {})[short(dtype)] = limit
    return found


def _has_all(subject: Subject, dtype: torch.dtype, known: dict[str, dict[str, dict[str, float]]]) -> bool:
    """Whether every plan of both directions has limits: then no other case is made, which for heavy ones takes long."""
    inputs = undrawn(subject.cases[0], dtype)
    call = subject.bind(inputs)
    firsts = (call.operator.outputs[0], subject.gradients(inputs)[0])
    return all(
        short(dtype) in known.get(candidate.name, {}).get(first, {})
        for (operator, _), first in zip(call.problems(torch.device("cpu")), firsts, strict=True)
        for candidate in operator.candidates()
    )


def _by_size(subject: Subject, dtype: torch.dtype) -> list[Case]:
    """The cases that a CPU is asked for, those of the most numbers first, and none that is empty."""

    def elements(case: Case) -> int:
        inputs = undrawn(case, dtype)
        sizes = [x.numel() for x in inputs if x is not None]
        return sum(sizes) if all(sizes) else 0

    sizes = {case: elements(case) for case in subject.cases if not case.heavy}
    return sorted((case for case in sizes if sizes[case]), key=lambda case: -sizes[case])


def _limits_of(
    subject: Subject, case: Case, dtype: torch.dtype, known: dict[str, dict[str, dict[str, float]]]
) -> Iterator[tuple[str, str, float]]:
    """Of every plan that takes a case on a CPU or a GPU, and has no limit yet."""
    fresh = _fresh(subject, case, dtype, known)
    if not any(fresh):
        return
    source = generator()
    inputs = case.make(dtype, torch.device("cpu"), source)
    call = subject.bind(inputs)
    outputs = call.operator.allocate(*call.arguments)[: call.public_outputs]
    outputs = tuple(torch.zeros_like(x) for x in outputs if x.is_floating_point())
    upstream = tuple(torch.randn(x.shape, generator=source).to(x.dtype) for x in outputs)
    wide, slopes = widened(inputs), widened(upstream)
    forward = call.operator.outputs[: len(outputs)], subject.reference, wide, ()
    backward = subject.gradients(inputs), subject.reference_backward, (*slopes, *wide), subject.choices(*wide)
    for (names, reference, arguments, choices), promises in zip((forward, backward), fresh, strict=True):
        exact = dict(zip(names, reference(*arguments), strict=True)) if promises else {}
        for plan, stated in promises.items():
            for output, truth in exact.items():
                for kind, statement in _statements(stated[output]):
                    yield plan, output + kind, _limit(statement, truth, (*arguments, *choices))


def _fresh(
    subject: Subject, case: Case, dtype: torch.dtype, known: dict[str, dict[str, dict[str, float]]]
) -> tuple[dict[str, dict[str, Guarantee]], dict[str, dict[str, Guarantee]]]:
    """Of each direction: the promises of the plans that take a case on a CPU or a GPU, and have no limit yet."""
    inputs = undrawn(case, dtype)
    call = subject.bind(inputs)
    firsts = (call.operator.outputs[0], subject.gradients(inputs)[0])
    found: tuple[dict[str, dict[str, Guarantee]], dict[str, dict[str, Guarantee]]] = {}, {}
    for device in ("cpu", "cuda"):
        problems = call.problems(torch.device(device))
        for (operator, problem), first, of_plan in zip(problems, firsts, found, strict=True):
            for candidate in operator.candidates():
                has_limit = short(dtype) in known.get(candidate.name, {}).get(first, {})
                if not has_limit and candidate.name not in of_plan and candidate.refuse(problem) == "":
                    of_plan[candidate.name] = candidate.guarantee(problem)
    return found


def _statements(guarantee: Guarantee) -> Iterator[tuple[str, ErrorStatement]]:
    yield "", guarantee.error
    if guarantee.recorded is not None:
        yield " of the cases", guarantee.recorded


def _limit(statement: ErrorStatement, exact: torch.Tensor, arguments: Inputs) -> float:
    if isinstance(statement, Empirical):
        return statement.ceiling
    if isinstance(statement, Derived):
        bound = statement.bound(*arguments)
        bound = bound if statement.axes else bound.expand(exact.shape)
        return float(f"{float(bound.norm() / (exact.norm() or 1.0)):.3g}")
    return statement.max_ulp


def changed(before: Limits, now: Limits) -> dict[str, tuple[float | None, float | None]]:
    """Limits that are more than a hundredth apart, or on one side alone. Bounds are evaluated in float64: a library
    that adds in another order moves none of their three digits by more than one."""
    flat = [
        {
            f"{subject} {plan} {output} {dtype}": limit
            for subject, by_plan in limits.items()
            for plan, by_output in by_plan.items()
            for output, by_dtype in by_output.items()
            for dtype, limit in by_dtype.items()
        }
        for limits in (before, now)
    ]
    pairs = {name: (flat[0].get(name), flat[1].get(name)) for name in {**flat[0], **flat[1]}}
    return {name: pair for name, pair in pairs.items() if not _equal(*pair)}


def _equal(before: float | None, now: float | None) -> bool:
    return before is not None and now is not None and abs(now - before) <= 0.01 * abs(before)


def load() -> Limits:
    return json.loads(PATH.read_text(encoding="utf-8"))


def main() -> None:
    with pretended_hopper():
        figures.save(limits(), PATH)


if __name__ == "__main__":
    main()
