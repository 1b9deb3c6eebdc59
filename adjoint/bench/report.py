"""Saved results as Markdown, and the place for it in the README."""

from pathlib import Path
from typing import Any

from adjoint.bench.check import OTHERS_LIMIT
from adjoint.bench.results import FOLDER, saved
from adjoint.bench.run import ABSENT, EAGER, FAILED, INACCURATE, OK, OURS, TIMED
from adjoint.core.errors import ArgumentError


def markdown(content: dict[str, Any], family: str) -> str:
    """A family's rows in one saved file as a table, and the conditions they were measured under.

    One line a workload and direction; the fastest in bold, whoever it is.
    """
    rows = [row for row in content["rows"] if row["family"] == family]
    if not rows:
        return ""
    contenders = list(dict.fromkeys(row["contender"] for row in rows if row["status"] != ABSENT))
    contenders.sort(key=lambda name: (name != OURS, name != EAGER))
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["direction"]), {})[row["contender"]] = row
    heads = ["workload", "direction", *contenders, "GB/s", "of copy"]
    lines = [_line(heads), _line(["---", "---", *["---:"] * (len(contenders) + 2)])]
    for (workload, direction), group in groups.items():
        times = [row["microseconds"] for row in group.values() if row["status"] == OK]
        cells = [_cell(group.get(name), min(times, default=None)) for name in contenders]
        lines.append(_line([workload, direction, *cells, *_speed(group.get(OURS))]))
    used = sorted({row["run"] for row in rows})
    conditions = [_conditions(content, content["runs"][index]) for index in used]
    legend = (
        f"Microseconds, {content['dtype']} where the workload says no other, median, cold L2; in brackets the time "
        f"over ours, so above 1 ours is faster; bold is the fastest. GB/s and the share of the copy ceiling are ours. "
        f"Every time stands for a result checked against float64 before and after."
    )
    if any(row["status"] == INACCURATE for row in rows):
        legend += (
            f" A time with an error beside it belongs to a result whose norm-relative error is past "
            f"{100 * OTHERS_LIMIT:g}%, and is never the bold one."
        )
    return "\n".join([*lines, "", legend, "", *conditions])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: dict[str, Any] | None, best: float | None) -> str:
    if row is None:
        return "–"
    if row["status"] not in TIMED:
        return "FAILED" if row["status"] == FAILED else row["status"]
    accurate = row["status"] == OK
    time = f"{row['microseconds']:.1f}"
    shown = f"**{time}**" if accurate and row["microseconds"] == best else time
    ratio = "" if row["contender"] == OURS or row["ratio"] is None else f" ({row['ratio']:.2f}×)"
    return shown + ratio + ("" if accurate else f", error {row['error']:.2g}")


def _speed(row: dict[str, Any] | None) -> tuple[str, str]:
    if row is None or row["gb_per_s"] is None:
        return "–", "–"
    return f"{row['gb_per_s']:.0f}", f"{100 * row['share_of_copy_ceiling']:.1f}%"


def _conditions(content: dict[str, Any], run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    return (
        f"{content['device']}, copy ceiling {run['copy_ceiling_gb_per_s']:.0f} GB/s; {versions}; "
        f"{run['date']}; `{run['command']}`."
    )


def update_readme(path: Path, folder: Path = FOLDER) -> list[str]:
    """Replaces each family's table between its markers, from the saved GPU results.

    The markers are `<!-- bench:<family>:begin -->` and `<!-- bench:<family>:end -->`. Returns the
    families whose tables were written.
    """
    from adjoint.ops import FAMILIES

    contents = saved(folder)
    if not contents:
        raise ArgumentError(f"bench: {folder} holds no results of a GPU; run `adjoint bench --save` on one first")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"bench: {path} cannot be read: {error}") from error
    written = []
    for family in FAMILIES:
        begin, end = f"<!-- bench:{family}:begin -->", f"<!-- bench:{family}:end -->"
        tables = [table for content in contents if (table := markdown(content, family))]
        if begin not in text or end not in text or not tables:
            continue
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = "\n\n".join([f"{head}{begin}", *tables, f"{end}{tail}"])
        written.append(family)
    if not written:
        raise ArgumentError(
            f"bench: {path} has no place for a table; mark it with <!-- bench:{FAMILIES[0]}:begin --> and "
            f"<!-- bench:{FAMILIES[0]}:end -->"
        )
    path.write_text(text, encoding="utf-8")
    return written
