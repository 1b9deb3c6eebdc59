"""Schedules: which entry a GPU gets, by its name, its architecture or by default."""

import json
from pathlib import Path

import pytest
import torch

import adjoint
from adjoint.core import schedules
from adjoint.core.schedules import Schedules

TABLE = {
    "default": {"scan": {"stages": 1}, "sum": {"block": 16}},
    "sm_90": {"scan": {"stages": 2}},
    "NVIDIA H200": {"scan": {"stages": 3}},
    "sm_100": "sm_90",
    "interpreter": "sm_90",
}


@pytest.fixture
def table(tmp_path: Path) -> Schedules:
    file = tmp_path / "schedules.json"
    file.write_text(json.dumps(TABLE), encoding="utf-8")
    return Schedules(file)


@pytest.mark.parametrize(
    ("names", "stages"),
    (
        ((), 1),
        (("NVIDIA A100", "sm_80"), 1),
        (("NVIDIA H100", "sm_90"), 2),
        (("NVIDIA H200", "sm_90"), 3),
        (("NVIDIA B200", "sm_100"), 2),
    ),
)
def test_the_most_specific_name_decides(table: Schedules, names: tuple[str, ...], stages: int) -> None:
    assert table.named("scan", *names) == {"stages": stages}
    assert table.named("sum", *names) == {"block": 16}, "what nobody tuned is as by default"


def test_a_device_is_looked_up(table: Schedules, monkeypatch: pytest.MonkeyPatch) -> None:
    assert table.lookup("scan") == {"stages": 1}
    assert table.lookup("scan", torch.device("cpu")) == {"stages": 2}, "the interpreter's, which are those of sm_90"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B200")
    monkeypatch.setattr(schedules, "architecture", lambda device: "sm_100")
    assert table.lookup("scan", torch.device("cuda", 0)) == {"stages": 2}


def test_an_entry_is_a_copy(table: Schedules) -> None:
    table.named("scan")["stages"] = 7
    assert table.named("scan") == {"stages": 1}


@pytest.mark.parametrize("file", sorted(Path(str(adjoint.__file__)).parent.rglob("schedules.json")), ids=str)
def test_every_parameter_can_be_varied(file: Path) -> None:
    """Checks double and halve what is no depth of a pipeline, and plans take powers of two."""
    table = json.loads(file.read_text(encoding="utf-8"))
    for target, entries in ((target, entries) for target, entries in table.items() if isinstance(entries, dict)):
        for entry, parameters in entries.items():
            wrong = {name: value for name, value in parameters.items() if value < 1 or value & (value - 1)}
            assert all(name.endswith("stages") for name in wrong), (target, entry, wrong)
