"""Saved results, the tables and charts made of them."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from rich.table import Table

from adjoint.bench import contenders, peers
from adjoint.bench.measurement import run
from adjoint.bench.report import chart, results, tables
from adjoint.core.errors import ArgumentError, Unsupported
from tests.bench.small import CPU, result_of, row


def test_saving_merges_and_keeps_the_conditions_of_each_run(tmp_path: Path, gpu: None) -> None:
    path = results.save(result_of(row(run.OURS, 100.0, 1.0), row("Liger", 90.0, 0.9)), "adjoint bench --save", tmp_path)
    assert path == tmp_path / "nvidia-h200.json"
    results.save(result_of(row(run.OURS, 80.0, 1.0)), "adjoint bench swiglu --save", tmp_path)
    content = json.loads(path.read_text())
    assert content["schema"] == results.SCHEMA and content["device"] == "NVIDIA H200" and content["dtype"] == "bfloat16"
    by_name = {r["contender"]: r for r in content["rows"]}
    assert by_name[run.OURS]["microseconds"] == 80.0 and by_name["Liger"]["microseconds"] == 90.0
    assert by_name[run.OURS]["gb_per_s"] == 12.5 and by_name[run.OURS]["share_of_copy_ceiling"] == 0.0031
    assert content["runs"][by_name["Liger"]["run"]]["command"] == "adjoint bench --save"
    assert content["runs"][by_name[run.OURS]["run"]]["command"] == "adjoint bench swiglu --save"
    for one in content["runs"]:
        assert set(one) == {"date", "command", "commit", "source", "versions", "copy_ceiling_gb_per_s", "l2_bytes"}
        assert {"python", "torch", "triton", "driver", "liger-kernel"} <= set(one["versions"])

    results.save(result_of(row(run.OURS, 70.0, 1.0), row("Liger", 75.0, 1.07)), "again", tmp_path)
    assert [one["command"] for one in json.loads(path.read_text())["runs"]] == ["again"]


def test_a_failed_row_is_saved_without_numbers(tmp_path: Path, gpu: None) -> None:
    path = results.save(result_of(row("Liger", None, status=run.FAILED, error=math.nan)), "c", tmp_path)
    (saved,) = json.loads(path.read_text())["rows"]
    assert saved["status"] == "failed" and saved["microseconds"] is saved["error"] is saved["gb_per_s"] is None


def test_a_file_that_is_not_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ArgumentError, match=r"x\.json"):
        results.saved(tmp_path)


def test_readme_shows_rows_where_a_peer_is_ahead(tmp_path: Path, gpu: None) -> None:
    rows = (row(run.EAGER, 150.0, 1.5), row(run.OURS, 100.0, 1.0), row("Liger", 88.0, 0.88))
    rough = row("Rough", 50.0, 0.5, status=run.INACCURATE, error=0.104)
    results.save(result_of(*rows, rough, row("Broken", None, status=run.ERROR)), "adjoint bench --save", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("# t\n<!-- bench:activation:begin -->\nearlier text\n<!-- bench:activation:end -->\ntail\n")
    assert results.update_readme(readme, tmp_path) == ["activation"]
    once = readme.read_text()
    assert "| workload | direction | adjoint | torch eager | Liger | Rough | Broken | GB/s | of copy |" in once
    cells = "100.0 | 150.0 (1.50×) | **88.0** (0.88×) | 50.0 (0.50×), error 0.1 | error"
    assert f"| swiglu 8×8 | forward | {cells} | 10 | 0.2% |" in once
    assert "past 2%, and is never the bold one" in once
    assert "NVIDIA H200" in once and "`adjoint bench --save`" in once and f"torch {torch.__version__}" in once
    assert (
        once.startswith("# t\n")
        and once.endswith("<!-- bench:activation:end -->\ntail\n")
        and "earlier text" not in once
    )
    results.update_readme(readme, tmp_path)
    assert readme.read_text() == once


def test_readme_shows_operations_and_memory_where_they_are_counted(tmp_path: Path, gpu: None) -> None:
    row = run.Row(
        "activation",
        "w",
        contenders.STEP,
        run.OURS,
        run.OK,
        100,
        2.0,
        1.0,
        1e-3,
        operations=10**9,
        peak_bytes=3 * 2**30,
    )
    result = run.Result(CPU, 10.0, (row,), 700.0)
    content = results.load(results.save(result, "command", tmp_path))
    table = results.markdown(content, "activation")
    assert (
        "| GB/s | of copy | TF/s | of matmul |" in table and ", 3.00 GiB" in table and "GiB: the most memory" in table
    )
    (printed,) = tables.times(result, "machine")
    assert isinstance(printed, Table)
    assert [column.header for column in printed.columns][-4:-1] == ["TF/s", "GiB", "× ours"]


def test_readme_without_markers_or_results_is_refused(tmp_path: Path, gpu: None) -> None:
    readme = tmp_path / "README.md"
    with pytest.raises(ArgumentError, match="no results of a GPU"):
        results.update_readme(readme, tmp_path)
    results.save(result_of(row(run.OURS, 100.0, 1.0)), "c", tmp_path)
    with pytest.raises(ArgumentError, match="cannot be read"):
        results.update_readme(readme, tmp_path)
    readme.write_text("nothing")
    with pytest.raises(ArgumentError, match="bench:activation:begin"):
        results.update_readme(readme, tmp_path)


def test_plot_says_what_it_needs(tmp_path: Path) -> None:
    file = tmp_path / "times.svg"
    try:
        import matplotlib  # type: ignore[import-not-found] # noqa: F401
    except ImportError:
        with pytest.raises(Unsupported, match="matplotlib"):
            chart.plot(result_of(row(run.OURS, 1.0, 1.0)), "GPU", file)
    else:
        chart.plot(result_of(row(run.OURS, 1.0, 1.0), row(run.EAGER, None)), "GPU", file)
        assert file.stat().st_size > 0
        for wrong, word in ((tmp_path / "times.txt", "svg"), (tmp_path / "nowhere" / "times.svg", "no folder")):
            with pytest.raises(Unsupported, match=word):
                chart.require_drawing(wrong)


def test_every_contender_has_a_colour_of_its_own() -> None:
    labels = sorted({peer.label for peer in peers.PEERS.values()})
    contenders = [run.OURS, run.EAGER, run.COMPILED, run.DETERMINISTIC, *labels, "another way", "a third way"]

    def parts(colour: str) -> list[int]:
        return [int(colour[place : place + 2], 16) for place in (1, 3, 5)]

    chosen = chart.colours(contenders)
    assert list(chosen) == contenders
    for one, other in itertools.combinations(chosen.values(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(parts(one), parts(other), strict=True)) ** 0.5
        assert distance > 40, (one, other)
    for label in labels:
        assert chart.colours([label, run.OURS]) == {label: chosen[label], run.OURS: chosen[run.OURS]}


def test_the_readme_says_which_times_are_of_graphs(tmp_path: Path, gpu: None) -> None:
    rows = tuple(
        run.Row("activation", "w", "forward", name, run.OK, 100, time, time / 2, 1e-3, recorded=name == run.OURS)
        for name, time in ((run.OURS, 2.0), ("Liger", 3.0))
    )
    table = results.markdown(results.load(results.save(run.Result(CPU, 10.0, rows), "c", tmp_path)), "activation")
    assert "| **2.0** | 3.0 (1.50×), no graph |" in table and "CUDA graphs, replayed" in table
