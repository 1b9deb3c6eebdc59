"""`adjoint bench`: what it prints, saves, leaves out and refuses."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from adjoint.bench import peers
from adjoint.bench.measurement import overhead, run
from adjoint.bench.omissions import omissions
from adjoint.bench.report import results
from adjoint.cli import app
from adjoint.contract.cases import Workload
from adjoint.core.errors import Unsupported
from tests.bench.small import INACCURATE, bench, result_of, row, small


def test_peers_can_be_chosen(only: Callable[[Workload], None]) -> None:
    workload = small(peers=("liger_swiglu", "fla_gated_delta_rule"))

    def labels(peers: list[str] | None) -> set[str]:
        rows = run.measure("activation", workload, torch.device("cpu"), compile=False, peers=peers, rounds=1)
        return {row.contender for row in rows}

    assert labels(None) - labels([]) == {"Liger", "FLA"} and labels(["FLA"]) - labels([]) == {"FLA"}
    only(workload)
    done = bench("--peer", "Ligre")
    assert done.exit_code == 2 and "unknown peer Ligre; peers are FLA, FlashInfer, FlashQLA, Liger" in done.stderr


def test_the_command_prints_and_saves(only: Callable[[Workload], None], tmp_path: Path) -> None:
    only(small(peers=("liger_swiglu",)))
    done = bench("swiglu", "--save", "--results", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "CPU" in done.output and "torch eager" in done.output and "Liger" in done.output
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert content["device_type"] == "cpu"
    assert content["runs"][0]["command"] == "adjoint bench swiglu --no-compile --save"
    assert [r["contender"] for r in content["rows"][:2]] == [run.OURS, run.EAGER]


def test_the_command_says_at_once_why_ours_has_no_time(
    only: Callable[[Workload], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the line of the workload, however narrow the terminal is: a table cuts it off."""
    text = "CUDA out of memory. Tried to allocate 9.27 GiB. GPU 0 has a total capacity of 139.80 GiB"

    def fail(*arguments: Any) -> None:
        raise RuntimeError(text)

    monkeypatch.setattr(run, "check", fail)
    monkeypatch.setenv("COLUMNS", "60")
    only(small(directions=("forward",)))
    done = bench()
    assert done.exit_code == 1
    assert f"1/1 swiglu 12×32: ours forward error: RuntimeError: {text}" in done.output.splitlines()


