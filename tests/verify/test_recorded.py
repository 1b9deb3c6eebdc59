"""Recorded errors: written by a command, read by `verify`, and passed by no error that doubles."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from adjoint.cli import app
from adjoint.contract.cases import Subject
from adjoint.core import kernels
from adjoint.core.guarantee import Derived, Empirical, Guarantee
from adjoint.core.preference import Preference
from adjoint.ops.activation.silu.cases import SILU
from adjoint.ops.gated_delta.rule.cases import SUBJECTS as RULES
from adjoint.verify import figures
from adjoint.verify import record as recording
from adjoint.verify.checks import numerics
from adjoint.verify.listing import coverage
from adjoint.verify.listing.jobs import on_device, served_backends, subjects
from adjoint.verify.record import Measured
from adjoint.verify.run import Comparison, Evaluation, Row, compare
from tests.lookup import LOOKUP
from tests.verify import counts
from tests.verify.limits import pretended_hopper

CPU = torch.device("cpu")
EAGER = Preference(backend="eager")
IN_THE_INTERPRETER = [pytest.mark.kernels, pytest.mark.skipif(not kernels.interpreting(), reason="in the interpreter")]


def _on_a_cpu() -> list[Subject]:
    return [on_device(subject, CPU) for subject in subjects()]


# -------------------------------------------------------------------------------------- what has figures


@pytest.mark.parametrize("machine", ["cpu", pytest.param("interpreter", marks=IN_THE_INTERPRETER)])
def test_every_case_has_a_figure_and_every_figure_a_case(machine: str) -> None:
    """Another revision of a plan, and another case, are to be recorded: `make record`."""
    due, there = coverage.due(machine, CPU, _on_a_cpu()), counts.recorded(machine).keys()
    assert len(due) > 500
    assert not due - there, f"not recorded, which `make record` does: {sorted(due - there)}"
    assert not there - due, f"recorded of what is no more: {sorted(there - due)}"


@pytest.mark.parametrize("machine", sorted(set(counts.machines()) - {"cpu", "interpreter"}))
def test_every_output_has_a_figure_on_a_gpu(machine: str) -> None:
    """Those of small cases, in whose place a larger one may have it; but for subjects that are pending."""
    pending = {(dtype, subject) for dtype, names in figures.pending(machine).items() for subject in names}
    with pretended_hopper() as device:
        due = coverage.due(machine, device, _on_a_cpu())
    there = {(place[:-1], output) for place, output in counts.recorded(machine)}
    missing = {(place[:-1], output) for place, output in due if (place.dtype, place.subject) not in pending} - there
    assert not missing, f"record these on it, or name their subjects in its pending.json: {sorted(missing)}"
    known = {(subject.name, case.name) for subject in subjects() for case in subject.cases}
    strange = {(place.subject, place.case) for place, _ in counts.recorded(machine)} - known
    assert not strange, f"recorded of what is no more: {sorted(strange)}"


def test_another_revision_has_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose bits change is to be measured again."""
    assert coverage.due("cpu", CPU, [SILU]) & counts.recorded("cpu").keys()
    revised = figures.revised
    monkeypatch.setattr(figures, "revised", lambda candidates: re.sub(r" r\d+", " r99", revised(candidates)))
    assert not coverage.due("cpu", CPU, [SILU]) & counts.recorded("cpu").keys()


def test_names_of_cases_differ() -> None:
    for subject in subjects():
        assert len({case.name for case in subject.cases}) == len(subject.cases), subject.name


def test_the_page_shows_how_many_there_are() -> None:
    """And all of them notice an error that doubles, or any at all."""
    assert counts.table() in counts.PAGE.read_text(encoding="utf-8"), "python -m tests.verify.counts writes it"
    for machine in counts.machines():
        assert sum(counts.counts(machine)[1:]) == counts.counts(machine).all > 100


# ------------------------------------------------------------------------------------- what they notice


def doubled(found: Evaluation) -> list[Comparison]:
    """Results whose errors are twice as large."""
    return [
        x._replace(result=torch.where(x.result.isfinite(), x.exact + 2 * (x.result.double() - x.exact), x.exact))
        for x in compare(found)
    ]


def _failed(rows: list[Row]) -> set[str]:
    """The outputs whose errors are past their figures."""
    return {
        row.measured.partition(":")[0]
        for row in rows
        if row.check == numerics.RECORDED and row.guarantee == numerics.AS_RECORDED and not row.passed
    }


def _families() -> Iterator[object]:
    """Every subject on the CPU, and its kernels in the interpreter."""
    for subject in _on_a_cpu():
        yield pytest.param(subject, "eager", id=f"{subject.name} eager")
        yield pytest.param(subject, "triton", id=f"{subject.name} triton", marks=IN_THE_INTERPRETER)


