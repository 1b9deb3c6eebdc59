"""`adjoint bench`: a wrong result gets no time, and what is saved and shown is what was measured."""

import inspect
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor
from typer.testing import CliRunner

from adjoint import ops
from adjoint.bench import contenders, peers
from adjoint.bench.contenders import Contender, Task, kept_bytes
from adjoint.bench.measurement import check as checking
from adjoint.bench.measurement import overhead, run, timing
from adjoint.bench.omissions import omissions
from adjoint.bench.report import chart, results, tables
from adjoint.cli import app
from adjoint.contract import batching
from adjoint.contract.cases import Workload
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.ops.activation.swiglu import cases

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "REPEAT_MILLISECONDS", 0)
    monkeypatch.delenv("COLUMNS", raising=False)


def small(**changes: Any) -> Workload:
    """A workload of the real family, small enough for a test."""
    workload = next(w for w in cases.WORKLOADS if w.subject.name == "swiglu")
    make = lambda dtype, device, generator: tuple(  # noqa: E731
        torch.randn(12, 32, generator=generator).to(dtype) for _ in workload.subject.inputs
    )
    made = replace(workload, name="swiglu 12×32", make=make, forward_bytes=3 * 768, backward_bytes=5 * 768, peers=())
    return replace(made, **changes)


def rows_of(workload: Workload, **options: Any) -> dict[tuple[str, str], run.Row]:
    found = run.measure("activation", workload, CPU, **({"compile": False, "rounds": 1} | options))
    return {(row.contender, row.direction): row for row in found}


def test_right_results_have_times_and_ratios() -> None:
    rows = rows_of(small(), rounds=2)
    assert {row.status for row in rows.values()} == {run.OK}
    for (contender, _), row in rows.items():
        assert row.microseconds and row.microseconds > 0
        assert row.error is not None and 0 < row.error <= checking.OTHERS_LIMIT
        assert bool(row.guarantee) == (contender == run.OURS)
        assert row.gigabytes_per_second == pytest.approx(row.bytes / row.microseconds / 1e3)
    own, eager = rows[run.OURS, "backward"], rows[run.EAGER, "backward"]
    assert own.ratio == 1.0 and eager.ratio == pytest.approx(eager.microseconds / own.microseconds)  # type: ignore[operator]


