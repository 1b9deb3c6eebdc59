"""Jobs in several processes: the rows of one process, whatever becomes of the others."""

import multiprocessing
import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint.core import kernels
from adjoint.verify import Job, Row, interpreter, jobs
from adjoint.verify.parallel import workers
from tests.verify import listings

CPU = torch.device("cpu")


def run(listing: workers.Listing, processes: int = 2, device: torch.device = CPU) -> tuple[dict[str, Row], list[str]]:
    """The row of each job by name, and the labels in the order in which the jobs started."""
    order: list[str] = []
    listed = listing()
    results = workers.run_in_processes(
        listing,
        listed,
        range(len(listed)),
        lambda job: order.append(job.label),
        processes=processes,
        device=device,
    )
    return {listed[position].label.removeprefix("toy: "): row for position, (row,) in results}, order


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "usable_cores", lambda: 6)
        return run(listings.list_troubles, processes=2)[0]


def test_every_job_has_its_row(rows: dict[str, Row]) -> None:
    assert set(rows) == {"first", "fails", "throws", "crashes", "leaves", "last"}
    assert rows["first"].passed
    assert str(os.getpid()) not in {row.measured for row in rows.values()}


def test_a_process_has_its_share_of_the_cores(rows: dict[str, Row]) -> None:
    assert rows["last"].passed


def test_a_failure_and_an_exception_are_failed_rows(rows: dict[str, Row]) -> None:
    assert not rows["fails"].passed and rows["fails"].detail == ""
    assert not rows["throws"].passed and rows["throws"].detail == "ValueError: on purpose"


@pytest.mark.parametrize(("name", "cause"), [("crashes", "SIGSEGV"), ("leaves", "exit status 3")])
def test_a_process_that_dies_is_a_failed_row_of_its_job(rows: dict[str, Row], name: str, cause: str) -> None:
    row = rows[name]
    assert not row.passed and row.measured == "its process died" and cause in row.detail
    assert (row.op, row.check, row.dtype, row.plan) == ("toy", "accuracy", "float32", "eager")


@pytest.mark.parametrize(("processes", "runs"), [(2, 2), (1, 1)])
def test_a_job_without_memory_runs_again_when_it_is_alone(tmp_path: Path, processes: int, runs: int) -> None:
    rows, order = run(partial(listings.list_scarcity, str(tmp_path / "trace")), processes)
    assert rows["small"].passed and rows["smaller"].passed
    assert order.count("toy: large") == runs and rows["large"].passed == (runs == 2)
    if runs == 2:
        assert order[-1] == "toy: large"
    else:
        assert "OutOfMemoryError" in rows["large"].detail


@pytest.fixture(scope="module")
def on_a_gpu() -> tuple[dict[str, Row], list[str]]:
    return run(listings.list_gpu_fault, processes=1, device=torch.device("cuda"))


def test_a_process_that_lost_its_gpu_is_replaced(on_a_gpu: tuple[dict[str, Row], list[str]]) -> None:
    rows, _ = on_a_gpu
    processes = {name: row.measured for name, row in rows.items()}
    assert processes["first"] == processes["second, a fault"] != processes["third"] == processes["last"]
    assert [name for name, row in rows.items() if not row.passed] == ["second, a fault"]


def test_the_first_checks_start_first(on_a_gpu: tuple[dict[str, Row], list[str]]) -> None:
    _, order = on_a_gpu
    assert order == ["toy: first", "toy: second, a fault", "toy: third", "toy: last"]


def test_what_starts_first_exists() -> None:
    listed = jobs(workers.FIRST_OPS)
    assert set(workers.FIRST_CHECKS) <= {job.check for job in listed}
    assert set(workers.FIRST_OPS) <= {job.op for job in listed}


def test_a_process_that_lists_other_jobs_runs_none() -> None:
    (row,) = run(listings.list_own_process)[0].values()
    assert not row.passed and row.measured == "its process died" and row.detail == "exit status 1"


@pytest.mark.kernels
def test_processes_correct_the_interpreter() -> None:
    if not kernels.interpreting():
        pytest.skip("Triton compiles here")
    rows, _ = run(listings.list_interpreter_checks)
    assert all(row.passed for row in rows.values())


def test_this_process_corrects_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    corrections: list[str] = []
    monkeypatch.setattr(interpreter, "correct", lambda: corrections.append("correct"))

    def note() -> bool:
        corrections.append("job")
        return True

    list(workers.run_here([listings.job("first", note)], [0], lambda job: None))
    assert corrections == ["correct", "job"]


def test_jobs_run_here_in_order() -> None:
    started: list[Job] = []
    listed = listings.list_sound()
    results = list(workers.run_here(listed, range(1, 7, 2), started.append))
    assert [position for position, _ in results] == [1, 3, 5] and started == listed[1::2]
    assert {row.measured for _, rows in results for row in rows} == {str(os.getpid())}


@pytest.mark.parametrize(("gibibytes", "processes"), [(139, 16), (79, 9), (15, 1), (2, 1)])
def test_the_memory_of_a_gpu_limits_the_processes(
    gibibytes: int, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "usable_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gibibytes * 2**30, 200 * 2**30))
    assert workers.default_processes(torch.device("cuda")) == processes
    assert workers.default_processes(CPU) == 16


@pytest.mark.parametrize("alive", [True, False])
def test_a_death_is_noticed_while_the_connection_is_open(alive: bool) -> None:
    connection, _other_end = multiprocessing.Pipe()
    worker: Any = SimpleNamespace(connection=connection, process=SimpleNamespace(is_alive=lambda: alive))
    assert (workers._await_answers([worker]) == []) == alive


def test_causes_in_words() -> None:
    assert "memory" in workers._cause(-signal.SIGKILL)
    assert workers._cause(None) == "it stopped answering"
