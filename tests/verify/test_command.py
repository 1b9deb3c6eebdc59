"""`adjoint verify`: what it runs, shows and saves, how it refuses, its exit status."""

import json
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from adjoint.cli import app
from adjoint.verify import Job, Row, command
from tests.verify import listings


def call(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def call_on(listing: Callable[..., list[Job]], *arguments: object) -> Any:
    """The command on other jobs, as the thorough ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "jobs", listing)
        return call("--device", "cpu", "--thorough", *arguments)


def table(output: str) -> str:
    """Without the lines before it, which show jobs as they end, and the last lines, which have the time."""
    return output[output.index("Checks on") : output.rindex("Checks on")].partition("\n")[2]


def test_the_arguments_choose_the_jobs() -> None:
    choices = []

    def listing(*arguments: object) -> list[Job]:
        choices.append(arguments)
        return listings.list_sound()

    assert call_on(listing, "--jobs", 1).exit_code == 0
    assert call_on(listing, "swiglu", "silu", "--all", "--jobs", 1).exit_code == 0
    cpu = torch.device("cpu")
    assert choices == [(None, cpu, False), (["swiglu", "silu"], cpu, True)]


def test_jobs_are_shown_as_they_end_and_then_their_rows() -> None:
    done = call_on(lambda *_: listings.list_sound(), "--jobs", 1, "-v")
    assert done.exit_code == 0, done.output
    assert done.output.startswith("1/7 toy: modes: 1 passed\n2/7 toy: poison: 1 passed\n")
    assert done.output.rstrip().endswith("7 passed, 0 failed")
    assert "Interrupted" not in done.output


def test_failures_are_shown_in_full() -> None:
    long = "case 'empty' [x] " + "and long " * 40
    rows = [Row("silu", "modes", "", "eager", "stated", f"{n}", n < 2, long * (n == 2)) for n in range(3)]
    done = call_on(lambda *_: [Job("silu: modes", "silu", "modes", "", "eager", lambda: rows)], "--jobs", 1)
    assert done.exit_code == 1
    assert "3 checks" in done.output and "1 FAILED\n" in done.output
    assert f"FAILED silu eager: modes: 2: {long}\n" in done.output
    assert done.output.rstrip().endswith("2 passed, 1 failed")


def test_a_line_for_each_op_a_count_and_no_more() -> None:
    done = call("silu", "norm", "--device", "cpu", "--jobs", 1)
    assert done.exit_code == 0, done.output
    lines = list(filter(None, done.output.splitlines()))
    ops = ("silu", "rms_norm", "gated_rms_norm", "l2_norm")
    assert {line.split()[0] for line in lines[:4]} == set(ops)
    assert all(line.endswith("passed") and "of bound" in line for line in lines[:4])
    assert lines[4].startswith("Checks on cpu: 4 ops, ") and "SKUs" in lines[4]
    assert lines[5].endswith(" passed, 0 failed") and len(lines) == 6
    assert max(map(len, lines)) < 80


def test_details_fit_a_terminal_and_name_the_skus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    done = call("normalize", "--device", "cpu", "--jobs", 1, "-v")
    assert done.exit_code == 0, done.output
    details = done.output[done.output.index("Checks on cpu") :]
    assert max(map(len, details.splitlines())) <= 80
    for words in ("accuracy: ", "repeats: ", "SKUs that ran: ", "normalize_backward/eager/", "passed"):
        assert words in details
    assert "digest" not in details


def test_data_alone_goes_to_the_standard_output() -> None:
    done = call("l2_norm", "--device", "cpu", "--jobs", 1, "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 0 and data["depth"] == "quick" and data["complete"] and data["failed"] == 0
    (op,) = data["ops"]
    assert op["op"] == "l2_norm" and op["checks"] == data["passed"] > 20
    assert data["skus"] and all(sku.startswith("l2_norm") for sku in data["skus"])
    assert {"op", "check", "dtype", "plan", "guarantee", "measured", "passed", "detail", "skus"} == {*data["rows"][0]}
    assert "passed" in done.stderr


def test_families_ops_and_modes_are_names_and_internal_ones_are_not_listed() -> None:
    done = call("relu", "--device", "cpu")
    assert done.exit_code == 2
    listed = done.stderr.split(";")
    assert "moe" in listed[1] and "swiglu[gate_up]" in listed[2] and "gated_delta_rule" in listed[3]
    assert "moe.route" in listed[3] and "gated_delta.gram" in listed[3] and ", gram" not in listed[3]
    assert "[" not in listed[1] + listed[3] and "stages" not in done.stderr and "_tensors" not in done.stderr
    assert call("swiglu[gate_up]", "--device", "cpu", "--jobs", 1).exit_code == 0


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("swigul", "swiglu"),
        ("gated_delta.grm", "gated_delta.gram"),
        ("rout", "moe.route"),
        ("gated_dela", "gated_delta"),
        ("swiglu[gateup]", "swiglu[gate_up]"),
    ],
)
def test_the_nearest_name_is_offered(name: str, meant: str) -> None:
    done = call(name, "--device", "cpu")
    assert done.exit_code == 2 and done.stderr.strip() == f"verify: unknown op {name!r}; did you mean {meant}?"


def test_an_op_is_named_as_it_is_called() -> None:
    done = call("gated_delta.normalize", "--device", "cpu", "--jobs", 1)
    assert done.exit_code == 0 and done.output.startswith("gated_delta.normalize "), done.output
    assert "Checks on cpu: 1 op, 1 plan, " in done.output


def test_two_processes_give_the_result_of_one(tmp_path: Path) -> None:
    """On a real op, whose inputs do not travel between processes."""
    alone, together = tmp_path / "alone.json", tmp_path / "together.json"
    options = ("normalize", "--device", "cpu", "--thorough", "-v", "--shard", "2/3")
    one = call(*options, "--jobs", 1, "--save", alone)
    two = call(*options, "--jobs", 2, "--save", together)
    assert one.exit_code == two.exit_code == 0, two.output
    assert table(one.output) == table(two.output)
    assert alone.read_text() == together.read_text() and len(json.loads(alone.read_text())["jobs"]) > 10


def test_a_process_for_each_core_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    processes = []

    def run_in_processes(*arguments: object, **keywords: Any) -> Iterator[tuple[int, list[Row]]]:
        processes.append(keywords["processes"])
        yield from ()

    monkeypatch.setattr(command.workers, "run_in_processes", run_in_processes)
    monkeypatch.setattr(command.workers, "usable_cores", lambda: 5)
    call_on(lambda *_: [])
    call_on(lambda *_: [], "--jobs", 3)
    assert processes == [5, 3]


# -------------------------------------------------------------------------------------- interruptions


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C raises, however these tests were started."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_ends_the_processes_and_shows_what_ended(tmp_path: Path) -> None:
    done = call_on(listings.list_interruption, "--jobs", 2, "--save", tmp_path / "part.json")
    assert done.exit_code == 130, done.output
    assert "Interrupted: 1 of 4 jobs ran" in done.output
    assert done.output.rstrip().endswith("1 passed, 0 failed")
    assert not multiprocessing.active_children()
    (job,) = json.loads((tmp_path / "part.json").read_text())["jobs"]
    assert job["position"] == 0
    done = call("--merge", tmp_path / "part.json")
    assert done.exit_code == 2 and "part.json has 1 of the 4 checks of shard 1/1" in done.stderr


def test_an_interruption_of_this_process_shows_what_ended() -> None:
    def press() -> bool:
        raise KeyboardInterrupt

    jobs = [listings.job("first", listings.succeed), listings.job("interrupts", press)]
    done = call_on(lambda *_: jobs, "--jobs", 1)
    assert "1 check " in done.output and "cut off" in done.output and "passed\n" not in done.output
    assert done.exit_code == 130 and "Interrupted: 1 of 2 jobs ran" in done.output


# --------------------------------------------------------------------------------------------- shards


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Three shards of sound jobs."""
    paths = [tmp_path / f"{index}.json" for index in (1, 2, 3)]
    for index, path in enumerate(paths, 1):
        done = call_on(lambda *_: listings.list_sound(), "--jobs", 1, "-v", "--shard", f"{index}/3", "--save", path)
        assert done.exit_code == 0, done.output
        assert f"Checks on cpu, shard {index}/3" in done.output
    return paths


def test_merged_shards_show_the_whole(files: list[Path]) -> None:
    whole = call_on(lambda *_: listings.list_sound(), "--jobs", 1, "-v")
    merged = call("--merge", "-v", *files)
    assert merged.exit_code == 0, merged.output
    assert table(merged.output) == table(whole.output)


def test_a_failure_in_a_shard_is_one_of_the_whole(files: list[Path]) -> None:
    content = json.loads(files[1].read_text())
    content["jobs"][0]["rows"][0]["passed"] = False
    files[1].write_text(json.dumps(content))
    merged = call("--merge", *files)
    assert merged.exit_code == 1 and "6 passed, 1 failed" in merged.output


def test_a_missing_shard_is_refused(files: list[Path]) -> None:
    done = call("--merge", files[0], files[2])
    assert done.exit_code == 2 and "no file has shard 2/3" in done.stderr and "Checks on" not in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shard", "0/3"), ("--shard", "'0/3'", "2/4")),
        (("--shard", "4/3"), ("--shard", "'4/3'")),
        (("--shard", "x"), ("--shard", "'x'")),
        (("--shard", ""), ("--shard", "''")),
        (("--jobs", "0"), ("--jobs", "1 or more", "0")),
        (("--jobs", "-2"), ("--jobs", "-2")),
        (("--save", "/nowhere/part.json"), ("/nowhere/part.json", "No such file")),
        (("--merge",), ("--merge", "files of all shards")),
        (("--merge", "nowhere.json"), ("nowhere.json", "No such file")),
        (("--merge", "nowhere.json", "--jobs", "2", "--shard", "1/2"), ("--merge", "leave out --jobs, --shard")),
        (("--merge", "nowhere.json", "--all", "--save", "x"), ("--merge", "leave out --all, --save")),
        (("--merge", "nowhere.json", "--thorough"), ("--merge", "leave out --thorough")),
        (("--record", "nowhere", "--json"), ("--record", "leave out --json")),
        (("--merge", "nowhere.json", "--device", "cpu"), ("--merge", "leave out --device")),
    ],
)
def test_mistakes_are_refused_in_a_sentence(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    device = () if "--merge" in arguments else ("silu", "--device", "cpu")
    done = call(*device, *arguments)
    assert done.exit_code == 2, done.output
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.output and "passed" not in done.output