def test_compiled_takes_part_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a backend that generates no code: a C++ compiler would take longer than the rest of this file."""
    options: list[dict[str, Any]] = []
    compile = torch.compile

    def without_code(function: Callable[..., Any], **given: Any) -> Callable[..., Any]:
        options.append(given)
        return compile(function, backend="aot_eager", **given)

    monkeypatch.setattr(torch, "compile", without_code)
    rows = rows_of(small(), compile=True)
    for direction in (contenders.FORWARD, contenders.BACKWARD):
        assert rows[run.COMPILED, direction].status == run.OK, rows[run.COMPILED, direction]
    assert options == [{"dynamic": False, "fullgraph": True}] * 2


def test_a_step_is_timed_whole_and_its_operations_are_counted() -> None:
    rows = rows_of(small(directions=(contenders.STEP,), operations=1000))
    assert {row.status for row in rows.values()} == {run.OK}
    for contender in (run.OURS, run.EAGER):
        row = rows[contender, contenders.STEP]
        assert row.operations == 3000 and row.bytes == 8 * 768 and row.peak_bytes is None
        assert row.microseconds and row.teraflops == pytest.approx(3000 / row.microseconds / 1e6)
    assert rows[run.OURS, contenders.STEP].guarantee


def test_a_wrong_gradient_fails_a_step() -> None:
    def wrong(gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up.detach() + up * 0

    row = rows_of(small(directions=(contenders.STEP,), baseline=wrong))[run.EAGER, contenders.STEP]
    assert row.status == run.FAILED and row.microseconds is None


WRONG: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sixty percent off": lambda gate, up: F.silu(gate) * up * 1.6,
    "not a number": lambda gate, up: F.silu(gate) * up / torch.zeros_like(up) * 0,
    "zeros": lambda gate, up: F.silu(gate) * up * 0,
    "another shape": lambda gate, up: (F.silu(gate) * up)[:, :31],
    "a row too many": lambda gate, up: torch.cat([F.silu(gate) * up, up[-1:]]),
}

INACCURATE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "three percent off": lambda gate, up: F.silu(gate) * up * 1.03,
    "last row missing": lambda gate, up: torch.cat([(F.silu(gate) * up)[:-1], up[-1:] * 0]),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_baseline_gets_no_time(name: str) -> None:
    rows = rows_of(small(baseline=WRONG[name]))
    wrong = rows[run.EAGER, "forward"]
    assert wrong.status == run.FAILED and wrong.microseconds is None and wrong.note
    assert not wrong.ok and rows[run.OURS, "forward"].status == run.OK


@pytest.mark.parametrize("name", INACCURATE)
def test_an_inaccurate_baseline_is_timed_and_shown_as_such(name: str) -> None:
    rows = rows_of(small(baseline=INACCURATE[name]))
    found = rows[run.EAGER, "forward"]
    assert found.status == run.INACCURATE and found.microseconds and found.ratio and "relative error" in found.note
    assert found.error is not None and 2e-2 < found.error < 0.5
    assert all(row.ok for row in rows.values()), "what promises nothing breaks no promise"
    (cell,) = [cell for cell in tables._cells(found, 10.0) if "INACCURATE" in cell]
    assert "limit 0.02" in cell


def test_ours_is_held_to_its_guarantee_not_to_the_limit_of_others() -> None:
    subject = small().subject
    wrong = replace(subject, reference=lambda gate, up: (subject.reference(gate, up)[0] * 1.01,))
    rows = rows_of(small(subject=wrong))
    assert rows[run.OURS, "forward"].status == run.FAILED and "of the bound" in rows[run.OURS, "forward"].note
    assert rows[run.EAGER, "forward"].status == run.OK, "1% is inside the limit of those who promise nothing"
    assert rows[run.EAGER, "forward"].ratio is None, "there is nothing of ours to compare with"


def test_a_result_that_goes_wrong_while_timed_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10**9))

    def drifting(task: Task) -> Contender:
        good = contenders.eager(task)
        return Contender(lambda: good.run() if next(calls) < 2 else tuple(t * 2 for t in good.run()))

    monkeypatch.setattr(run, "eager", drifting)
    assert rows_of(small())[run.EAGER, "forward"].status == run.FAILED


def test_memory_left_unwritten_fails() -> None:
    workload = small()
    inputs = workload.make(torch.bfloat16, CPU, torch.Generator().manual_seed(0))
    task = Task(workload, "forward", inputs, (torch.ones_like(inputs[0]),))
    contender = contenders.ours(task)
    contender.run()
    assert not checking.check(task, contender.outputs, contender.guarantee).failure
    checking.poison(contender)
    assert checking.check(task, contender.outputs, contender.guarantee).failure


def test_large_tensors_are_checked_whole_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "PIECE", 100)
    workload = small()
    inputs = workload.make(torch.bfloat16, CPU, torch.Generator().manual_seed(0))
    task = Task(workload, "forward", inputs, ())
    (output,) = contenders.eager(task).run()
    assert len(list(workload.subject.cut(task.arguments, (output,)))) == 4
    assert checking.check(task, (output,), None).error <= checking.OTHERS_LIMIT
    output[7, 5] = float("nan")
    verdict = checking.check(task, (output,), None)
    assert verdict.failure and math.isnan(verdict.error)


def test_peers_that_are_absent_or_raise_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(task: Task) -> Contender:
        raise contenders.NotInstalled("pip install it")

    def broken(task: Task) -> Contender:
        raise RuntimeError("no driver\nand much more")

    monkeypatch.setitem(peers.PEERS, "absent", peers.Peer("Absent", "absent", absent))
    monkeypatch.setitem(peers.PEERS, "broken", peers.Peer("Broken", "broken", broken))
    rows = rows_of(small(peers=("absent", "broken")))
    assert rows["Absent", "forward"].status == run.ABSENT
    assert rows["Broken", "forward"].note == "RuntimeError: no driver"
    assert all(row.ok for row in rows.values())


@pytest.mark.parametrize("returns", ["everything", "the output alone"])
def test_liger_overwrites_its_inputs_and_is_given_fresh_ones(returns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(a: Tensor, b: Tensor) -> Any:
        c = F.silu(a) * b
        return (a, b, c) if returns == "everything" else c

    def backward(a: Tensor, b: Tensor, dc: Tensor) -> Any:
        da, db = cases.SWIGLU.reference_backward(dc.double(), a.double(), b.double())
        a.copy_(da)
        b.copy_(db)
        return (a, b) if returns == "everything" else None

    module = SimpleNamespace(swiglu_forward=forward, swiglu_backward=backward)
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.swiglu", module)
    monkeypatch.setattr(peers, "NEED_GPU", frozenset())  # these kernels do not
    rows = rows_of(small(peers=("liger_swiglu",)))
    assert rows["Liger", "forward"].status == rows["Liger", "backward"].status == run.OK


def test_gpu_times_are_those_of_do_bench_with_inputs_restored_and_the_host_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    testing = pytest.importorskip("triton.testing")
    signature, done = inspect.signature(testing.do_bench), []

    def do_bench(*arguments: Any, **keywords: Any) -> list[float]:
        given = signature.bind(*arguments, **keywords).arguments
        assert given["return_mode"] == "all"
        for tensor in given["grad_to_none"]:
            tensor.grad = None
        given["fn"]()
        return [0.5, 0.7]

    monkeypatch.setattr(testing, "do_bench", do_bench)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("waited"))
    measured = ["waited", "run", "waited"]  # how long the host takes to start a call
    assert timing.time_gpu(lambda: done.append("run"), lambda: done.append("restored")) == [0.5, 0.7]
    assert done == ["run", "restored", *measured, "restored", "idle", "run"]
    done.clear()
    assert timing.time_gpu(lambda: done.append("run")) == [0.5, 0.7]
    assert done == ["run", *measured, "idle", "run"]


def on_a_pretended_gpu(
    monkeypatch: pytest.MonkeyPatch, record: Callable[..., Any], check: Callable[..., checking.Verdict]
) -> Callable[..., run.Row]:
    """What times a contender of a recorded workload, three times, each of one millisecond."""
    monkeypatch.setattr(run, "recorded", record)
    monkeypatch.setattr(run, "synchronize", lambda device: None)
    monkeypatch.setattr(run, "times_on", lambda device, function, restore: [function() or 1.0])
    monkeypatch.setattr(run, "check", check)

    def timed(contender: Contender, device: str = "cuda") -> run.Row:
        workload = SimpleNamespace(recorded=True, kept=False)
        task = SimpleNamespace(workload=workload, device=torch.device(device), direction="")
        blank = run.Row("f", "w", "forward", "", run.OK, 1)
        (row,) = run._with_ratios([run._Entry(blank, cast(Any, task), lambda task: contender)], 3)
        return row

    return timed


def test_a_recorded_workload_is_timed_by_replays_and_one_that_waits_by_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def record(function: Any) -> Any:
        function()
        if "recorded" in done:
            raise RuntimeError("called a synchronizing operation\nand more")
        done.append("recorded")
        return lambda: done.append("replayed")

    contender = Contender(lambda: (torch.ones(1),))
    timed = on_a_pretended_gpu(monkeypatch, record, lambda *arguments: checking.Verdict(error=0.0))
    first, second = timed(contender), timed(contender)
    assert first.recorded and not first.note and first.microseconds == 1000
    assert done == ["recorded", *["replayed"] * 3]
    assert not second.recorded and second.note == "no graph: RuntimeError: called a synchronizing operation"
    assert second.status == run.OK and second.microseconds == 1000
    table = "".join(tables._cells(second, 1.0))
    assert "no graph" in table
    assert not timed(contender, "cpu").recorded


@pytest.mark.parametrize("replays", [True, False])
def test_a_graph_that_leaves_out_what_a_call_does_has_no_time(monkeypatch: pytest.MonkeyPatch, replays: bool) -> None:
    memory = torch.zeros(2)

    def call() -> tuple[Tensor, ...]:
        return (memory.fill_(3),)

    def found(task: Any, outputs: tuple[Tensor, ...], *rest: Any) -> checking.Verdict:
        return checking.Verdict(error=0.0, failure="" if bool((outputs[0] == 3).all()) else "nothing was written")

    def record(function: Any) -> Any:
        function()
        return function if replays else lambda: None

    row = on_a_pretended_gpu(monkeypatch, record, found)(Contender(call, outputs=(memory,)))
    assert (row.status, row.note) == ((run.OK, "") if replays else (run.FAILED, "nothing was written"))
    assert (row.microseconds is not None) == replays


@pytest.mark.skipif(not torch.cuda.is_available(), reason="records CUDA graphs")
def test_a_recorded_call_is_replayed_and_a_call_that_waits_refused() -> None:
    device = torch.device("cuda")
    source, target = torch.arange(4.0, device=device, requires_grad=True), torch.zeros(4, device=device)
    with timing.own_stream(device):
        out = source * source
        replay = timing.recorded(
            lambda: target.copy_(torch.autograd.grad(out, source, torch.ones_like(out), retain_graph=True)[0])
        )
        target.zero_()
        replay()
        with pytest.raises(RuntimeError, match="synchronizing"):
            timing.recorded(lambda: target.tolist())
    assert target.tolist() == [0, 2, 4, 6]
    torch.randn(3, device=device)  # nothing is left recording


def test_the_readme_says_which_times_are_of_graphs(tmp_path: Path, gpu: None) -> None:
    rows = tuple(
        run.Row("activation", "w", "forward", name, run.OK, 100, time, time / 2, 1e-3, recorded=name == run.OURS)
        for name, time in ((run.OURS, 2.0), ("Liger", 3.0))
    )
    table = results.markdown(results.load(results.save(run.Result(CPU, 10.0, rows), "c", tmp_path)), "activation")
    assert "| **2.0** | 3.0 (1.50×), no graph |" in table and "CUDA graphs, replayed" in table


def test_workloads_are_cut_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_ELEMENTS", 4 * 32)
    row = rows_of(small())[run.OURS, "forward"]
    assert row.workload == "swiglu 12×32, first 4" and row.bytes == 768


def test_selection() -> None:
    assert {w.subject.name for _, w in run.select(["swiglu"])} >= {"swiglu", "swiglu[gate_up]"}
    assert {w.subject.name for _, w in run.select(["silu"])} == {"silu"}
    every = [workload for module in ops.cases() for workload in module.WORKLOADS]
    assert [workload for _, workload in run.select([])] == every
    with pytest.raises(ArgumentError, match=r"unknown op relu.*silu"):
        run.select(["relu"])
    chosen = [workload.name for _, workload in run.select(["gated_delta_rule"], ["8192 tokens", "2 and 8"])]
    assert chosen == [
        "gated_delta_rule 8192 tokens, 16 and 32 heads",
        "gated_delta_rule 32768 tokens, 2 and 8 heads",
    ]
    with pytest.raises(ArgumentError, match=r"no workload has '77 tokens' in its name; there are gated_delta_rule"):
        run.select(["gated_delta_rule"], ["8192 tokens", "77 tokens"])


def test_peers_can_be_chosen(only: Callable[[Workload], None]) -> None:
    workload = small(peers=("liger_swiglu", "fla_gated_delta_rule"))

    def labels(peers: list[str] | None) -> set[str]:
        rows = run.measure("activation", workload, torch.device("cpu"), compile=False, peers=peers, rounds=1)
        return {row.contender for row in rows}

    assert labels(None) - labels([]) == {"Liger", "FLA"} and labels(["FLA"]) - labels([]) == {"FLA"}
    only(workload)
    done = bench("--peer", "Ligre")
    assert done.exit_code == 2 and "unknown peer Ligre; peers are FLA, FlashInfer, FlashQLA, Liger" in done.stderr


# ------------------------------------------------------------------------------------ saved results


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(results.environment, "device_name", lambda device: "NVIDIA H200")
    yield


def row(contender: str, microseconds: float | None, ratio: float | None = None, **changes: Any) -> run.Row:
    made = run.Row("activation", "swiglu 8×8", "forward", contender, run.OK, 10**6, microseconds, ratio, 1.7e-3)
    return replace(made, **changes)


def measured(*rows: run.Row) -> run.Result:
    return run.Result(torch.device("cuda"), 4000.0, rows)


def test_saving_merges_and_keeps_the_conditions_of_each_run(tmp_path: Path, gpu: None) -> None:
    path = results.save(measured(row(run.OURS, 100.0, 1.0), row("Liger", 90.0, 0.9)), "adjoint bench --save", tmp_path)
    assert path == tmp_path / "nvidia-h200.json"
    results.save(measured(row(run.OURS, 80.0, 1.0)), "adjoint bench swiglu --save", tmp_path)
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

    results.save(measured(row(run.OURS, 70.0, 1.0), row("Liger", 75.0, 1.07)), "again", tmp_path)
    assert [one["command"] for one in json.loads(path.read_text())["runs"]] == ["again"]


def test_a_failed_row_is_saved_without_numbers(tmp_path: Path, gpu: None) -> None:
    path = results.save(measured(row("Liger", None, status=run.FAILED, error=math.nan)), "c", tmp_path)
    (saved,) = json.loads(path.read_text())["rows"]
    assert saved["status"] == "failed" and saved["microseconds"] is saved["error"] is saved["gb_per_s"] is None


def test_a_file_that_is_not_results_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ArgumentError, match=r"x\.json"):
        results.saved(tmp_path)


def test_readme_shows_rows_where_a_peer_is_ahead(tmp_path: Path, gpu: None) -> None:
    rows = (row(run.EAGER, 150.0, 1.5), row(run.OURS, 100.0, 1.0), row("Liger", 90.0, 0.9))
    rough = row("Rough", 50.0, 0.5, status=run.INACCURATE, error=0.104)
    results.save(measured(*rows, rough, row("Broken", None, status=run.ERROR)), "adjoint bench --save", tmp_path)
    readme = tmp_path / "README.md"
    readme.write_text("# t\n<!-- bench:activation:begin -->\nearlier text\n<!-- bench:activation:end -->\ntail\n")
    assert results.update_readme(readme, tmp_path) == ["activation"]
    once = readme.read_text()
    assert "| workload | direction | adjoint | torch eager | Liger | Rough | Broken | GB/s | of copy |" in once
    cells = "100.0 | 150.0 (1.50×) | **90.0** (0.90×) | 50.0 (0.50×), error 0.1 | error"
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
    results.save(measured(row(run.OURS, 100.0, 1.0)), "c", tmp_path)
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
            chart.plot(measured(row(run.OURS, 1.0, 1.0)), "GPU", file)
    else:
        chart.plot(measured(row(run.OURS, 1.0, 1.0), row(run.EAGER, None)), "GPU", file)
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


# -------------------------------------------------------------------------------------- the command


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> Callable[[Workload], None]:
    """Makes a workload the only one, and the ceiling quick."""
    monkeypatch.setattr(run, "copy_ceiling", lambda device: 10.0)
    for module in ops.cases():
        if module is not cases:
            monkeypatch.setattr(module, "WORKLOADS", ())
    return lambda workload: monkeypatch.setattr(cases, "WORKLOADS", (workload,))


def bench(*options: str) -> Any:
    return CliRunner().invoke(app, ["bench", "--device", "cpu", "--no-compile", *options])


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
    assert done.exit_code == 2 and "unknown op relu" in done.stderr and "silu" in done.stderr
    done = CliRunner().invoke(app, ["bench", "--device", "cuda:7"])
    assert done.exit_code == 2 and "cuda:7" in done.stderr


def test_readme_alone_times_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpu: None) -> None:
    monkeypatch.setattr(run, "run", None)
    monkeypatch.chdir(tmp_path)
    results.save(measured(row(run.OURS, 100.0, 1.0)), "c", tmp_path / "kept")
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


def test_overhead_verdict() -> None:
    cost = overhead.Overhead("silu", "float32", "cpu", "eager", 20.0, 9.0, 2.0, 9.0)
    assert cost.host == 11.0 and cost.inside and not replace(cost, whole=22.0).inside
    assert tables.overheads([cost]).row_count == 1


def test_copy_ceiling_counts_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "time_on", lambda device, function: 1.0)
    assert timing.copy_ceiling(CPU) == pytest.approx(2 * 2 * 2**25 / 1e6)


def test_what_a_forward_keeps_is_not_its_inputs() -> None:
    x, y = torch.ones(8), torch.ones(8)
    assert kept_bytes(torch.mul, (x, y)) == 0
    assert kept_bytes(lambda x, y: (x.exp() * 2, y), (x, y)) == 8 * 4
