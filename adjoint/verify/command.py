"""What `adjoint verify` does, once its arguments are read, and its table."""

import re
from collections.abc import Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from adjoint.bench import environment
from adjoint.core.errors import ArgumentError
from adjoint.verify import shards, workers
from adjoint.verify.jobs import Job, jobs
from adjoint.verify.numerics import NO_FIGURE
from adjoint.verify.run import Row
from adjoint.verify.shards import Part, Shard

PASSED, FAILED, INTERRUPTED = 0, 1, 130
"""Exit statuses; the last is what shells give for Ctrl-C."""


def check(
    console: Console,
    ops: Sequence[str],
    device: torch.device,
    *,
    thorough: bool,
    processes: int | None,
    shard: Shard,
    path: Path | None,
) -> int:
    """Runs the checks of a shard, shows their rows, and saves them where there is a path. Returns the exit status."""
    processes = workers.default_processes(device) if processes is None else processes
    if processes < 1:
        raise ArgumentError(f"verify: --jobs must be 1 or more, not {processes}")
    listing = partial(jobs, ops or None, device, thorough)
    everything = listing()
    rows: dict[int, list[Row]] = {}
    part = Part(_suite(everything, device), shard, rows)
    if path is not None:
        shards.save(part, path)  # a path that cannot be written to is refused before hours of work
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(part.positions))

        def announce(job: Job) -> None:
            progress.update(task, description=escape(job.label))

        if processes == 1:
            results = workers.run_here(everything, part.positions, announce)
        else:
            results = workers.run_in_processes(
                listing, everything, part.positions, announce, processes=processes, device=device
            )
        with suppress(KeyboardInterrupt), closing(results):
            for position, fresh in results:
                rows[position] = fresh
                progress.advance(task)
                line = f"{len(rows)}/{len(part.positions)} {everything[position].label}: {_count(fresh)}"
                console.print(Text(line, style="dim"), soft_wrap=True)
    status = _report(console, part, f"Checks on {device}" + f", shard {shard}" * (shard.count > 1))
    if path is not None:
        shards.save(part, path)
    return status


def merge(console: Console, paths: Sequence[Path]) -> int:
    """Shows the rows of all shards of a run. Returns the exit status."""
    whole = shards.merge([(path, shards.load(path)) for path in paths])
    return _report(console, whole, f"Checks on {whole.suite.device}")


def _suite(everything: Sequence[Job], device: torch.device) -> shards.Suite:
    versions = environment.versions()
    relevant = {name: versions[name] for name in ("python", "torch", "triton", "cuda", "driver")}
    return shards.describe(everything, environment.device_name(device), relevant)


def _count(rows: Sequence[Row]) -> str:
    failures = sum(not row.passed for row in rows)
    return f"{failures} of {len(rows)} FAILED" if failures else f"{len(rows)} passed"


def _report(console: Console, part: Part, title: str) -> int:
    """Shows a table of all rows, the failures in full and the counts. Returns the exit status."""
    rows = part.all_rows
    console.print(verdicts(rows, title))
    failures = [row for row in rows if not row.passed]
    for row in failures:
        where = " ".join(filter(None, (row.op, row.dtype, row.plan)))
        console.print(Text(f"FAILED {where}: {row.check}: {row.measured}: {row.detail}", style="red"), soft_wrap=True)
    unknown = sum(NO_FIGURE in row.measured for row in rows)
    if unknown:
        console.print(f"{unknown} results have {NO_FIGURE}: verify --record writes them", highlight=False)
    if not part.is_complete:
        console.print(Text(f"Interrupted: {len(part.rows)} of {len(part.positions)} checks ran", style="red"))
    console.print(f"{len(rows) - len(failures)} passed, {len(failures)} failed", highlight=False)
    if not part.is_complete:
        return INTERRUPTED
    return FAILED if failures else PASSED


# ------------------------------------------------------------------------------------------------ table


def verdicts(rows: Sequence[Row], title: str) -> Table:
    """One line for each op, check, dtype and plan."""
    table = Table(title=escape(title), title_justify="left")
    for head in ("op", "dtype", "plan", "check"):
        table.add_column(head, no_wrap=True)
    for head in ("guarantee", "measured"):
        table.add_column(head)
    table.add_column("verdict", no_wrap=True)
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.op, row.dtype, row.plan, row.check), []).append(row)
    order = {key: place for place, key in enumerate(dict.fromkeys(key[:3] for key in groups))}
    previous = ""
    for key in sorted(groups, key=lambda key: order[key[:3]]):
        group = groups[key]
        if previous and key[0] != previous:
            table.add_section()
        previous = key[0]
        failed = sum(not row.passed for row in group)
        verdict = f"[red]{failed} of {len(group)} FAILED[/red]" if failed else "[green]passed[/green]"
        table.add_row(*map(escape, (*key, *_worst(group))), verdict)
    return table


def _worst(group: Sequence[Row]) -> tuple[str, str]:
    """The guarantee and the measurement of the row that comes closest to its limit, or goes past it.

    Rows that measured no error beside a limit are counted instead.
    """
    failed = [row for row in group if not row.passed]
    measured = [(share, row) for row in failed or group if (share := share_of_limit(row.measured)) is not None]
    if measured:
        row = max(measured, key=lambda pair: pair[0])[1]
        return row.guarantee, row.measured
    row = (failed or list(group))[0]
    alike = len({r.guarantee for r in group}) == 1
    guarantee = row.guarantee if alike or failed else ""
    return guarantee, row.measured if len(group) == 1 or failed else f"{len(group)} cases"


def share_of_limit(measured: str) -> float | None:
    """The share of its limit an error like "dup: 0.5 ulp (limit 0.51)" takes up; None for other words."""
    number = r"(\d[\d.e+-]*|inf|nan)"  # a word of its own: an output may be named y_0
    match = re.search(rf"(?<!\S){number} [^()]*\(limit {number}\)", measured)
    if match is None:
        return None
    value, limit = float(match[1]), float(match[2])
    share = value / limit if limit else value
    return share if share == share else float("inf")