def test_the_command_says_first_what_it_leaves_out(
    only: Callable[[Workload], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    absent = peers.Peer("Absent", "a-distribution-that-is-not-there", lambda task: pytest.fail("it is not there"))
    monkeypatch.setitem(peers.PEERS, "absent", absent)
    only(small(peers=("liger_swiglu", "fla_gated_delta_rule", "absent")))

    def start(*arguments: Any, **options: Any) -> None:
        raise Unsupported("the run starts")

    monkeypatch.setattr(run, "run", start)
    done = bench("--peer", "Liger", "--peer", "Absent")
    assert done.stderr.strip() == "the run starts"
    assert done.stdout.splitlines() == [
        "Times are the CPU's, because torch sees no GPU: workloads are cut to small sizes.",
        "Left out: torch.compile, as --no-compile asks.",
        "Left out: FLA, which --peer does not name.",
        "Left out: Liger, whose kernels need a GPU.",
        "Left out: Absent, which is not installed (pip install a-distribution-that-is-not-there).",
    ]
    on_gpu = list(omissions(run.select([]), torch.device("cuda"), compile=True, peers=None))
    assert [text.split(",")[0] for text in on_gpu] == [
        f"Left out: {label}" for label in ("Absent", "FLA", "Liger")
    ] and "pip install flash-linear-attention" in on_gpu[1]
    only(small(devices=("cuda",)))
    assert "Left out: 1 of 1 workloads, meant for cuda." in bench().stdout


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_run(
    only: Callable[[Workload], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    only(small())
    for name in ("matplotlib", "matplotlib.backend_bases", "matplotlib.figure"):  # whether they were imported or not
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(run, "run", lambda *arguments, **options: pytest.fail("the run has started"))
    done = bench("--plot", str(tmp_path / "times.svg"))
    assert done.exit_code == 2 and "--plot needs matplotlib; pip install matplotlib" in done.stderr


def test_the_command_prints_data_alone(only: Callable[[Workload], None]) -> None:
    only(small(peers=("liger_swiglu",)))
    done = bench("--json")
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    assert data["device_type"] == "cpu" and data["runs"][0]["command"] == "adjoint bench --no-compile"
    by_contender = {row["contender"]: row for row in data["rows"] if row["direction"] == "forward"}
    assert by_contender[run.OURS]["microseconds"] > 0 and by_contender[run.OURS]["sku"].startswith("swiglu/")
    assert by_contender["Liger"]["status"] == run.LEFT_OUT
    assert "Left out: Liger, whose kernels need a GPU." in data["left_out"]
    assert "Left out: Liger" in done.stderr and "1/1 swiglu" in done.stderr


def test_times_fit_a_terminal_of_80_columns(only: Callable[[Workload], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    only(small(peers=("liger_swiglu",)))
    lines = bench().stdout.splitlines()
    assert "swiglu 12×32, forward" in lines and "swiglu 12×32, backward" in lines
    table = lines[lines.index("swiglu 12×32, forward") :]
    assert max(map(len, table)) <= 80
    assert any(
        line.split()[0] == "adjoint" and "of the bound" in line + table[i + 1]
        for i, line in enumerate(table[:-1])
        if line.split()
    )
    assert any("torch eager" in line for line in table) and any("left out" in line for line in table)


def test_the_command_refuses_a_time_for_a_wrong_result(only: Callable[[Workload], None]) -> None:
    only(small(baseline=lambda gate, up: F.silu(up) * gate))
    done = bench()
    assert done.exit_code == 1
    (line,) = [text for text in done.output.splitlines() if "torch eager" in text and "relative error" in text][:1]
    assert "FAILED" in line and "µs" not in line


def test_the_command_shows_an_inaccurate_result_and_succeeds(only: Callable[[Workload], None]) -> None:
    only(small(baseline=INACCURATE["three percent off"]))
    done = bench()
    assert done.exit_code == 0, done.output
    assert "INACCURATE" in done.output


def test_unknown_ops_and_devices_are_refused() -> None:
    done = bench("relu")
    assert done.exit_code == 2 and "unknown op 'relu'" in done.stderr and "silu" in done.stderr
    done = CliRunner().invoke(app, ["bench", "--device", "cuda:7"])
    assert done.exit_code == 2 and "cuda:7" in done.stderr


def test_readme_alone_times_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: None) -> None:
    monkeypatch.setattr(run, "run", None)
    monkeypatch.chdir(tmp_path)
    results.save(result_of(row(run.OURS, 100.0, 1.0)), "c", tmp_path / "kept")
    Path("docs").mkdir()
    page = Path("docs/benchmarks.md")
    page.write_text("<!-- bench:activation:begin --><!-- bench:activation:end -->")
    done = bench("--readme", "--results", "kept")
    assert done.exit_code == 0, done.output
    assert "| swiglu 8×8 | forward | **100.0** |" in page.read_text()


def test_overhead_prints_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    original = overhead.overhead
    monkeypatch.setattr(overhead, "overhead", lambda device: original(device, batches=3))
    done = bench("--overhead")
    assert done.exit_code == 0, done.output
    for word in ("swiglu", "silu", "bfloat16", "float32", "host cost", "≤ 12", "arithmetic"):
        assert word in done.output
    data = json.loads(bench("--overhead", "--json").stdout)
    assert {row["op"] for row in data} == {"swiglu", "silu"}
    assert all(row["host"] == row["whole"] - row["arithmetic"] for row in data)
