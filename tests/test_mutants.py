"""Every arithmetic operator, comparison and constant in every kernel is broken in turn; a check must notice.

The mutants are made from the syntax trees of the modules in `MODULES`, inside their `@triton.jit`
functions, and run in the interpreter. One that survives is either a hole in the checks or an
equivalent program, and must then be listed in `mutants.equivalent` with the reason.
"""

import os
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

import adjoint
from adjoint.core import kernels
from adjoint.ops import FAMILIES
from tests.mutants import checks, route_calls
from tests.mutants.checks import EXPERTS, MODULES, Noticed
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.trees import Mutant, equivalent, mutants

IN_GLUON = tuple(
    f"adjoint.ops.gated_delta.rule.hopper.{part}"
    for part in (
        "chunk_inverse",
        "forward_scan",
        "transitions",
        "state_scan",
        "local_gradients",
        "reverse_scan",
        "gradients",
    )
)
"""Which has no interpreter."""


@pytest.fixture(scope="module")
def warm() -> None:
    checks.warm()


def _survives(mutant: Mutant, noticed: Noticed) -> bool:
    """Whether checks let a mutant pass; one that they cannot be run on has not died of them."""
    outcome, _ = checks.outcome(os.waitpid(checks.start(mutant, noticed), 0)[1])
    assert outcome != checks.UNDECIDED, "the checks do not run"
    return outcome == checks.SURVIVED


def _parameters() -> list[object]:
    """All mutants that differ; some of those that move data are left for --all."""
    listed = []
    for family in FAMILIES if kernels.interpreting() else ():
        for module in MODULES[family]:
            loaded = import_module(module)
            entry_points = {k.name for k in kernels.registered().values() if k.function.__module__ == loaded.__name__}
            found = mutants(module)
            for index, mutant in enumerate(found):  # counted with the equivalent ones, which come and go
                if equivalent(mutant):
                    continue
                chosen = replace(
                    mutant, sampled=_left_out(module, family, mutant.function in entry_points, index, len(found))
                )
                name = f"{module.removeprefix('adjoint.')}:{mutant.function}:{mutant.place[0]}:{mutant.change}"[:120]
                listed.append(pytest.param(family, chosen, id=name))
    return listed


def _left_out(module: str, family: str, moves_data: bool, index: int, among: int) -> str:
    """Why a mutant is left for --all; empty when it is not."""
    one_in = ONE_IN.get(module, ONE_IN[family])[moves_data]
    if index % one_in == 0:
        return ""
    what = "in kernels proper, which move data" if moves_data else "in functions that kernels call"
    return f"one in {one_in} of the mutants {what} ({among} in this module); all with --all"


ONE_IN = {
    "activation": (6, 12),
    "norm": (12, 19),
    "embedding": (8, 16),
    "indexing": (8, 27),
    "moe": (10, 20),
    **dict.fromkeys(route_calls.MODULES, (23, 31)),
    **{f"adjoint.ops.moe.experts.triton.{part}": (19, 29) for part in EXPERTS},  # a layer takes it a second
    "gated_delta": (199, 307),  # sequences take it several
    "adjoint.ops.gated_delta.step.kernels": (61, 127),
}
"""Of how many mutants one is tried without --all, by family or module: in functions kernels call, and in kernels."""


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
@pytest.mark.parametrize(("family", "mutant"), _parameters())
def test_mutant_dies(family: str, mutant: Mutant, warm: None, everything: bool) -> None:
    if mutant.sampled and not everything:
        pytest.skip(mutant.sampled)
    survived = all(_survives(mutant, noticed) for noticed in checks.stages(family, mutant))
    assert not survived, f"line {mutant.place[0]}: {mutant.change} goes unnoticed"


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
@pytest.mark.parametrize(("family", "module"), [(family, module) for family in FAMILIES for module in MODULES[family]])
def test_the_kernels_themselves_are_not_noticed(family: str, module: str, warm: None, everything: bool) -> None:
    """The same checks pass on the unbroken kernels: a mutant dies of its mutation."""
    for noticed in checks.STAGES[family] if everything else checks.STAGES[family][:1]:
        assert _survives(checks.unbroken(module), noticed)


def test_every_module_with_kernels_has_mutants() -> None:
    listed = {module for modules in MODULES.values() for module in modules}
    root = Path(str(adjoint.__file__)).parent
    with_kernels = {
        ".".join(("adjoint", *file.relative_to(root).with_suffix("").parts))
        for file in root.rglob("*.py")
        if re.search(r"^@triton\.jit", file.read_text(encoding="utf-8"), re.MULTILINE)
    } - {"adjoint.device.faults"}
    assert with_kernels == listed and set(MODULES) == set(FAMILIES)


def test_mutants_are_found() -> None:
    changes = set()
    for modules in MODULES.values():
        for module in modules:
            found = mutants(module)
            assert len(found) > 10
            changes |= {(mutant.function, mutant.change) for mutant in found} | {("*", m.everywhere) for m in found}
    assert not set(EQUIVALENT) - changes, "equivalent mutants are gone"
