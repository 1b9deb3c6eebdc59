"""The table of verdicts, and the share of its limit that an error takes."""

import re
from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from adjoint.verify.run import Row


def verdicts(rows: Sequence[Row], title: str) -> Table:
    """A table with one line for each op, check, dtype and plan."""
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
        table.add_row(*map(escape, (*key, *worst(group))), verdict)
    return table


def worst(group: Sequence[Row]) -> tuple[str, str]:
    """The guarantee and the measurement of the row that comes closest to its limit, or that is furthest past it.

    If rows have failed, only they count. If no row has an error with a limit, the measurement of several rows is their
    number.
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
    """The share of its limit that an error such as "dup: 0.5 ulp (limit 0.51)" takes; None for other texts."""
    number = r"(\d[\d.e+-]*|inf|nan)"  # matched as a whole word, because an output may be named y_0
    match = re.search(rf"(?<!\S){number} [^()]*\(limit {number}\)", measured)
    if match is None:
        return None
    value, limit = float(match[1]), float(match[2])
    share = value / limit if limit else value
    return share if share == share else float("inf")
