"""How a plan explains itself: in a line, in full, and as data."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from adjoint.core.guarantee import Guarantee
from adjoint.core.problem import Problem, short

if TYPE_CHECKING:
    from adjoint.core.plan import Plan

LABEL = 11
"""The width of the label at the beginning of a line."""


def in_a_line(plan: "Plan") -> str:
    """Operator, name and SKU."""
    return f"<Plan of {plan.operator.name}: {plan.name}, {plan.sku}>"


def in_words(plan: "Plan") -> str:
    """The plan, what it promises, why no other was taken, and the same for its adjoint; one statement a line."""
    workspace = plan.workspace_bytes
    statements = [
        ("problem", str(plan.problem)),
        ("preference", plan.preference or "none"),
        ("plan", f"{plan.name}: the first of {len(plan.others) + 1} candidates, best first, that fits"),
        ("sku", str(plan.sku)),
        ("workspace", "the library allocates its own" if workspace is None else f"{workspace} bytes"),
        ("waits", "for the device: no CUDA graph can record it" if plan.waits else ""),
        ("schedule", ", ".join(f"{name}={value}" for name, value in plan.schedule.items())),
        *(("guarantee", f"{output}: {guarantee}") for output, guarantee in plan.guarantee.items()),
        *(("not taken", f"{name}: {reason}") for name, reason in plan.others),
    ]
    lines = [f"{label:<{LABEL}}{text}".replace("\n", "\n" + " " * LABEL) for label, text in statements if text]
    if plan.adjoint is not None:
        lines += ["adjoint", *(f"  {line}" for line in in_words(plan.adjoint).splitlines())]
    return "\n".join(lines)


def as_data(plan: "Plan") -> dict[str, Any]:
    """The statements of `in_words` as numbers, texts, lists and dictionaries."""
    return {
        "op": plan.operator.name,
        "plan": plan.name,
        "backend": plan.backend,
        "sku": str(plan.sku),
        "problem": _problem(plan.problem),
        "preference": plan.preference,
        "workspace_bytes": plan.workspace_bytes,
        "waits": plan.waits,
        "schedule": plan.schedule,
        "guarantee": {output: _guarantee(guarantee) for output, guarantee in plan.guarantee.items()},
        "not_taken": dict(plan.others),
        "adjoint": None if plan.adjoint is None else as_data(plan.adjoint),
    }


def _problem(problem: Problem) -> dict[str, Any]:
    named = problem._asdict() | {"device": str(problem.device), "dtypes": list(map(short, problem.dtypes))}
    return named | {"sizes": list(problem.sizes), "options": list(problem.options)}


def _guarantee(guarantee: Guarantee) -> dict[str, Any]:
    named = {field.name: getattr(guarantee, field.name) for field in fields(guarantee)}
    statements = {name: getattr(guarantee, name) for name in ("error", "recorded")}
    return named | {
        name: None if statement is None else {"kind": statement.kind, "statement": str(statement)}
        for name, statement in statements.items()
    }
