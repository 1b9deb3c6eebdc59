"""The choice among candidates: the first that accepts the problem and meets the preference."""

import threading
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from adjoint.core.errors import Unsupported
from adjoint.core.plan.candidates import Candidate
from adjoint.core.plan.execution import Plan
from adjoint.core.preference import OTHERWISE, Preference, parse
from adjoint.core.problem import Problem

if TYPE_CHECKING:
    from adjoint.core.op.operator import Operator


_CACHED_PLANS = 4096
_lock = threading.Lock()


def select(operator: "Operator", problem: Problem, preference: str) -> Plan:
    """The first candidate that accepts the problem and meets the preference, as a plan.

    If no plan meets the first request of the preference, its alternative applies, if it has one.
    """
    plan = operator.plans.get((problem, preference))
    if plan is not None:
        return plan
    request, has_alternative, alternative = preference.partition(OTHERWISE)
    try:
        plan = _first_that_fits(operator, problem, request)
    except Unsupported:
        if not has_alternative:
            raise
        plan = _first_that_fits(operator, problem, alternative)
        _warn_not_repeatable(plan)
    with _lock:
        while len(operator.plans) >= _CACHED_PLANS:
            operator.plans.pop(next(iter(operator.plans)))
        return operator.plans.setdefault((problem, preference), plan)


def _first_that_fits(operator: "Operator", problem: Problem, preference: str) -> Plan:
    candidates, request = operator.candidates(), parse(preference)
    named = _named(request, candidates)
    objections = [(candidate, _objection(candidate, problem, request, named)) for candidate in candidates]
    chosen = next((candidate for candidate, objection in objections if not objection), None)
    if chosen is None:
        raise Unsupported(
            f"{operator.name}: no plan for {problem} meets the preference "
            f"({preference or 'none given'}). Candidates:\n"
            + "\n".join(f"  {candidate.name}: {objection}" for candidate, objection in objections)
        )
    others = tuple(
        (candidate.name, objection or f"would do, but ranks after {chosen.name}")
        for candidate, objection in objections
        if candidate is not chosen
    )
    return Plan(operator, chosen, problem, preference, others)


def _warn_not_repeatable(plan: Plan) -> None:
    """Warns, once for each operator, that a call under `warn_only=True` runs a plan that is not repeatable."""
    operator = plan.operator
    if not operator.has_warned:
        operator.has_warned = True
        warnings.warn(
            f"{operator.name}: no plan for {plan.problem} is repeatable, so this runs {plan.name}, whose bits may "
            f"differ from run to run; torch.use_deterministic_algorithms(True, warn_only=True) allows that, and "
            f"without warn_only it is an error. Later calls of {operator.name} do not warn",
            UserWarning,
            stacklevel=2,
        )


def forget_plans(operators: Iterable["Operator"]) -> None:
    """Forgets all plans of these operators, and whether the operators have warned."""
    with _lock:
        for operator in operators:
            operator.plans.clear()
            operator.has_warned = False


def _named(request: Preference, candidates: tuple[Candidate, ...]) -> str | None:
    """The first of the plans that a preference names that is among the candidates."""
    known = {candidate.name for candidate in candidates}
    return next((name for name in (request.plan or "").split("+") if name in known), None)


def _objection(candidate: Candidate, problem: Problem, request: Preference, named: str | None) -> str:
    """Why a candidate may not be chosen; empty when it may."""
    if request.backend is not None and candidate.backend != request.backend:
        return f"its backend is {candidate.backend}, the preference asks for {request.backend}"
    if request.plan is not None and candidate.name != named:
        return f"the preference asks for the plan {request.plan}"
    if reason := candidate.why_not_for(problem):
        return reason
    for output, guarantee in candidate.guarantee(problem).items():
        for flag in ("repeatable", "batch_invariant", "device_invariant"):
            if getattr(request, flag) and not getattr(guarantee, flag):
                return f"{output} is not {flag}"
    limit = request.max_workspace_bytes
    if limit is not None:
        scratch = candidate.scratch_bytes(problem)
        if scratch is None:
            return f"its workspace is the library's affair, the preference allows {limit} bytes"
        if scratch > limit:
            return f"needs a workspace of {scratch} bytes, the preference allows {limit}"
    return ""
