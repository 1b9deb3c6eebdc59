"""A run's numbers as JSON lines, and for TensorBoard where it is installed."""

import json
import struct
from pathlib import Path
from typing import Any

from adjoint.core.errors import Unsupported
from adjoint.train.checkpoint import write_text_atomically
from adjoint.train.stops import CannotSave


class Metrics:
    """metrics.jsonl of a run: a line for each step, and one for each evaluation.

    Args:
        folder: of the run.
        last_step: lines of later steps are of a run that was interrupted, and are removed.
        tensorboard: "on", "off", or "auto": where it is installed.
        enabled: whether this process writes.

    Raises:
        Unsupported: TensorBoard is asked for and not there.
    """

    def __init__(self, folder: Path, last_step: int, tensorboard: str, enabled: bool = True) -> None:
        self.path = folder / "metrics.jsonl"
        self._board: Any = None
        self.rows: list[dict[str, Any]] = []
        self._enabled = enabled
        if not enabled:
            return
        self.rows = [row for row in read_rows(self.path) if row["step"] <= last_step]
        self._write_all()
        if tensorboard != "off":
            try:
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)
            except ImportError:
                if tensorboard == "on":
                    raise Unsupported("train: tensorboard is not installed: pip install tensorboard") from None

    def _write_all(self) -> None:
        try:
            write_text_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        except OSError as error:
            raise CannotSave(f"train: cannot write {self.path}: {error.strerror or error}") from error

    def add(self, row: dict[str, Any]) -> None:
        """One more line."""
        self.rows.append(row)
        if not self._enabled:
            return
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        except OSError as error:
            raise CannotSave(f"train: cannot write {self.path}: {error.strerror or error}") from error
        if self._board is not None:
            for name, value in row.items():
                if name != "step" and isinstance(value, int | float):
                    self._board.add_scalar(name, value, row["step"])

    def has_evaluation(self, step: int) -> bool:
        """Whether there is a line for the evaluation after a step."""
        return any(row["step"] == step and "heldout_bits_per_byte" in row for row in self.rows)

    def losses(self) -> list[tuple[int, float]]:
        """Step and loss of each line that has one."""
        return [(row["step"], row["loss"]) for row in self.rows if "loss" in row]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that a killed process left half is not there."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def bits_of(value: float) -> str:
    """A number's 64 bits in hexadecimal, by which two runs are compared.

    >>> bits_of(1.0)
    '3ff0000000000000'
    """
    return struct.pack(">d", value).hex()
