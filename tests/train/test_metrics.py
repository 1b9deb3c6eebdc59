"""A run's numbers for TensorBoard: a stand-in for its writer hears what it is told."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import adjoint
from adjoint.train.report.metrics import Metrics

BOARD = "torch.utils.tensorboard"


class Writer:
    """TensorBoard's, as far as it is used."""

    def __init__(self, folder: str, purge_step: int) -> None:
        self.folder, self.purge_step = Path(folder), purge_step
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[Writer]:
    """Those that are opened."""
    opened: list[Writer] = []
    module: Any = ModuleType(BOARD)

    def open_writer(folder: str, purge_step: int) -> Writer:
        opened.append(Writer(folder, purge_step))
        return opened[-1]

    module.SummaryWriter = open_writer
    monkeypatch.setitem(sys.modules, BOARD, module)
    return opened


def test_numbers_reach_tensorboard_by_step(writers: list[Writer], tmp_path: Path) -> None:
    """Of a run that goes on after step 2: what an interrupted one wrote later is purged."""
    metrics = Metrics(tmp_path, 2, "auto")
    metrics.add({"step": 3, "loss": 0.5, "loss_bits": "3fe0000000000000"})
    metrics.add({"step": 3, "heldout_bits_per_byte": 2.5})
    (writer,) = writers
    assert writer.folder == tmp_path / "tensorboard" and writer.purge_step == 3
    assert writer.scalars == [("loss", 0.5, 3), ("heldout_bits_per_byte", 2.5, 3)]


def test_it_can_be_switched_off_and_other_ranks_write_nothing(writers: list[Writer], tmp_path: Path) -> None:
    Metrics(tmp_path, 0, "off").add({"step": 1, "loss": 1.0})
    Metrics(tmp_path / "other", 0, "on", enabled=False).add({"step": 1, "loss": 1.0})
    assert not writers and not (tmp_path / "other").exists()


def test_without_it_a_run_goes_on_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, BOARD, None)
    Metrics(tmp_path, 0, "auto").add({"step": 1, "loss": 1.0})
    with pytest.raises(adjoint.Unsupported, match="train: tensorboard is not installed: pip install tensorboard"):
        Metrics(tmp_path, 0, "on")
