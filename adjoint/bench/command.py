"""What `adjoint bench` does, once its arguments are read."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from adjoint.bench import environment
from adjoint.bench.measurement import errors, run
from adjoint.bench.measurement import overhead as host
from adjoint.bench.omissions import omissions, other_devices
from adjoint.bench.report import chart, results, tables
from adjoint.bench.report.pictures import draw


def times(
    console: Console,
    ops: Sequence[str],
    device: torch.device,
    *,
    rows: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    compile: bool = True,
    folder: Path | None = None,
    plot: Path | None = None,
    as_data: bool = False,
) -> tuple[bool, dict[str, Any]]:
    """Times workloads, prints the times, and saves them if there is a folder.

    Returns whether every result was right, and everything as data.

    Args:
        console: the console for omissions, progress and, unless the caller prints the data, a table.
        as_data: whether the caller prints the data.
    """
    selected = run.select(ops, rows)
    run.check_peers(peers)
    if plot is not None:
        chart.require_drawing(plot)
    left_out = list(omissions(selected, device, compile=compile, peers=peers))
    for sentence in left_out:
        console.print(Text(sentence), soft_wrap=True)
    options = [f"--rows '{text}'" for text in rows] + [f"--peer {label}" for label in peers or ()]
    options += ["--no-compile"] * (not compile) + ["--save"] * (folder is not None)
    command = " ".join(["adjoint bench", *ops, *options])

    def progress(result: run.Result) -> None:
        """Prints a line for each workload of a long run, and saves its rows, which survive an interruption."""
        last = result.rows[-1].workload
        own = ", ".join(
            f"{row.direction} {_outcome(row)}"
            for row in result.rows
            if row.workload == last and row.contender == run.OURS
        )
        done = len({row.workload for row in result.rows})
        console.print(Text(f"{done}/{len(selected)} {last}: ours {own}", style="dim"), soft_wrap=True)
        if folder is not None:
            results.save(result, command, folder)

    result = run.run(selected, device, compile=compile, peers=peers, report=progress)
    name = environment.device_name(device)
    if not as_data:
        for table in tables.times(result, name, console.width):
            console.print(table)
    if folder is not None:
        console.print(f"saved in {results.save(result, command, folder)}", highlight=False, soft_wrap=True)
    if plot is not None:
        chart.plot(result, name, plot)
        console.print(f"drawn in {plot}", highlight=False, soft_wrap=True)
    return result.ok, results.as_data(result, command) | {"left_out": left_out}


def _outcome(row: run.Row) -> str:
    """The time of a row; if it has none, its status and the reason."""
    if row.microseconds is not None:
        return f"{row.microseconds:.1f} µs"
    return f"{row.status}: {row.note}" if row.note else row.status


def accuracy(
    console: Console,
    ops: Sequence[str],
    device: torch.device,
    *,
    rows: Sequence[str] = (),
    peers: Sequence[str] | None = None,
    folder: Path | None = None,
) -> bool:
    """Measures errors, prints them by family, and saves them if there is a folder.

    Returns whether every promise was kept.
    """
    selected = errors.workloads_of(ops, rows)
    run.check_peers(peers)
    for sentence in other_devices(selected, device):
        console.print(Text(sentence), soft_wrap=True)
    options = [f"--rows '{text}'" for text in rows] + [f"--peer {label}" for label in peers or ()]
    command = " ".join(["adjoint bench", *ops, "--errors", *options, *["--save"] * (folder is not None)])

    def progress(entries: list[errors.Row]) -> None:
        """Saves the rows so far, which survive an interruption."""
        console.print(Text(f"{entries[-1].workload}: measured", style="dim"), soft_wrap=True)
        if folder is not None:
            errors.save(entries, command, device, folder)

    entries = errors.run(selected, device, peers=peers, report=progress)
    content = errors.content_of(entries, command, device)
    for family in dict.fromkeys(row.family for row in entries):
        console.print(Text(errors.markdown(content, family)), soft_wrap=True)
    broken = [row for row in entries if not row.holds]
    for row in broken:
        where = f"{row.workload}, {row.direction}, {row.output}"
        console.print(Text(f"FAILED {where}: {row.promise or row.note}", style="red"), soft_wrap=True)
    return not broken


def overhead(console: Console, device: torch.device, as_data: bool = False) -> list[dict[str, Any]]:
    """Measures host costs, on the CPU and, if the device is a GPU, there too. Prints them unless `as_data`, and returns
    them as data."""
    rows = host.overhead(torch.device("cpu"))
    if device.type == "cuda":
        rows += host.overhead(device)
    if not as_data:
        console.print(tables.overheads(rows, console.width))
    return [asdict(row) | {"host": row.host, "inside": row.inside} for row in rows]


def readme(console: Console, paths: Sequence[Path], folder: Path) -> None:
    """Writes the saved GPU results into documents, of which all but the first may be missing."""
    for path in (paths[0], *filter(Path.exists, paths[1:])):
        families = results.update_readme(path, folder)
        console.print(f"{path}: wrote the results of {', '.join(families)}", highlight=False, soft_wrap=True)


def pictures(console: Console, path: Path, folder: Path) -> None:
    """Draws the saved results of a GPU beside peers: the speed into one file, and the errors into another beside it."""
    draw("speed", results.saved(folder), path)
    beside = path.with_name(f"{path.stem}-errors{path.suffix}")
    draw("errors", results.saved(folder), beside)
    console.print(f"drawn in {path} and {beside}", highlight=False, soft_wrap=True)


def errors_page(console: Console, path: Path, folder: Path) -> None:
    """Writes the saved errors of GPUs into their page."""
    families = errors.update_page(path, folder)
    console.print(f"{path}: wrote the errors of {', '.join(families)}", highlight=False, soft_wrap=True)
