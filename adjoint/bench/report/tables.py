"""The tables of `adjoint bench`, for a terminal."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from adjoint.bench.measurement.overhead import TARGET, Overhead
from adjoint.bench.measurement.run import ABSENT, FAILED, INACCURATE, LEFT_OUT, OURS, TIMED, Result, Row
from adjoint.contract.cases import Workload
from adjoint.core.problem import short

NARROW = 120
"""In a terminal of fewer columns, the times are shown in a table for each workload and direction."""


def times(result: Result, name: str, width: int = NARROW) -> Iterator[RenderableType]:
    """Tables with one line for each contender. A line without a time says why."""
    where = "GPU time, cold L2" if result.device.type == "cuda" else "CPU time, workloads cut to small sizes"
    title = (
        f"{escape(name)}: {where}, {short(Workload.dtype)} where the workload says no other, medians; "
        f"copy ceiling of this run {result.ceiling:.0f} GB/s"
    )
    caption = "× ours: its time over ours, so above 1 ours is faster. Error: norm-relative, against float64. " + (
        "" if result.matrix_ceiling is None else f"A large product of matrices: {result.matrix_ceiling:.0f} TF/s."
    )
    if width < NARROW:
        yield from (f"[italic]{title}[/italic]", *_by_workload(result), f"\n[italic]{caption}[/italic]")
    else:
        yield _in_one_table(result, title, caption)


def _by_workload(result: Result) -> Iterator[RenderableType]:
    """A heading and a small table for each workload and direction."""
    for (workload, direction), rows in groupby(result.rows, lambda row: (row.workload, row.direction)):
        yield Text(f"\n{workload}, {direction}", style="bold")
        table = Table(box=None, padding=(0, 1))
        table.add_column("contender", no_wrap=True)
        for head in ("µs", "of copy", "× ours"):
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column("error")
        for row in rows:
            microseconds, *between, error = _cells(row, result.ceiling)
            share, ratio = between[-2:]
            style = "bold" if row.contender == OURS else None
            table.add_row(escape(row.contender), microseconds, share, ratio, error, style=style)
        yield table


def _in_one_table(result: Result, title: str, caption: str) -> Table:
    table = Table(title=title, caption=caption, title_justify="left", caption_justify="left")
    table.add_column("workload", no_wrap=True)
    table.add_column("direction", no_wrap=True)
    table.add_column("contender", no_wrap=True)
    counted = any(row.operations for row in result.rows)
    for head in ("µs", "quartiles", "GB/s", "of copy", *(("TF/s", "GiB") if counted else ()), "× ours"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("error")
    previous: tuple[str, str] | None = None
    for row in result.rows:
        group = row.workload, row.direction
        if previous is not None and group != previous:
            table.add_section()
        labels = ("", "") if group == previous else group
        previous = group
        style = "bold" if row.contender == OURS else None
        table.add_row(*map(escape, labels), escape(row.contender), *_cells(row, result.ceiling, counted), style=style)
    return table


def _cells(row: Row, ceiling: float, counted: bool = False) -> Iterable[str]:
    speed = row.gigabytes_per_second
    if row.status not in TIMED or row.microseconds is None or speed is None:
        words = {FAILED: "[red]FAILED[/red]", ABSENT: "[dim]not installed[/dim]", LEFT_OUT: "[dim]left out[/dim]"}
        return words.get(row.status, "[yellow]n/a[/yellow]"), *[""] * (6 if counted else 4), escape(row.note)
    ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
    if row.ratio is not None and row.ratio < 1:
        ratio = f"[yellow]{ratio}[/yellow]"
    ties = f"{row.ties} ties in another order" if row.ties else ""
    error = escape(", ".join(filter(None, (f"{row.error:.1e}", row.guarantee, ties, row.note))))
    if row.status == INACCURATE:
        error = f"[yellow]INACCURATE: {escape(row.note)}[/yellow]"
    products = ("" if row.teraflops is None else f"{row.teraflops:.0f}", _memory(row))
    return (
        f"{row.microseconds:.1f}",
        "" if row.quartiles is None else "–".join(f"{time:.1f}" for time in row.quartiles),
        f"{speed:.{0 if speed >= 100 else 2}f}",
        f"{100 * speed / ceiling:.1f}%",
        *(products if counted else ()),
        ratio,
        error,
    )


def _memory(row: Row) -> str:
    """The GiB at the peak of a step, or the GiB kept for a backward."""
    if row.kept_bytes is not None:
        return f"keeps {row.kept_bytes / 2**30:.3f}"
    return "" if row.peak_bytes is None else f"{row.peak_bytes / 2**30:.2f}"


def overheads(rows: list[Overhead], width: int = NARROW) -> Table:
    """A table with one line for each op and dtype; in a narrow terminal, without the columns of torch."""
    table = Table(
        title=f"Microseconds a call on a 4×64 tensor, no grad; target: host cost ≤ {TARGET:g} on the CPU",
        caption=(
            "Host cost = whole call − arithmetic of its plan. On CUDA these are launches, not waited for, and "
            "have no target."
        ),
        title_justify="left",
        caption_justify="left",
    )
    is_narrow = width < NARROW
    for head in ("op", "dtype", "device", "plan"):
        table.add_column(head, no_wrap=True)
    for head in ("whole call", "arithmetic", "host cost", *(() if is_narrow else ("torch", "torch in float64"))):
        table.add_column(head, justify="right")
    table.add_column("verdict")
    for row in rows:
        verdict = "[green]inside[/green]" if row.inside else "[red]over[/red]"
        numbers = (row.whole, row.arithmetic, row.host, *(() if is_narrow else (row.torch, row.torch_in_float64)))
        table.add_row(
            row.op,
            row.dtype,
            row.device,
            row.plan,
            *(f"{number:.1f}" for number in numbers),
            verdict if row.device == "cpu" else "–",
        )
    return table
