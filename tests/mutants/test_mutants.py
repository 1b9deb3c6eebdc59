"""Every arithmetic operator, comparison and constant in every kernel is broken in turn; a check must notice.

The mutants are made from the syntax trees of the modules in `MODULES`, inside their `@triton.jit` and `@gluon.jit`
functions, and run in the interpreter, or in the model of Gluon. One that survives is either a hole in the checks or an
equivalent program, and must then be listed in `mutants.equivalent` with the reason. Every commit tries a part of them
here; `make mutants` tries all.
"""

import json
import os
import re
from importlib import import_module
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import pytest

import adjoint
from adjoint.core import kernels
from adjoint.ops import FAMILIES
from tests.conftest import commit_of
from tests.mutants import checks, processes
from tests.mutants.calls import gluon as gluon_calls
from tests.mutants.checks import MODULES, Noticed
from tests.mutants.equivalent import EQUIVALENT
from tests.mutants.trees import Mutant, equivalent, mutants, names


def _survives(mutant: Mutant, noticed: Noticed) -> bool:
    """Whether checks let a mutant pass; one that they cannot be run on has not died of them."""
    outcome = processes.judge(mutant, noticed)
    assert outcome != processes.UNDECIDED, "the checks do not run"
    return outcome == processes.SURVIVED


ONE_IN = {
    "adjoint.ops.gated_delta.rule": 50,  # seconds each
    "adjoint.ops.gated_delta": 16,
    "adjoint.ops.embedding": 12,
    "adjoint.device": 12,
    "adjoint.ops.moe.experts.hopper": 16,  # in the model of Gluon
    "adjoint.ops.moe": 12,
    "adjoint.ops.indexing": 12,
    "adjoint.ops.loss": 12,
    "adjoint.ops.conv": 20,
    "adjoint.ops.norm": 8,
    "adjoint.ops.rotary": 8,
    "adjoint.ops.activation": 8,
}
"""Of how many mutants of a module one is tried without --all, by how its name begins: the first that fits."""


def is_tried(mutant: Mutant, commit: str) -> bool:
    """Whether a commit tries a mutant: every commit has its own part, so that all have their turn."""
    one_in = next(number for prefix, number in ONE_IN.items() if mutant.module.startswith(prefix))
    return (mutant.number + int(commit, 16)) % one_in == 0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Lists the mutants that differ, those of this commit's part or all, and the modules that are tried as they are."""
    everything, listed = bool(metafunc.config.getoption("--all")), []
    if metafunc.function is test_mutant_dies:
        commit = commit_of(metafunc.config)
        for family in FAMILIES if kernels.interpreting() else ():
            for module in MODULES[family]:
                for mutant in mutants(module):
                    if not equivalent(mutant) and (everything or is_tried(mutant, commit)):
                        name = f"{module.removeprefix('adjoint.')}:{mutant.function}:{mutant.place[0]}:{mutant.change}"
                        listed.append(pytest.param(family, mutant, id=name[:120]))
        metafunc.parametrize(("family", "mutant"), listed)
    if metafunc.function is test_the_kernels_themselves_are_not_noticed:
        for family in FAMILIES:
            for modules in checks.controls(family, alone=everything):
                listed.append(pytest.param(family, modules, id=f"{family}-{modules[-1]}"))
        metafunc.parametrize(("family", "modules"), listed)


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
def test_mutant_dies(family: str, mutant: Mutant) -> None:
    checks.warm([mutant.module])
    survived = all(_survives(mutant, noticed) for noticed in checks.stages(family, mutant))
    assert not survived, f"line {mutant.place[0]}: {mutant.change} goes unnoticed"


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
def test_the_kernels_themselves_are_not_noticed(family: str, modules: tuple[str, ...], everything: bool) -> None:
    """The same checks pass on the unbroken kernels: a mutant dies of its mutation."""
    *before, module = modules
    checks.warm([module])
    same = checks.unbroken(module)
    for noticed in checks.stages(family, same)[: None if everything else 1]:
        process = processes.start(same, noticed, before)
        assert processes.outcome(os.waitpid(process, 0)[1])[0] == processes.SURVIVED


