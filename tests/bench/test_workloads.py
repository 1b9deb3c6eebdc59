"""What a workload may ask for: a dtype, directions, further contenders; and inputs that are no batch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference, ops
from adjoint.bench import contenders
from adjoint.bench.contenders import Task
from adjoint.bench.measurement import run
from adjoint.bench.report import tables
from adjoint.contract.inputs import Inputs
from tests.bench.small import CPU
from tests.lookup import WORKLOAD


def rows_of(**changes: Any) -> dict[tuple[str, str], run.Row]:
    found = run.measure("lookup", replace(WORKLOAD, **changes), CPU, compile=False, rounds=1)
    return {(row.contender, row.direction): row for row in found}


def index_add(upstream: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    ids, weight, _ = inputs
    return (torch.zeros_like(weight).index_add_(0, ids, upstream[0]),)


def test_integer_shared_and_absent_inputs_are_timed_and_checked() -> None:
    rows = rows_of()
    assert set(rows) == {
        (who, way) for who in (run.OURS, run.EAGER) for way in (contenders.FORWARD, contenders.BACKWARD)
    }
    for row in rows.values():
        assert row.status == run.OK and row.microseconds, row
        # Between the unit roundoffs of bfloat16, 2⁻⁹, and of float32, 2⁻²⁴: far from both.
        assert row.error is not None and row.error < 2.0**-16, "in float32, not in bfloat16"


def test_a_workload_may_time_one_direction() -> None:
    assert {direction for _, direction in rows_of(directions=("backward",))} == {"backward"}


def test_a_workload_may_leave_torch_compile_out() -> None:
    left_out = replace(WORKLOAD, compile=False, directions=("forward",))
    assert [row.contender for row in run.measure("lookup", left_out, CPU, rounds=1)] == [run.OURS, run.EAGER]


def test_further_contenders_compute_the_backward() -> None:
    rows = rows_of(deterministic=True, others={"index_add_": index_add})
    assert {who for who, way in rows if way == "forward"} == {run.OURS, run.EAGER}
    assert {who for who, way in rows if way == "backward"} == {run.OURS, run.EAGER, run.DETERMINISTIC, "index_add_"}
    assert rows[run.DETERMINISTIC, "backward"].status == rows["index_add_", "backward"].status == run.OK


def test_a_further_contender_that_is_wrong_fails() -> None:
    rows = rows_of(others={"zeros": lambda upstream, inputs: (torch.zeros_like(inputs[1]),)})
    assert rows["zeros", "backward"].status == run.FAILED and not rows["zeros", "backward"].ok


@pytest.mark.parametrize("before", [(False, False), (True, False), (True, True)])
def test_the_deterministic_mode_is_on_while_it_runs_and_put_back(before: tuple[bool, bool]) -> None:
    seen: list[bool] = []

    class Watching(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:  # type: ignore[override]
            return weight * 1

        @staticmethod
        def backward(ctx: Any, upstream: Tensor) -> Tensor:  # type: ignore[override]
            seen.append(torch.are_deterministic_algorithms_enabled())
            return upstream

    workload = replace(WORKLOAD, baseline=lambda ids, weight, scale: Watching.apply(weight)[ids])
    inputs = workload.make(torch.float32, CPU, torch.Generator().manual_seed(0))
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    try:
        contender = contenders.deterministic(Task(workload, "backward", inputs, (torch.ones(64, 4),)))
        contender.run()
        after = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [True] and after == before


def test_only_inputs_with_items_are_cut_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CPU_ELEMENTS", 16)
    row = rows_of()[run.OURS, "backward"]
    assert row.status == run.OK and row.workload == "lookup 64×4, float32, first 16"
    assert row.bytes == WORKLOAD.backward_bytes // 4


def test_a_workload_for_another_device_is_left_out_and_fails_nothing() -> None:
    rows = {
        (row.contender, row.direction): row for row in run.measure("toy", replace(WORKLOAD, devices=("cuda",)), CPU)
    }
    assert set(rows) == {(run.OURS, "forward"), (run.OURS, "backward")}
    for row in rows.values():
        assert row.status == run.LEFT_OUT and row.microseconds is None and row.ok
        assert row.note == "meant for cuda"
        assert "left out" in next(iter(tables._cells(row, 10.0)))


def test_what_is_not_public_is_not_compared() -> None:
    """The hidden output is left unwritten there: `verify` notices, and a time does not depend on it."""
    with adjoint.prefer(plan="eager.unwritten+eager"):
        assert rows_of()[run.OURS, "forward"].status == run.OK


def test_ours_takes_the_plan_that_is_preferred() -> None:
    plain = rows_of()[run.OURS, "backward"].error
    with adjoint.prefer(plan="eager.other_bits+eager"):
        assert rows_of()[run.OURS, "backward"].error != plain


@pytest.mark.parametrize("direction", [contenders.FORWARD, contenders.BACKWARD, contenders.STEP])
def test_a_workload_may_ask_for_a_plan(direction: str) -> None:
    """Both of these plans have other bits than the first, and so another error."""
    changes: dict[str, Any] = {"directions": (direction,), "kept": True}
    plain = rows_of(**changes)[run.OURS, direction]
    asked = rows_of(**changes, preference=Preference(plan="eager.batch+eager.other_bits"))[run.OURS, direction]
    assert plain.error is not None and asked.error is not None, (plain.note, asked.note)
    assert plain.error != asked.error


def test_every_workload_can_be_planned_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its contender of ours binds it, and with what it asks for; without its numbers."""
    plain = torch.Generator

    class OfTheHost(plain):
        """Tensors without memory are drawn by no device's generator."""

        def __new__(cls, device: Any = "cpu") -> torch.Generator:
            return plain()

    monkeypatch.setattr(torch, "Generator", OfTheHost)
    meta, chosen = torch.device("meta"), {}
    for module in ops.cases():
        for workload in (*module.WORKLOADS, *getattr(module, "ERROR_WORKLOADS", ())):
            subject = workload.subject
            inputs = workload.make(workload.dtype, meta, plain().manual_seed(0))
            assert "preference" not in subject.keywords, workload.name
            subject.bind(inputs)
            positional, named = subject.arguments(inputs)
            found = adjoint.plan(subject.function, *positional, preference=workload.preference, target="sm_90", **named)
            assert found.adjoint is not None or set(workload.directions) == {contenders.FORWARD}, workload.name
            chosen[workload.name] = found.name
    assert chosen["linear_cross_entropy 8192×2048×151936"] == "triton.vendor"
    assert chosen["linear_cross_entropy 8192×2048×151936, repeatable"] == "triton.tiles"