@pytest.mark.parametrize(("subject", "backend"), [*_families()])
def test_an_error_that_doubles_fails(
    subject: Subject, backend: str, everything: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of every output in every dtype, but of those that had no error: those fail at any."""
    if kernels.interpreting() and backend == "eager":
        pytest.skip("the ordinary process runs this")
    served = dict(served_backends(subject, CPU)).get(backend)
    if served is None:
        pytest.skip(f"no plan of {backend}")
    machine = "interpreter" if backend == "triton" else "cpu"
    dtypes = [dtype for dtype in served.dtypes if dtype != torch.float64]
    if backend == "triton" and not everything:
        dtypes = dtypes[-1:]
    for dtype in dtypes:
        places = coverage.due(machine, CPU, [replace(served, plans=(), dtypes=(dtype,))])
        figure_of = {(place, output): (figures.recorded(place) or {}).get(output) for place, output in places}
        assert None not in figure_of.values(), "not recorded, which `make record` does"
        outputs = {output for _, output in places}
        exact = {output for output in outputs if not any(f for (_, name), f in figure_of.items() if name == output)}
        with monkeypatch.context() as patched:
            for module in (numerics, figures):
                patched.setattr(module, "compare", doubled)
            failed = _failed(numerics.accuracy(served, dtype, CPU, Preference(backend=backend)))
        assert failed == outputs - exact, (dtype, outputs - exact - failed)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where figures are read from, in place of the package's own."""
    figures.read.cache_clear()
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    yield tmp_path
    figures.read.cache_clear()


def _recorded_rows(subject: Subject, dtype: torch.dtype = torch.float32) -> list[Row]:
    rows = numerics.accuracy(subject, dtype, CPU, EAGER)
    return [row for row in rows if row.check == numerics.RECORDED and row.guarantee == numerics.AS_RECORDED]


def test_where_nothing_was_recorded_rows_say_so(folder: Path) -> None:
    rows = _recorded_rows(LOOKUP)
    assert rows and all(row.passed and numerics.NO_FIGURE in row.measured for row in rows)


def test_the_report_counts_what_has_no_figure(folder: Path) -> None:
    done = CliRunner().invoke(app, ["verify", "l2_norm", "--thorough", "--device", "cpu", "--jobs", "1"])
    assert done.exit_code == 0 and "results have no figure of this machine" in done.output
    figures.read.cache_clear()


def test_figures_are_those_of_the_errors(folder: Path) -> None:
    """1.5 times as large; half of them fail; a case without one is named."""
    (row,) = recording.measure(LOOKUP, torch.float32, CPU, EAGER)
    assert isinstance(row, Measured)
    for factor, passes in ((1.0, True), (0.5, False)):
        errors = {
            place: {output: error._replace(value=factor * error.value) for output, error in by_output.items()}
            for place, by_output in row.errors.items()
        }
        content = figures.of_errors(errors)
        figures.save(content, figures.path_of("cpu", "float32", folder))
        figures.read.cache_clear()
        rows = _recorded_rows(LOOKUP)
        assert rows and all(one.passed == passes for one in rows)
    for by_case in content["lookup"].values():
        by_case.clear()
    figures.save(content, figures.path_of("cpu", "float32", folder))
    figures.read.cache_clear()
    assert all(numerics.NO_FIGURE in one.measured for one in _recorded_rows(LOOKUP))


def _place(case: str) -> figures.Place:
    return figures.Place("cpu", "float32", "op", "plan r1", case)


def test_a_rounding_is_the_smallest_error_that_counts() -> None:
    """Unless an output has no larger one: then its own is."""
    unit = 2.0**-24
    small, usual = figures.Error(0.01 * unit, unit), figures.Error(0.4 * unit, unit)
    content = figures.of_errors({_place("a"): {"y": small, "z": small}, _place("b"): {"y": usual}})
    of_cases = content["op"]["plan r1"]
    assert of_cases["b"]["y"] == pytest.approx(1.5 * 0.4 * unit, rel=0.05)
    assert of_cases["a"]["y"] == pytest.approx(1.5 * 12**-0.5 * unit, rel=0.05)
    assert of_cases["a"]["z"] == pytest.approx(1.5 * 0.01 * unit, rel=0.05)
    assert of_cases["a"]["y"] < 2 * 12**-0.5 * unit, "results that are rounded twice as far are past it"
    with pytest.raises(ValueError, match="op, plan r1, a: an error of nan"):
        figures.of_errors({_place("a"): {"y": figures.Error(float("nan"), unit)}})


def test_few_numbers_are_drawn_again() -> None:
    """Of an output that has 256 nowhere, in its largest case; the others have one seed, or no figure."""
    sizes = {
        _place(case): {"few": few, "many": many, "one": 1, "none": 0}
        for case, few, many in (("a", 1, 300), ("b", 20, 20), ("c", 0, 256))
    }
    due = figures.seeds_of(sizes)
    assert due == {_place("a"): {"many": 1, "one": 16}, _place("b"): {"few": 13}, _place("c"): {"many": 1}}
    by_seed = [3.0, *[4.0] * 11, 5.0]
    drawn = figures.errors_of(
        {_place("b"): due[_place("b")]}, lambda _, n: {"few": figures.Sample(20, by_seed[n], 1.0)}
    )
    assert drawn[_place("b")]["few"].value == pytest.approx(((9 + 11 * 16 + 25) / 13) ** 0.5)


# ------------------------------------------------------------------------------------------ the command


@pytest.mark.parametrize("processes", ("1", "2"))
def test_figures_are_written_and_read(processes: str, tmp_path: Path) -> None:
    op = "gated_delta_rule[normalize_qk]"
    done = CliRunner().invoke(
        app, ["verify", op, "--device", "cpu", "--jobs", processes, "--record", str(tmp_path / "new")]
    )
    assert done.exit_code == 0, done.output
    assert "1 of 1 measured, 0 failed" in done.output and not figures.pending("cpu", tmp_path / "new")
    path = tmp_path / "new" / "cpu" / "bfloat16.json"
    content, kept = json.loads(path.read_text(encoding="utf-8")), figures.load("cpu", "bfloat16")
    assert kept is not None and content.keys() == kept.keys()
    assert all(content[name] == kept[name] for name in kept if name != op), "what was recorded before stays"
    ((plans, by_case),) = content[op].items()
    assert plans.startswith("eager.chunked r")
    assert set(by_case["a tail"]) == {"o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dinitial_state"}
    assert all(0 < figure < 0.01 for figure in by_case["a tail"].values())
    assert not list(path.parent.glob("*.unfinished"))


def test_what_is_no_more_goes_when_a_subject_is_measured_again(tmp_path: Path) -> None:
    path = figures.path_of("cpu", "float32", tmp_path)
    figures.save({"silu": {"old r1": {"a": {"y": 1.0}}}, "other": {"old r1": {"a": {"y": 1.0}}}}, path)
    done = CliRunner().invoke(app, ["verify", "silu", "--device", "cpu", "--jobs", "1", "--record", str(tmp_path)])
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text(encoding="utf-8"))
    assert "old r1" not in content["silu"] and content["other"] == {"old r1": {"a": {"y": 1.0}}}
    figures.read.cache_clear()


