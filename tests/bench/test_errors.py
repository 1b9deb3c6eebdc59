"""Errors of workloads: every output beside its promise and the others', saved, and shown as they were saved."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from adjoint.bench.measurement import errors, run
from adjoint.cli import app
from adjoint.contract.cases import Inputs, Workload
from adjoint.core.guarantee import Derived, Empirical
from adjoint.core.plan import Plan
from adjoint.ops import FAMILIES, cases
from adjoint.ops.embedding.values import device_lookup
from adjoint.ops.gated_delta.rule.cases import ERROR_WORKLOADS, WORKLOADS
from adjoint.ops.gated_delta.rule.layers import layer
from tests.bench.small import CPU, small
from tests.bench.test_workloads import WORKLOAD

ROOT = Path(__file__).parents[2]


def rows_of(workload: Workload) -> dict[tuple[str, str], errors.Row]:
    return {(row.contender, row.output): row for row in errors.measure("activation", workload, CPU)}


def test_every_output_has_an_error_beside_its_promise() -> None:
    rows = rows_of(small())
    assert set(rows) == {(who, name) for who in (run.OURS, run.EAGER) for name in ("y", "dgate", "dup")}
    for (contender, _), row in rows.items():
        assert row.error and row.error < 2.0**-8, "the unit roundoff of bfloat16"
        assert ("of its bound" in row.promise) == (contender == run.OURS)


def test_the_same_reference_is_computed_once_for_all() -> None:
    calls = []
    workload = small()
    reference = workload.subject.reference

    def counted(*inputs: Tensor) -> tuple[Tensor, ...]:
        calls.append(len(inputs))
        return reference(*inputs)

    rows_of(replace(workload, subject=replace(workload.subject, reference=counted), directions=("forward",)))
    assert len(calls) == 1


def test_a_promise_that_is_broken_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Plan.execute
    monkeypatch.setattr(Plan, "execute", lambda *arguments: tuple(x.mul_(1.01) for x in honest(*arguments)))
    rows = rows_of(small())
    broken = {key for key, row in rows.items() if not row.holds}
    assert broken == {(run.OURS, name) for name in ("y", "dgate", "dup")}
    assert all(float(rows[key].promise.partition("%")[0]) > 100 for key in broken)


def test_what_raises_is_noted_and_ours_must_not() -> None:
    def broken(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
        raise RuntimeError("not today")

    rows = rows_of(small(others={"index_add_": broken}, directions=("backward",)))
    assert rows["index_add_", ""].note == "RuntimeError: not today" and rows["index_add_", ""].holds
    assert rows[run.OURS, "dup"].error is not None


def test_copies_are_exact_and_ceilings_are_of_norms() -> None:
    rows = rows_of(WORKLOAD)
    assert rows[run.OURS, "out"].promise == "exact" and rows[run.OURS, "out"].error == 0
    for statement, words in (
        (Empirical(0.5, ""), "20% of 0.5 relative"),
        (Derived("", lambda *_: torch.full((2,), 0.5)), "40% of its bound"),
    ):
        total = errors._Sum(_Stated(statement))  # type: ignore[arg-type]
        for exact in (torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])):
            total.add(exact + torch.tensor([0.2, 0.0]) * exact.sign(), exact, ())
        assert total.verdict() == (words.replace("20%", f"{100 * total.error / 0.5:.0f}%"), True)


class _Stated:
    def __init__(self, error: Any) -> None:
        self.error = error


def test_without_names_it_is_the_first_workload_of_every_subject() -> None:
    chosen = errors.workloads_of([])
    assert {family for family, _ in chosen} == set(FAMILIES)
    timed = {(w.subject.name, w.dtype) for module in cases() for w in module.WORKLOADS}
    assert {(w.subject.name, w.dtype) for _, w in chosen} == timed
    names = [w.name for _, w in chosen]
    assert len(ERROR_WORKLOADS) == 12 and {w.name for w in ERROR_WORKLOADS} <= set(names)
    assert not any("32768 tokens, 16 and 32 heads" in name for name in names if "gated_delta_rule" in name)
    assert [w.subject.name for _, w in errors.workloads_of(["l2_norm"])] == ["l2_norm"]


def test_nearly_equal_keys_and_a_share_of_the_decays() -> None:
    wide, narrow = (ERROR_WORKLOADS[i].make(torch.float64, CPU, torch.Generator().manual_seed(0)) for i in (0, 8))
    assert torch.equal(wide[3] / 16, narrow[3]), "the same numbers, drawn again"
    k = narrow[1][0, :, 0]
    assert float((k @ k[0]).min()) > 0.98 and float((wide[1][0, :, 0] @ wide[1][0, 0, 0]).min()) < 0.5


@pytest.mark.parametrize("workload", [*ERROR_WORKLOADS[-2:], WORKLOADS[0]], ids=("states", "gradients", "timed"))
def test_layers_of_the_rule_keep_their_promises(workload: Workload) -> None:
    """With final states, without, and as they are timed; each here with few tokens and heads."""
    few = replace(workload, make=layer(130, 1, 2, 1, "", 1 / 64, True), devices=("cpu",), peers=())
    rows = [*errors.measure("gated_delta", few, CPU)]
    assert {row.output for row in rows} >= ({"o"} if "forward" in few.directions else {"dq", "dk", "dv", "dg", "dbeta"})
    assert all(row.holds and row.promise.endswith("of its bound") for row in rows), [row for row in rows if row.note]
    timed = run.measure("gated_delta", few, CPU, compile=False, rounds=1)
    assert all(row.status == run.OK for row in timed)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors.environment, "device_name", lambda device: "GPU X")


def test_rows_are_saved_merged_and_shown(tmp_path: Path, gpu: None) -> None:
    rows = [*errors.measure("activation", small(), CPU)]
    other = [replace(row, workload="another") for row in rows]
    errors.save([*rows, *other], "first", CPU, tmp_path)
    path = errors.save([replace(row, error=0.125) for row in rows], "second", CPU, tmp_path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert path.name == "gpu-x.json" and len(content["rows"]) == 12
    assert [run["command"] for run in content["runs"]] == ["first", "second"]
    content["device_type"] = "cuda"
    path.write_text(json.dumps(content), encoding="utf-8")
    page = tmp_path / "errors.md"
    page.write_text("# t\n<!-- errors:activation:begin -->\n<!-- errors:activation:end -->\nend\n", encoding="utf-8")
    assert errors.update_page(page, tmp_path) == ["activation"]
    text = page.read_text(encoding="utf-8")
    assert "| swiglu 12×32 | forward | y | 1.2e-01 | " in text and text.endswith("end\n") and "`second`" in text
    assert "| workload | direction | output | adjoint | of its promise | torch eager |" in text


def test_the_page_shows_what_was_saved(tmp_path: Path) -> None:
    """As `adjoint bench --errors --readme` writes it; all of it keeps its promises."""
    folder, page = ROOT / "benchmarks" / "errors", ROOT / "docs" / "errors.md"
    for family in FAMILIES:
        assert f"<!-- errors:{family}:begin -->" in page.read_text(encoding="utf-8"), family
    saved = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*.json")]
    if not saved:
        assert "| workload |" not in page.read_text(encoding="utf-8")
        return
    copy = tmp_path / "errors.md"
    copy.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    errors.update_page(copy, folder)
    assert copy.read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
    assert all(row["holds"] for content in saved for row in content["rows"])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    call = ["bench", "silu", "--errors", "--device", "cpu", "--rows", "1024×4096, float32", "--save"]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert "| silu 1024×4096, float32, first 256 | backward | dx |" in done.output
    assert list((tmp_path / "benchmarks" / "errors").glob("*.json"))
    monkeypatch.setattr(errors._Sum, "verdict", lambda self: ("200% of its bound", False))
    done = CliRunner().invoke(app, call[:-1])
    assert done.exit_code == 1 and "FAILED silu 1024×4096, float32, first 256, forward, y: 200%" in done.output


def test_errors_of_a_loss_are_compared_whole() -> None:
    """A mean over all tokens is no sum of pieces."""
    (workload,) = (x for _, x in errors.workloads_of((), ("cross_entropy 256×8000",)))
    rows = [row for row in errors.measure("loss", workload, torch.device("cpu")) if row.contender == run.OURS]
    assert {row.output for row in rows} == {"loss", "dlogits"}
    assert all(row.error is not None and row.holds for row in rows)


def test_the_rows_of_a_sparse_gradient_are_compared() -> None:
    """On a table of which most rows do not occur: what is compared are the values of those that do."""
    (workload,) = (x for _, x in errors.workloads_of((), ("embedding[sparse] 100000×",)))
    few = replace(workload, make=partial(device_lookup, "uniform", 1000, 16, 300), devices=("cpu",))
    rows = rows_of(few)
    assert set(rows) == {(who, "dweight") for who in (run.OURS, "torch, coalesced")}
    assert all(row.error is not None and row.error < 2.0**-8 and row.holds for row in rows.values())
    assert rows[run.OURS, "dweight"].promise.endswith("of its bound")
    (ours, *_) = run.measure("embedding", few, CPU, rounds=1)
    assert ours.status == run.OK, ours.note


def test_inputs_that_cannot_be_made_are_a_row_and_fail() -> None:
    def fail(*arguments: object) -> Inputs:
        raise RuntimeError("no memory")

    (row,) = errors.measure("activation", small(make=fail), CPU)
    assert not row.holds and row.contender == run.OURS and row.note == "RuntimeError: no memory"
    timed = [*run.measure("activation", small(make=fail), CPU)]
    assert [(row.direction, row.status, row.note) for row in timed] == [
        (direction, run.ERROR, "RuntimeError: no memory") for direction in ("forward", "backward")
    ]
    assert not any(row.ok for row in timed)


def test_a_comparison_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (workload,) = (x for _, x in errors.workloads_of((), ("cross_entropy 256×8000",)))

    def fail(*arguments: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(errors, "_compared", fail)
    rows = [row for row in errors.measure("loss", workload, torch.device("cpu")) if row.contender == run.OURS]
    assert rows and all(not row.holds and "no memory" in row.note for row in rows)


def test_every_name_by_which_an_op_is_timed_measures_its_errors() -> None:
    every = [workload for family in FAMILIES for module in cases(family) for workload in module.WORKLOADS]
    names = {name for workload in every for name in run.names_of(workload)}
    assert "gated_delta.recompute_w_u" in names
    assert not [name for name in sorted(names) if not errors.workloads_of([name])]


def test_workloads_for_other_devices_and_unknown_peers_are_told() -> None:
    told = CliRunner().invoke(app, ["bench", "moe.experts", "--errors", "--rows", "16384", "--device", "cpu"])
    assert told.exit_code == 0 and "workloads, meant for cuda." in told.stderr + told.stdout
    refused = CliRunner().invoke(app, ["bench", "silu", "--errors", "--peer", "Nobody", "--device", "cpu"])
    assert refused.exit_code != 0 and "unknown peer Nobody" in refused.stderr + refused.stdout
