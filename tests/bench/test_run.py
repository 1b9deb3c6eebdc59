"""A wrong result gets no time, and what is shown is what was measured."""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint import ops
from adjoint.bench import contenders, peers
from adjoint.bench.contenders import Contender, Task, kept_bytes
from adjoint.bench.measurement import check as checking
from adjoint.bench.measurement import overhead, run, timing
from adjoint.bench.report import tables
from adjoint.contract import batching
from adjoint.core.errors import ArgumentError
from tests.bench.small import CPU, INACCURATE, rows_of, small


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


def test_workloads_are_cut_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_ELEMENTS", 4 * 32)
    row = rows_of(small())[run.OURS, "forward"]
    assert row.workload == "swiglu 12×32, first 4" and row.bytes == 768


def test_selection() -> None:
    assert {w.subject.name for _, w in run.select(["swiglu"])} >= {"swiglu", "swiglu[gate_up]"}
    assert {w.subject.name for _, w in run.select(["silu"])} == {"silu"}
    every = [workload for module in ops.cases() for workload in module.WORKLOADS]
    assert [workload for _, workload in run.select([])] == every
    with pytest.raises(ArgumentError, match=r"unknown op 'relu'.*silu"):
        run.select(["relu"])
    chosen = [workload.name for _, workload in run.select(["gated_delta_rule"], ["8192 tokens", "2 and 8"])]
    assert chosen == [
        "gated_delta_rule 8192 tokens, 16 and 32 heads",
        "gated_delta_rule 32768 tokens, 2 and 8 heads",
    ]
    with pytest.raises(ArgumentError, match=r"no workload has '77 tokens' in its name; there are gated_delta_rule"):
        run.select(["gated_delta_rule"], ["8192 tokens", "77 tokens"])


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
