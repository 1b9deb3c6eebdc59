"""Which kernels serve which routing problem, and what they guarantee."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.launch import Execute, Setup, imported
from adjoint.core.plan import Candidate, Compute, allocating_outputs, in_pytorch
from adjoint.core.problem import Problem, short, wide_dtype
from adjoint.core.schedules import Schedules
from adjoint.ops.moe.logits import refuse_float64
from adjoint.ops.moe.route import bounds, eager, reference

_SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))

MAX_K = 64
"""The number of slots in a row of results."""

MAX_ROWS = 2**31 - 1024
"""The most rows that a launch can number, including those of programs past the end."""


# ------------------------------------------------------------------------------------------- guarantee

_SPECIAL_WEIGHTS = (
    "a row with +∞, or with nothing above −∞, has NaN weights; an expert whose logit is NaN is as if it were not "
    "there: it is chosen only where fewer than k others are, and its weight, renormalised every weight of the row, "
    "is then NaN"
)
_SPECIAL_GRADIENT = (
    "NaN wherever a NaN weight enters: at the chosen experts, and for a softmax over all experts in the whole row"
)


def _compares_logits(problem: Problem) -> bool:
    """Whether experts are compared by their logits themselves."""
    return problem.options[1] == "softmax" and len(problem.dtypes) == 1


def _ties(problem: Problem) -> str:
    _, score, groups, groups_kept, _ = problem.options
    as_given, kind = _compares_logits(problem), short(_kind(problem))
    rounded = "" if kind == "float64" else f", rounded once to {kind}"
    what = "the logits as given" if as_given else f"the {score} in float64{rounded}"
    plus = f" plus the bias, added in {kind}" if len(problem.dtypes) > 1 else ""
    near = "" if as_given else f"; scores that round to one {kind} are equal, however they differ before"
    best = f"; the {groups_kept} of {groups} groups with the largest sum, in {kind}, of their two best, "
    first = f"{best}others are never chosen" if groups_kept < groups else ""
    return f"compares {what}{plus}, largest first, equal ones by the lower expert, +0 = −0, NaN below −∞{near}{first}"


def _kind(problem: Problem) -> torch.dtype:
    """The type of the weights, in which scores are compared."""
    return wide_dtype(problem.dtypes[0])


def _rounds_once(problem: Problem, in_float64: bool) -> bool:
    """Whether weights are computed in a wider type than their own."""
    return in_float64 and _kind(problem) != torch.float64


def _units(problem: Problem) -> str:
    return "u = 2⁻⁵³, η = 2⁻¹⁰²¹" if _kind(problem) == torch.float64 else "u = 2⁻²⁴, η = 2⁻¹²⁵"


def forward_guarantee(problem: Problem, in_float64: bool) -> dict[str, Guarantee]:
    k, score, groups, groups_kept, renormalize = problem.options
    as_given, ties = _compares_logits(problem), _ties(problem)
    kind, rounds_once = _kind(problem), _rounds_once(problem, in_float64)

    def bound(logits: Tensor, bias: Tensor | None = None) -> Tensor:
        flat = logits.reshape(-1, logits.shape[-1])
        indices = reference.select(flat, k, score, bias, groups, groups_kept, kind)
        limit = bounds.weights_bound(flat, indices, score, renormalize, kind, rounds_once)
        return limit.view(*logits.shape[:-1], k)

    formula = "u·w·(1 + 0.001) + η" if rounds_once else "u·w·(3|d| + 3·Σ p·|d| + n + 40) + η, d = x − maximum"
    if kind == torch.float64 and score == "sigmoid":
        formula = formula.replace("x − maximum", "min(x, 0)")
    item = "" if in_float64 else "token"
    return {
        "weights": Guarantee(
            repeatable=True,
            batch_invariant=item,
            device_invariant=False,
            accumulator="float64" if in_float64 else "float32",
            roundings=1,
            error=Derived(f"{formula}, {_units(problem)}", bound),
            special_values=_SPECIAL_WEIGHTS,
            ties=ties,
        ),
        "indices": Guarantee(
            repeatable=True,
            batch_invariant=item,
            device_invariant=as_given,
            accumulator="none" if as_given else "float64",
            roundings=0,
            error=Derived("0: the experts the order below names", lambda *inputs: torch.zeros((), device="cpu")),
            ties=ties,
        ),
    }


def backward_guarantee(problem: Problem, in_float64: bool) -> dict[str, Guarantee]:
    _, k, dtype, score, renormalize = problem.options
    rounds_once = _rounds_once(problem, in_float64)

    def bound(dweights: Tensor, logits: Tensor, indices: Tensor | None = None) -> Tensor:
        """The bound of dlogits. `indices` are passed if the selection has a bias or groups."""
        flat = logits.reshape(-1, logits.shape[-1])
        if indices is None:
            indices = reference.select(flat, k, score, None, kind=_kind(problem))
        upstream, chosen = dweights.reshape(-1, k), indices.reshape(-1, k)
        limit = bounds.gradient_bound(upstream, flat, chosen, score, renormalize, dtype, rounds_once)
        return limit.view(logits.shape)

    return {
        "dlogits": Guarantee(
            repeatable=True,
            batch_invariant="" if in_float64 else "token",
            device_invariant=False,
            accumulator="float64" if in_float64 else "float32",
            roundings=1 if problem.dtypes[0].itemsize == 2 else 2,  # the weights are saved in float32 or float64
            error=Derived(_gradient_formula(problem, rounds_once), bound),
            domain="every input" if _is_dense(problem) else "every input; experts that were not chosen have exactly 0",
            special_values=_SPECIAL_GRADIENT,
        )
    }


def _gradient_formula(problem: Problem, rounds_once: bool) -> str:
    """The bound that `bounds.gradient_bound` computes, in words."""
    *_, score, renormalize = problem.options
    term = "w·(|dw| + Σ w·|dw|)" if score == "softmax" or renormalize else "w·|dw|"
    term += "·(1 − σ(x))" if score == "sigmoid" else ""
    if rounds_once:
        slack = "2·u"
    elif _kind(problem) == torch.float64:
        slack = "(20 + k)·u" if score == "softmax" else "(3·max(x, 0) + 32 + k)·u"
    else:
        slack = "20·u" if score == "softmax" else "(3·max(x, 0) + 32)·u"
    others = f"; of others (2·ε + ε_p + {slack})·p·Σ w·|dw|, ε_p that of p" if _is_dense(problem) else ""
    where = f"ε the largest relative error of the row's weights, {_units(problem).partition(',')[0]}, η what underflows"
    return f"½ ulp + (2·ε + {slack})·{term} + η{others}; {where}"


# ------------------------------------------------------------------------------------------ candidates


def _is_dense(problem: Problem) -> bool:
    """Whether every expert has a gradient."""
    *_, score, renormalize = problem.options
    return score == "softmax" and not renormalize


def _is_grouped(problem: Problem) -> bool:
    _, _, groups, groups_kept, _ = problem.options
    return bool(groups_kept < groups)


def _numeric(problem: Problem) -> dict[str, Any]:
    """The options that decide about results."""
    if problem.op != "moe_route":
        *_, score, renormalize = problem.options
        return {"score": score, "renormalize": renormalize}
    _, score, groups, groups_kept, renormalize = problem.options
    grouped = {"groups": f"{groups_kept} of {groups}"} if groups_kept < groups else {}
    return {"score": score, "renormalize": renormalize} | grouped


def _by_experts(problem: Problem) -> str:
    """The entry of a problem's schedule. The more experts a row has, the more warps share it."""
    experts = problem.sizes[0]
    return "moe_route_grouped" + ("_768" if experts >= 768 else "_512" if experts >= 512 else "")


