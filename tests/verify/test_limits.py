"""Promises are as tight as they were: their limits on named cases are those of limits.json, which is reviewed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from adjoint.core.guarantee import Derived, Empirical, Enumerated, ErrorStatement, Guarantee
from adjoint.core.op.operator import operators
from adjoint.verify.listing.jobs import subjects
from tests.verify import limits


@pytest.fixture(scope="module")
def now() -> limits.Limits:
    with limits.pretended_hopper():
        return limits.limits()


def test_no_promise_is_looser_or_tighter_than_it_was(now: limits.Limits) -> None:
    """`python -m tests.verify.limits` writes them anew; a looser one is a promise broken, and needs its reason."""
    changed = limits.changed(limits.load(), now)
    assert not changed, f"before and now; `python -m tests.verify.limits` writes limits.json anew: {changed}"


def test_every_plan_has_limits(now: limits.Limits) -> None:
    named = {plan for by_plan in now.values() for plan in by_plan}
    for subject in subjects():
        inputs = subject.cases[0].make(subject.dtypes[0], torch.device("cpu"), limits.generator())
        for operator, _ in subject.bind(inputs).problems(torch.device("cpu")):
            missing = {candidate.name for candidate in operator.candidates()} - named
            assert not missing, (subject.name, operator.name, missing)


def test_no_promise_is_a_ceiling() -> None:
    """A norm-relative one is broken by results that cancel: promises are bounds for the very inputs, or enumerated."""
    with limits.pretended_hopper() as device:
        for subject in subjects():
            for dtype in subject.dtypes:
                inputs = subject.cases[0].make(dtype, torch.device("cpu"), limits.generator())
                for operator, problem in subject.bind(inputs).problems(device):
                    for candidate in operator.candidates():
                        if not candidate.refuse(problem):
                            for name, stated in candidate.guarantee(problem).items():
                                assert not isinstance(stated.error, Empirical), (subject.name, candidate.name, name)


def _loosened(statement: ErrorStatement, factor: float) -> ErrorStatement:
    if isinstance(statement, Derived):
        bound = statement.bound
        return replace(statement, bound=lambda *inputs: factor * bound(*inputs))
    if isinstance(statement, Empirical):
        return replace(statement, ceiling=factor * statement.ceiling)
    return Enumerated(factor * statement.max_ulp, statement.over)


def _with(guarantee: Callable[..., dict[str, Guarantee]], factor: float, problem: object) -> dict[str, Guarantee]:
    return {
        name: replace(
            stated,
            error=_loosened(stated.error, factor),
            recorded=stated.recorded and _loosened(stated.recorded, factor),
        )
        for name, stated in guarantee(problem).items()
    }


@pytest.mark.parametrize(
    ("operator", "factor"),
    [("gated_delta_rule_backward", 10.0), ("swiglu_backward", 1.1), ("silu", 1.1), ("moe_experts_backward", 1.1)],
)
def test_a_promise_that_is_loosened_is_noticed(
    operator: str, factor: float, now: limits.Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every output of every plan, in every dtype."""
    (broken,) = (one for one in operators() if one.name == operator)
    candidates = tuple(replace(one, guarantee=partial(_with, one.guarantee, factor)) for one in broken.candidates())
    monkeypatch.setattr(broken, "candidates", lambda: candidates)
    op = operator.removesuffix("_backward").replace("moe_", "moe.")
    chosen = [subject for subject in subjects() if subject.name == op]
    monkeypatch.setattr(limits, "subjects", lambda: chosen)
    with limits.pretended_hopper():
        loose = limits.limits()
    backward = operator.endswith("_backward")
    expected = {
        f"{op} {plan} {output} {dtype}"
        for plan, by_output in now[op].items()
        for output, by_dtype in by_output.items()
        for dtype in by_dtype
        if output.startswith("d") == backward
    }
    assert set(limits.changed({op: now[op]}, loose)) == expected and expected