def _hangs(mutant: Mutant) -> bool:
    while mutant.function:  # the module as it is has none
        pass
    return False


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
def test_a_mutant_that_hangs_is_noticed_by_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FEW_SECONDS", 1)
    module = MODULES["rotary"][0]
    assert processes.judge(mutants(module)[0], _hangs) == processes.TIMED_OUT
    assert processes.judge(checks.unbroken(module), _hangs) == processes.SURVIVED


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
def test_one_that_takes_longer_is_given_as_many_times_what_its_module_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FEW_SECONDS", 1)
    monkeypatch.setattr(processes, "TIMES", 5)
    monkeypatch.setattr(processes, "_seconds", lambda module, noticed: 1.0)

    def takes_two_seconds(mutant: Mutant) -> bool:
        begin = process_time()
        while process_time() < begin + 2:
            pass
        return False

    assert processes.judge(mutants(MODULES["rotary"][0])[0], takes_two_seconds) == processes.SURVIVED


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
def test_a_run_refuses_where_kernels_fail_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = import_module("tests.mutants.run")
    monkeypatch.setitem(checks.STAGES, "rotary", (lambda mutant: True,))
    out = tmp_path / "mutants.jsonl"
    monkeypatch.setattr("sys.argv", ["run", "--family", "rotary", "--sample", "1", "--jobs", "1", "--out", str(out)])
    assert run.main() == 2
    (module,) = MODULES["rotary"]
    printed = capsys.readouterr().err
    assert f"{module}: the checks fail on the kernels as they are (killed" in printed
    assert "no mutant was tried" in printed
    (control,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert control["change"] == ""


@pytest.mark.kernels
@pytest.mark.skipif(not kernels.interpreting(), reason="mutants run in the interpreter")
def test_a_run_refuses_a_numpy_that_is_too_new(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = import_module("tests.mutants.run")
    monkeypatch.setattr("sys.argv", ["run"])
    for versions, refused in ((("3.6.0", "2.5.2"), True), (("3.6.0", "2.3.5"), False), (("3.7.1", "2.5.2"), False)):
        for name, version in zip(("triton", "np"), versions, strict=True):
            monkeypatch.setattr(run, name, SimpleNamespace(__version__=version))
        assert bool(run.refusal()) is refused
        if refused:
            assert run.main() == 2
            assert "Triton 3.6.0 is wrong with numpy 2.5.2" in capsys.readouterr().err


@pytest.mark.parametrize("alone", [False, True])
def test_every_module_is_tried_as_it_is(alone: bool) -> None:
    for family, modules in MODULES.items():
        tried = [module for group in checks.controls(family, alone) for module in group]
        assert sorted(tried) == sorted(modules)


def test_every_mutant_has_its_turn() -> None:
    """Commits try different parts, which together are all; the same commit tries the same."""
    for module in (checks.RULE[0], checks.MODULES["norm"][0], gluon_calls.MODULES[0]):
        found = mutants(module)
        parts = {hex(commit)[2:]: [m for m in found if is_tried(m, hex(commit)[2:])] for commit in range(50)}
        assert {m.number for part in parts.values() for m in part} == {m.number for m in found}
        assert len({tuple(m.number for m in part) for part in parts.values()}) > 1
        assert max(map(len, parts.values())) <= len(found) / 4 + 1


def test_every_module_with_kernels_has_mutants() -> None:
    listed = {module for modules in MODULES.values() for module in modules}
    root = Path(str(adjoint.__file__)).parent
    with_kernels = {
        ".".join(("adjoint", *file.relative_to(root).with_suffix("").parts))
        for file in root.rglob("*.py")
        if re.search(r"^@(triton|gluon)\.jit", file.read_text(encoding="utf-8"), re.MULTILINE)
    } - {"adjoint.device.faults"}
    assert set(MODULES) == set(FAMILIES)
    assert with_kernels == listed, f"MODULES in tests/mutants/checks.py differ in {sorted(with_kernels ^ listed)}"


def test_mutants_are_found() -> None:
    changes = set()
    for modules in MODULES.values():
        for module in modules:
            found = mutants(module)
            assert len(found) > 2
            changes |= {(name, mutant.change) for mutant in found for name in names(mutant)}
            changes |= {("*", mutant.everywhere) for mutant in found}
    assert not set(EQUIVALENT) - changes, "equivalent mutants are gone"
