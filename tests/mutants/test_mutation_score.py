"""The mutation score in the docs is the one that was saved, and what is saved is counted from outcomes of this tree."""

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from adjoint.core import kernels
from tests.mutants import report

in_the_interpreter = pytest.mark.skipif(not kernels.interpreting(), reason="mutants are those of the interpreter")
SCORE = json.loads(report.SCORE.read_text(encoding="utf-8"))


def test_the_docs_show_the_saved_score() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    assert page.count(report.BEGIN) == page.count(report.END) == 1
    assert report.render(SCORE) in page and page == report.with_table(page, SCORE), (
        "run: python -m tests.mutants.report FILE --write"
    )


def test_the_score_of_every_family_is_high() -> None:
    for family, counts in SCORE.items():
        assert report.score_of(counts) >= 95, family
        assert len(counts["survivors"]) == counts[report.SURVIVED] + counts[report.UNDECIDED]


def test_a_family_that_nobody_has_tried_is_named() -> None:
    fewer = {family: counts for family, counts in SCORE.items() if family not in ("norm", "moe")}
    assert re.search(r"Not all mutants of .*norm.* and .*moe.* have been tried yet", report.render(fewer))


def test_a_family_counted_anew_leaves_the_others_as_they_are() -> None:
    counted = {"norm": SCORE["norm"] | {"commit": "another", report.KILLED: 1}}
    score = report.merged(SCORE, counted)
    assert score["norm"] == counted["norm"] and list(score) == [family for family in report.MODULES if family in score]
    assert {family: counts for family, counts in score.items() if family != "norm"} == {
        family: counts for family, counts in SCORE.items() if family != "norm"
    }


def test_another_score_is_another_page() -> None:
    page = report.PAGE.read_text(encoding="utf-8")
    other = json.loads(json.dumps(SCORE))
    next(iter(other.values()))[report.SURVIVED] += 1
    assert report.with_table(page, other) != page


@pytest.mark.kernels
@in_the_interpreter
def test_outcomes_of_another_tree_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "mutants.jsonl"
    file.write_text('{"key": "0", "outcome": "killed"}\n', encoding="utf-8")
    with pytest.raises(SystemExit, match=r"lacks .* of the .* mutants of activation, such as adjoint\.ops\.activation"):
        report.summarise(file, "0", "today")


@pytest.mark.kernels
@in_the_interpreter
def test_outcomes_are_counted_by_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two mutants of one module: one is killed, the other survives and is named."""
    listed = import_module("tests.mutants.run").trials(["norm"])
    monkeypatch.setattr(report, "MODULES", {"norm": ()})
    first, second, *rest = listed
    lines = [trial.result(report.KILLED) for trial in (first, *rest)] + [second.result(report.SURVIVED)]
    file = tmp_path / "mutants.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    score = report.summarise(file, "0", "today")
    assert score["norm"][report.KILLED] == len(listed) - 1 and score["norm"]["commit"] == "0"
    assert score["norm"]["survivors"] == [f"{second.mutant.module}, {second.mutant.function}: {second.mutant.change}"]
    shown = report.render(score)
    assert f"| norm | {len(listed)} | {len(listed) - 1} | 0 | 1 |" in shown and second.mutant.change in shown
