"""Recorded errors: written by a command, read by `verify`, and passed by no error that doubles."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from adjoint.cli import app
from adjoint.contract import recorded
from adjoint.contract.cases import Answers, Inputs
from adjoint.core.guarantee import Derived, Empirical, Guarantee
from adjoint.core.preference import Preference
from adjoint.ops.gated_delta.rule.cases import SUBJECTS
from adjoint.verify import numerics
from adjoint.verify.run import compare, evaluate, key_of, regressions

CPU = torch.device("cpu")
EAGER = Preference(backend="eager")
RULE = SUBJECTS[0]
TAIL = RULE.cases[1]


def errors_times(factor: float) -> Any:
    """The results of the reference, with errors so many times as large as those of the plan."""

    def answer(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
        found = evaluate(RULE, TAIL, torch.float32, CPU, EAGER)
        moved = [x.exact + factor * (x.result.double() - x.exact) for x in compare(found)]
        outputs = len(found.outputs)
        return tuple(x.float() for x in moved[:outputs]), tuple(x.float() for x in moved[outputs:])

    return answer


def test_an_error_that_doubles_is_noticed(tmp_path: Path) -> None:
    """It is well inside the promise, so nothing else would."""
    figures: recorded.Figures = {}
    subject = replace(RULE, recorded=tmp_path / "recorded.json", cases=(TAIL,))
    found = evaluate(subject, TAIL, torch.float32, CPU, EAGER)
    recorded.put(figures, key_of(found, TAIL), {x.name: x.relative_error for x in compare(found)})
    recorded.save(figures, tmp_path / "recorded.json")
    recorded.load.cache_clear()
    assert all(row.passed for row in numerics.accuracy(subject, torch.float32, CPU, EAGER))
    assert all(measured.holds for _, measured in regressions(found, TAIL, compare(found)))
    for factor, noticed in ((1.2, False), (2.0, True)):
        outputs, gradients = errors_times(factor)(found.upstream, found.inputs)
        wrong = replace(found, outputs=outputs, gradients=gradients)
        assert all(x.promise.holds for x in compare(wrong))
        broken = [name for name, measured in regressions(wrong, TAIL, compare(wrong)) if not measured.holds]
        assert len(broken) == (len(compare(found)) if noticed else 0), broken
    recorded.load.cache_clear()


def test_a_doubled_error_is_a_failed_row(tmp_path: Path) -> None:
    """The check that `verify` runs fails with figures of half the errors."""
    subject = replace(RULE, recorded=tmp_path / "recorded.json", cases=(TAIL,))
    found = evaluate(subject, TAIL, torch.float32, CPU, EAGER)
    figures: recorded.Figures = {}
    recorded.put(figures, key_of(found, TAIL), {x.name: x.relative_error / 2 for x in compare(found)})
    recorded.save(figures, tmp_path / "recorded.json")
    recorded.load.cache_clear()
    failed = [row for row in numerics.accuracy(subject, torch.float32, CPU, EAGER) if not row.passed]
    larger = [x.name for x in compare(found) if x.relative_error > recorded.SMALLEST]
    assert {row.check for row in failed} == {"recorded errors"} and len(failed) == len(larger) >= 5
    recorded.load.cache_clear()


def test_figures_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "recorded.json"
    done = CliRunner().invoke(
        app, ["verify", "gated_delta_rule[normalize_qk]", "--device", "cpu", "--record", str(path)]
    )
    assert done.exit_code == 0, done.output
    figures = json.loads(path.read_text(encoding="utf-8"))
    keys = ("cpu", "gated_delta_rule[normalize_qk]", "eager.chunked", "bfloat16", "a tail")
    assert set(recorded.of(figures, *keys)) == {"o", "dq", "dk", "dv"}, "states and gates are too few numbers"
    assert all(0 < figure < 0.01 for figure in recorded.of(figures, *keys).values())
    kept = json.loads(RULE.recorded.read_text(encoding="utf-8"))  # type: ignore[union-attr]
    assert figures["interpreter"] == kept["interpreter"], "what was recorded elsewhere stays"


def test_one_file_at_a_time(tmp_path: Path) -> None:
    path = str(tmp_path / "recorded.json")
    done = CliRunner().invoke(app, ["verify", "--device", "cpu", "--record", path])
    assert done.exit_code == 2 and "name ops of one family" in done.output
    done = CliRunner().invoke(app, ["verify", "silu", "--record", path, "--shard", "1/2"])
    assert done.exit_code == 2 and "--record runs no check: leave out --shard" in done.output


def test_every_figure_belongs_to_a_case() -> None:
    """What nothing reads would be out of date unseen."""
    assert RULE.recorded is not None
    figures = recorded.load(RULE.recorded)
    assert {"cpu", "interpreter"} <= set(figures)
    cases = {subject.name: {case.name for case in subject.cases} for subject in SUBJECTS}
    for where, by_subject in figures.items():
        for name, by_plan in by_subject.items():
            for by_dtype in by_plan.values():
                for by_case in by_dtype.values():
                    assert by_case.keys() <= cases[name], (where, name)


def test_a_ceiling_beside_a_promise_is_shown_and_checked() -> None:
    stated = Guarantee(
        True, "", False, "float32", 1, Derived("x", lambda *_: torch.ones(())), recorded=Empirical(0.5, "y")
    )
    assert "error: ≤ x, derived\nrecorded: ≤ 0.5 relative, recorded on y\ndomain" in str(stated)


@pytest.mark.parametrize("factor", (0.9, 1.1))
def test_a_norm_may_be_bounded(factor: float) -> None:
    exact = torch.zeros(3, 2, 4)
    result = torch.full((3, 2, 4), 0.5)  # whose rows have norm 1
    bound = Derived("", lambda: torch.full((3, 2), factor), axes=1)
    assert bound.measure(result, exact).holds == (factor > 1)
    assert bound.measure(result, exact).value == pytest.approx(1 / factor)