def test_a_measurement_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such number")

    monkeypatch.setattr(figures, "drawing", fail)
    done = CliRunner().invoke(app, ["verify", "silu", "--device", "cpu", "--jobs", "1", "--record", str(tmp_path)])
    assert done.exit_code == 1 and "no such number" in done.output and ", 24 failed" in done.output
    every = {dtype: ["silu"] for dtype in ("float32", "bfloat16", "float16")}
    assert figures.pending("cpu", tmp_path) == every, "what has no figures is named"


def test_what_means_nothing_to_it_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["verify", "silu", "--record", str(tmp_path), "--shard", "1/2"])
    assert done.exit_code == 2 and "--record runs no check: leave out --shard" in done.output
    done = CliRunner().invoke(app, ["verify", "silu", "--device", "cpu", "--record", str(tmp_path), "--jobs", "0"])
    assert done.exit_code == 2 and "--jobs must be 1 or more" in done.output
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["verify", "silu", "--device", "cpu", "--record", str(tmp_path / "file")])
    assert done.exit_code == 2 and "cannot write figures" in done.output


# -------------------------------------------------------------------------------------- other statements


def test_a_ceiling_beside_a_promise_is_shown_and_checked() -> None:
    stated = Guarantee(
        True, "", False, "float32", 1, Derived("x", lambda *_: torch.ones(())), recorded=Empirical(0.5, "y")
    )
    assert "error: ≤ x, derived\nrecorded: ≤ 0.5 relative, recorded on y\ndomain" in str(stated)
    rule = replace(RULES[0], cases=RULES[0].cases[1:2])
    rows = [row for row in numerics.accuracy(rule, torch.float32, CPU, EAGER) if row.guarantee == numerics.CEILING]
    assert len(rows) == 7 and all(row.passed for row in rows)


def test_copies_have_no_figures() -> None:
    for formula, is_zero in (("0: bytes are copied", True), ("0.5 ulp", False), ("½ ulp", False)):
        stated = Guarantee(True, "", True, "none", 0, Derived(formula, lambda *_: torch.zeros(())))
        assert figures.has_error(stated) != is_zero


@pytest.mark.parametrize("factor", (0.9, 1.1))
def test_a_norm_may_be_bounded(factor: float) -> None:
    exact = torch.zeros(3, 2, 4)
    result = torch.full((3, 2, 4), 0.5)  # whose rows have norm 1
    bound = Derived("", lambda: torch.full((3, 2), factor), axes=1)
    assert bound.measure(result, exact).holds == (factor > 1)
    assert bound.measure(result, exact).value == pytest.approx(1 / factor)
