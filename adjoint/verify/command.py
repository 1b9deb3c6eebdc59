"""What `adjoint verify` does, once its arguments are read."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from adjoint.bench import environment
from adjoint.core.errors import ArgumentError
from adjoint.verify.listing import depth
from adjoint.verify.listing.jobs import Job, jobs
from adjoint.verify.parallel import shards, workers
from adjoint.verify.parallel.shards import Part, Shard
from adjoint.verify.report import summary
from adjoint.verify.report.summary import op_of
from adjoint.verify.run import Row

PASSED, FAILED, INTERRUPTED = 0, 1, 130
"""Exit statuses. The last one is the status that shells give for Ctrl-C."""

QUICK, THOROUGH, EVERYTHING = "quick", "thorough", "everything"
"""The depths: every plan and promise once; all checks; and all checks, with even those that hardly depend on the dtype
in every dtype."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run: its exit status, its rows, and facts about it."""

    status: int
    rows: list[Row]
    facts: dict[str, Any]

    @property
    def data(self) -> dict[str, Any]:
        return summary.as_data(self.rows, self.facts)


def check(
    console: Console,
    ops: Sequence[str],
    device: torch.device,
    *,
    deep: str = QUICK,
    processes: int | None = None,
    shard: Shard = Shard(),  # noqa: B008
    path: Path | None = None,
    verbose: bool = False,
) -> Outcome:
    """Runs the checks of a shard, shows their results, and saves their rows if there is a path."""
    start = time.perf_counter()
    processes = workers.default_processes(device) if processes is None else processes
    if processes < 1:
        raise ArgumentError(f"verify: --jobs must be 1 or more, not {processes}")
    with console.status("Which checks there are"), _in_one_thread():
        listing: workers.Listing
        if deep == QUICK:
            listing = partial(depth.jobs_at, depth.stops(ops or None, device), ops or None, device)
        else:
            listing = partial(jobs, ops or None, device, deep == EVERYTHING)
        everything = listing()
    rows: dict[int, list[Row]] = {}
    part = Part(_suite(everything, device), shard, rows)
    if path is not None:
        shards.save(part, path)  # so that a path that cannot be written to is refused before minutes of work
    waiting = [op_of(everything[position].op) for position in part.positions]
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
                op = op_of(everything[position].op)
                waiting.remove(op)
                if verbose:
                    words = f"{len(rows)}/{len(part.positions)} {everything[position].label}: {_count(fresh)}"
                    console.print(Text(words, style="dim"), soft_wrap=True)
                elif op not in waiting:
                    own = [row for place in sorted(rows) for row in rows[place] if op_of(row.op) == op]
                    console.print(summary.line(summary.tally(op, own)))
    facts = {
        "device": part.suite.device,
        "depth": deep,
        "versions": dict(part.suite.versions),
        "source": part.suite.source,
        "shard": str(shard),
        "complete": part.is_complete,
        "seconds": round(time.perf_counter() - start, 1),
    }
    title = f"Checks on {device}" + f", shard {shard}" * (shard.count > 1)
    status = _report(console, part, title, facts, verbose, waiting)
    if path is not None:
        shards.save(part, path)
    return Outcome(status, part.all_rows, facts)


@contextmanager
def _in_one_thread() -> Iterator[None]:
    """Runs a block in one thread, because threads that share small tensors wait for each other on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def merge(console: Console, paths: Sequence[Path], verbose: bool = False) -> Outcome:
    """Shows the rows of all shards of a run."""
    whole = shards.merge([(path, shards.load(path)) for path in paths])
    facts = {"device": whole.suite.device, "versions": dict(whole.suite.versions), "source": whole.suite.source}
    if not verbose:
        for entry in summary.tallies(whole.all_rows):
            console.print(summary.line(entry))
    status = _report(console, whole, f"Checks on {whole.suite.device}", facts, verbose)
    return Outcome(status, whole.all_rows, facts | {"complete": whole.is_complete})


def _suite(everything: Sequence[Job], device: torch.device) -> shards.Suite:
    versions = environment.versions()
    relevant = {name: versions[name] for name in ("python", "adjoint", "torch", "triton", "cuda", "driver")}
    return shards.describe(everything, environment.device_name(device), relevant)


def _count(rows: Sequence[Row]) -> str:
    failures = sum(not row.passed for row in rows)
    return f"{failures} of {len(rows)} FAILED" if failures else f"{len(rows)} passed"


def _show_unfinished(console: Console, part: Part, waiting: Sequence[str]) -> None:
    """Prints a line for each op of which some checks ran, and the names of the ops of which none did."""
    began = [entry for entry in summary.tallies(part.all_rows) if entry.op in waiting]
    for entry in began:
        console.print(summary.line(entry, missing=waiting.count(entry.op)))
    untried = dict.fromkeys(op for op in waiting if op not in {entry.op for entry in began})
    if untried:
        console.print(Text(f"Not begun: {', '.join(untried)}", "dim"))


def _report(
    console: Console, part: Part, title: str, facts: dict[str, Any], verbose: bool, waiting: Sequence[str] = ()
) -> int:
    """Shows details on request, the failures in full, and the counts. Returns the exit status."""
    rows = part.all_rows
    if verbose:
        summary.show_details(console, rows, title)
    elif not part.is_complete:
        _show_unfinished(console, part, waiting)
    summary.show_failures(console, rows)
    summary.show_missing_figures(console, rows)
    if not part.is_complete:
        console.print(Text(f"Interrupted: {len(part.rows)} of {len(part.positions)} jobs ran", style="red"))
    every = summary.tallies(rows)
    failures = sum(entry.failures for entry in every)
    plans = {(entry.op, plan) for entry in every for plan in entry.plans}
    seconds = f", {facts['seconds']:.0f} s" if "seconds" in facts else ""
    counts = {"op": len(every), "plan": len(plans), "SKU": len(summary.skus(rows))}
    words = ", ".join(f"{count} {name}{'s' * (count != 1)}" for name, count in counts.items())
    console.print(f"{title}: {words}{seconds}", highlight=False)
    console.print(f"{sum(entry.checks for entry in every) - failures} passed, {failures} failed", highlight=False)
    if not part.is_complete:
        return INTERRUPTED
    return FAILED if failures else PASSED
