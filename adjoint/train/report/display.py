"""What a run shows while it goes on: a bar with loss and speed in a terminal, lines elsewhere."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from adjoint.train.step.loop import StepResult


class Display:
    """The progress of a run.

    Args:
        console: the console that shows it.
        first, last: the number of steps done, and of steps of the whole run.
        flops_of_token: the operations of forward and backward for one token; None if nobody has counted them.
        peak: TF/s of a large matrix product, over all ranks; None if it is not known.
        enabled: whether this process shows anything.
    """

    def __init__(
        self, console: Console, first: int, last: int, flops_of_token: float | None, peak: float | None, enabled: bool
    ) -> None:
        self._console, self._enabled = console, enabled
        self._flops, self._peak = flops_of_token, peak
        self._live = enabled and console.is_terminal
        self._last = last
        self._mean: float | None = None
        self._lines_at = 0.0
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=24), TextColumn("{task.fields[facts]}"),
            TimeRemainingColumn(), console=console, disable=not self._live,
        )  # fmt: skip
        self._task = self._progress.add_task("train", total=last, completed=first, facts="")

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, result: StepResult, seconds: float) -> dict[str, Any]:
        """Shows a step, and returns its speed and, if it is known, the share of the peak, for the metrics."""
        self._mean = result.loss if self._mean is None else 0.9 * self._mean + 0.1 * result.loss
        speed: dict[str, Any] = {"tokens_per_second": round(result.tokens / seconds, 1)}
        words = f"loss {self._mean:.3f}  {_short(result.tokens / seconds)} tokens/s"
        if self._flops is not None and self._peak:
            speed["share_of_peak"] = round(self._flops * result.tokens / seconds / 1e12 / self._peak, 4)
            words += f"  {100 * speed['share_of_peak']:.0f}% of peak"
        if self._live:
            self._progress.update(self._task, completed=result.step, facts=words)
        elif self._enabled and (time.perf_counter() - self._lines_at > 10 or result.step == self._last):
            self._lines_at = time.perf_counter()
            self._console.print(f"step {result.step}/{self._last}  {words}", highlight=False, soft_wrap=True)
        return speed

    def say(self, text: str, style: str = "") -> None:
        if self._enabled:
            self._console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _short(number: float) -> str:
    return f"{number / 1000:.1f}k" if number >= 10_000 else f"{number:.0f}"
