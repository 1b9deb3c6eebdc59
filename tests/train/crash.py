"""Kills a run again and again, resumes it, and compares it with one that nobody disturbed.

    python -m tests.train.crash FOLDER KILLS

Runs are forks of this process, which has imported everything: so a kill comes at any moment of a run, not of its
imports. The first comes after step 50 of 100, every second one while a checkpoint is written, others at random. What
has a checkpoint's name must be whole each time, and all losses and weights have the bits of the undisturbed run.
"""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from adjoint.train import run as runs
from adjoint.train.checkpoint import find_damage
from adjoint.train.options import Options
from tests.train.small import FAST, loss_bits, metrics, weight_bytes, write_start, write_text

STEPS = 100


def options(folder: Path) -> Options:
    return Options(**{
        **FAST, "start": str(folder / "start"), "data": [str(folder / "text")], "steps": STEPS, "checkpoint_every": 5,
        "batch_rows": 2, "sequence_length": 16, "evaluate_every": 20,
    })  # fmt: skip


def work(folder: Path, out: Path) -> None:
    """A run, or the rest of one, in a process of its own."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    console = Console(file=sys.stdout)
    if (out / runs.OPTIONS).exists():
        runs.train(runs.read_options(out, {}), out, resume=True, console=console)
    else:
        runs.train(options(folder), out, console=console)


def start(folder: Path, out: Path) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("fork").Process(target=work, args=(folder, out))
    process.start()
    return process


def kill_when(process: multiprocessing.process.BaseProcess, moment: Callable[[], bool]) -> bool:
    """Whether the run was still going on when the moment came."""
    while process.is_alive():
        if moment():
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            return True
        time.sleep(0.0005)
    process.join()
    assert process.exitcode == 0, f"a run ended with {process.exitcode}"
    return False


def moments(out: Path, number: int, seconds: float, draw: random.Random) -> Callable[[], bool]:
    if number == 0:
        return lambda: (out / "metrics.jsonl").exists() and len(metrics_lines(out)) > STEPS // 2
    if number % 2:
        wait = draw.randrange(1, 4)  # the so-manieth checkpoint from now

        def writing(seen: set[str] = set()) -> bool:  # noqa: B006
            for path in out.glob("checkpoints/.unfinished-step-*"):
                seen.add(path.name)
            return len(seen) >= wait and any(out.glob("checkpoints/.unfinished-step-*/*"))

        return lambda: writing()
    end = time.monotonic() + draw.uniform(0, seconds)
    return lambda: time.monotonic() >= end


def metrics_lines(out: Path) -> list[str]:
    return (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()


def main(folder: Path, kills: int) -> None:
    write_start(folder / "start")
    write_text(folder / "text")
    begin = time.monotonic()
    process = start(folder, folder / "whole")
    process.join()
    assert process.exitcode == 0
    seconds = time.monotonic() - begin
    draw = random.Random(kills)
    done, out, round_ = 0, folder / "killed-0", 0
    unfinished = 0
    while done < kills:
        if not kill_when(start(folder, out), moments(out, done, seconds, draw)):
            compare(folder / "whole", out)
            round_ += 1
            out = folder / f"killed-{round_}"
            continue
        done += 1
        unfinished += any(out.glob("checkpoints/.unfinished-*"))
        for path in out.glob("checkpoints/step-*"):
            assert not (fault := find_damage(path)), f"{path}: {fault}"
    process = start(folder, out)
    process.join()
    assert process.exitcode == 0
    compare(folder / "whole", out)
    assert unfinished, "no kill came while a checkpoint was written"
    print(f"{done} kills, {unfinished} of them while a checkpoint was written: every bit is that of the whole run")


def compare(whole: Path, resumed: Path) -> None:
    assert sorted(loss_bits(whole)) == list(range(1, STEPS + 1))
    assert loss_bits(whole) == loss_bits(resumed)
    assert weight_bytes(whole) == weight_bytes(resumed)
    evaluations = [[row for row in metrics(run) if "heldout_bits_per_byte" in row] for run in (whole, resumed)]
    assert evaluations[0] == evaluations[1] and len(evaluations[0]) == 5


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
