"""What `adjoint verify` shows of its rows: a line for each op, details on request, failures in full."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from adjoint.ops import FAMILIES, OPS, cases
from adjoint.ops.names import path_of
from adjoint.verify.checks.digests import CHECK as DIGEST
from adjoint.verify.checks.numerics import NO_FIGURE
from adjoint.verify.report.tables import share_of_limit, verdicts
from adjoint.verify.run import Row

WIDE = 120
"""The width of a terminal, in columns, from which details are a table. In a narrower one they are lines that wrap."""


def names() -> dict[str, list[str]]:
    """The ops of every family, as users name them."""
    named: dict[str, list[str]] = {family: [] for family in FAMILIES}
    for folder, module in zip(OPS, cases(), strict=True):
        ops = dict.fromkeys(path_of(subject).partition("[")[0] for subject in module.SUBJECTS)
        named[folder.partition(".")[0]] += ops
    return named


def op_of(name: str) -> str:
    """The op that a row is about: for a mode its op, and for a folder whose calls are refused the folder's first op."""
    if name in OPS:
        return path_of(cases()[OPS.index(name)].SUBJECTS[0]).partition("[")[0]
    return _paths().get(name, name).partition("[")[0]


@cache
def _paths() -> dict[str, str]:
    return {subject.name: path_of(subject) for module in cases() for subject in module.SUBJECTS}


@dataclass(frozen=True)
class Tally:
    """A summary of the rows of an op.

    Attributes:
        plans: the names of the plans that ran.
        share: the largest error as a share of its bound; None if no error was measured.
    """

    op: str
    plans: tuple[str, ...]
    checks: int
    failures: int
    share: float | None

    @property
    def is_sound(self) -> bool:
        return not self.failures


def tally(op: str, rows: Sequence[Row]) -> Tally:
    counted = [row for row in rows if row.check != DIGEST or not row.passed]
    plans = dict.fromkeys(plan for row in rows for plan in row.plan.split(" + ") if plan)
    shares = [
        share for row in counted if row.check == "accuracy" and (share := share_of_limit(row.measured)) is not None
    ]
    return Tally(op, tuple(plans), len(counted), sum(not row.passed for row in counted), max(shares, default=None))


def tallies(rows: Iterable[Row]) -> list[Tally]:
    """The tally of each op, in the order of the package."""
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(op_of(row.op), []).append(row)
    order = [op for ops in names().values() for op in ops]
    known = sorted(by_op, key=lambda op: order.index(op) if op in order else len(order))
    return [tally(op, by_op[op]) for op in known]


def line(entry: Tally, missing: int = 0) -> Text:
    """The line of an op, of fewer than 80 columns. An op with missing jobs has not passed."""
    plans = f"{len(entry.plans)} plan{'s' * (len(entry.plans) != 1)}"
    checks = f"{entry.checks} check{'s' * (entry.checks != 1)}"
    share = "" if entry.share is None else f"error ≤ {_percent(entry.share)} of bound"
    if not entry.is_sound:
        verdict = Text(f"{entry.failures} FAILED", "bold red")
    else:
        verdict = Text("cut off", "yellow") if missing else Text("passed", "green")
    return Text(f"{entry.op:<28} {plans:>7} {checks:>10}  {share:<22} ").append(verdict)


def _percent(share: float) -> str:
    if share >= 10:
        return "over 999%"
    return f"{math.floor(100 * share)}%"


def skus(rows: Iterable[Row]) -> list[str]:
    """The SKUs of the plans that ran."""
    return sorted({sku for row in rows for sku in row.skus})


def show_details(console: Console, rows: Sequence[Row], title: str) -> None:
    """Prints every check of every op, dtype and plan, and the SKUs that ran."""
    shown = [row for row in rows if row.check != DIGEST]
    if console.width >= WIDE:
        console.print(verdicts(shown, title))
    else:
        _show_lines(console, shown, title)
    names = skus(rows)
    if names:
        console.print(Text(f"SKUs that ran: {len(names)}", "bold"))
        for sku in names:
            console.print(Padding(Text(sku), (0, 0, 0, 2)))


def _show_lines(console: Console, rows: Sequence[Row], title: str) -> None:
    console.print(Text(title, "bold"))
    table: Table = verdicts(rows, title)
    cells = [[str(cell) for cell in column.cells] for column in table.columns]
    previous: tuple[str, ...] = ()
    for op, dtype, plan, check, guarantee, measured, verdict in zip(*cells, strict=True):
        if (op, dtype, plan) != previous:
            previous = op, dtype, plan
            console.print(f"[bold cyan]{op}[/] {dtype} {plan}", highlight=False)
        words = ": ".join(filter(None, (check, measured, guarantee)))
        console.print(Padding(f"{words}: {verdict}", (0, 0, 0, 4)), highlight=False)


def show_failures(console: Console, rows: Iterable[Row]) -> None:
    """Prints each failure in full."""
    for row in rows:
        if not row.passed:
            where = " ".join(filter(None, (row.op, row.dtype, row.plan)))
            words = f"FAILED {where}: {row.check}: {row.measured}: {row.detail}"
            console.print(Text(words, style="red"), soft_wrap=True)


def show_missing_figures(console: Console, rows: Iterable[Row]) -> None:
    unknown = sum(NO_FIGURE in row.measured for row in rows)
    if unknown:
        console.print(f"{unknown} results have {NO_FIGURE}: verify --record writes them", highlight=False)


def as_data(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    """All rows and the facts about the run, as JSON types."""
    summary = tallies(rows)
    return {
        **facts,
        "passed": sum(entry.checks - entry.failures for entry in summary),
        "failed": sum(entry.failures for entry in summary),
        "ops": [asdict(entry) for entry in summary],
        "skus": skus(rows),
        "rows": [asdict(row) for row in rows],
    }
