"""A run's numbers as JSON lines, and for TensorBoard where it is installed."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.train.checkpoint import write_text_atomically
from adjoint.train.stops import CannotSave


class Metrics:
    """The file metrics.jsonl of a run, with a line for each step and one for each evaluation.

    Args:
        folder: the folder of the run.
        last_step: the step from which the run goes on. Lines of later steps are left from an interruption, and are
            removed.
        tensorboard: "on", "off", or "auto", which means on if it is installed.
        enabled: whether this process writes.

    Raises:
        Unsupported: TensorBoard is asked for and not installed.
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
        require_tensorboard(tensorboard)
        if tensorboard != "off":
            with contextlib.suppress(ImportError):
                from torch.utils.tensorboard import SummaryWriter

                self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=last_step + 1)

    def _write_all(self) -> None:
        try:
            write_text_atomically(self.path, "".join(json.dumps(row) + "\n" for row in self.rows))
        except OSError as error:
            raise CannotSave(f"train: cannot write {self.path}: {error.strerror or error}") from error

    def add(self, row: dict[str, Any]) -> None:
        """Writes one more line."""
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
        """The step and the loss of each line that has a loss."""
        return [(row["step"], row["loss"]) for row in self.rows if "loss" in row]


def require_tensorboard(wish: str) -> None:
    """Refuses TensorBoard if it is not installed, before anything is written.

    Raises:
        Unsupported: TensorBoard is asked for and not installed.
    """
    if wish != "on":
        return
    try:
        import torch.utils.tensorboard  # noqa: F401
    except ImportError:
        raise Unsupported("train: tensorboard is not installed: pip install tensorboard") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, without a line that a killed process has left incomplete.

    Raises:
        ArgumentError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ArgumentError(f"train: cannot read {path}: {error.strerror}") from None
    rows = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows


def bits_of(value: float) -> str:
    """A number's 64 bits in hexadecimal, for comparing two runs.

    >>> bits_of(1.0)
    '3ff0000000000000'
    """
    return struct.pack(">d", value).hex()