Promises = Callable[[Problem, bool], dict[str, Guarantee]]


def _on_kernels(
    name: str,
    kernel: str,
    launch: str,
    accepts: Callable[[Problem], bool],
    promises: Promises,
    entry: Callable[[Problem], str] | None = None,
) -> Candidate:
    """A plan in Triton for some modes. `launch` has the module and the function of its setup."""
    bind = imported(f"adjoint.ops.moe.route.triton.{launch}")

    def refuse(problem: Problem) -> str:
        if not accepts(problem):
            return f"{kernel} is for another mode"
        if reason := refuse_float64(problem):
            return reason
        if problem.sizes[-1] > MAX_ROWS and len(problem.sizes) > 1:
            return f"numbers up to {MAX_ROWS} rows, there are {problem.sizes[-1]}"
        return ""

    def setup(setup: Setup) -> Execute:
        setup.add_numeric(**_numeric(setup.problem))
        return bind(setup)

    return Candidate(
        name=f"triton.{name}",
        backend="triton",
        kernel=kernel,
        revision=1,
        refuse=refuse,
        guarantee=lambda problem: promises(problem, False),
        setup=setup,
        schedules=_SCHEDULES,
        entry=entry,
    )


def _eager(compute: Compute, promises: Promises) -> Candidate:
    return in_pytorch("eager", lambda problem: promises(problem, True), allocating_outputs(compute), _numeric)


ROUTE = (
    _on_kernels("rows", "moe_route_forward", "forward:route", lambda p: not _is_grouped(p), forward_guarantee),
    _on_kernels("groups", "moe_route_grouped", "forward:route_in_groups", _is_grouped, forward_guarantee, _by_experts),
    _eager(lambda plan, arguments, outputs, _: eager.forward(arguments, outputs), forward_guarantee),
)
ROUTE_BACKWARD = (
    _on_kernels("rows", "moe_route_backward", "backward:chosen_alone", lambda p: not _is_dense(p), backward_guarantee),
    _on_kernels("dense", "moe_route_backward_dense", "backward:every_expert", _is_dense, backward_guarantee),
    _eager(lambda plan, arguments, outputs, _: eager.backward(arguments, *outputs), backward_guarantee),
)
