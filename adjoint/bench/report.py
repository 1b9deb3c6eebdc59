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
    products = any(row.get("tf_per_s") for row in rows)
    graphs = any(row.get("recorded") for row in rows)
    heads = ["workload", "direction", *contenders, "GB/s", "of copy", *(["TF/s", "of matmul"] if products else [])]
    lines = [_line(heads), _line(["---", "---", *["---:"] * (len(heads) - 2)])]
    for (workload, direction), group in groups.items():
        times = [row["microseconds"] for row in group.values() if row["status"] == OK]
        cells = [_cell(group.get(name), min(times, default=None), graphs) for name in contenders]
        rates = _rates(group.get(OURS), content["runs"]) if products else ()
        lines.append(_line([workload, direction, *cells, *_speed(group.get(OURS)), *rates]))
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
    if any(row.get("peak_bytes") for row in rows):
        legend += (
            " GiB: the most memory a step takes beyond what was there before it, without the gradients of inputs that "
            "all items share."
        )
    if any(row.get("kept_bytes") is not None for row in rows):
        legend += " MiB: what the forward keeps for the backward, beside the inputs."
    if graphs:
        legend += " Times are of CUDA graphs, replayed; “no graph” marks calls that were launched one by one."
    return "\n".join([*lines, "", legend, "", *conditions])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(row: dict[str, Any] | None, best: float | None, graphs: bool) -> str:
    if row is None:
        return "–"
    if row["status"] not in TIMED:
        return "FAILED" if row["status"] == FAILED else row["status"]
    accurate = row["status"] == OK
    time = f"{row['microseconds']:.1f}"
    shown = f"**{time}**" if accurate and row["microseconds"] == best else time
    ratio = "" if row["contender"] == OURS or row["ratio"] is None else f" ({row['ratio']:.2f}×)"
    peak = row.get("peak_bytes")
    details = f", {peak / 2**30:.2f} GiB" if peak else ""
    if (kept := row.get("kept_bytes")) is not None:
        details += f", keeps {kept / 2**20:.0f} MiB"
    if graphs and not row.get("recorded"):
        details += ", no graph"
    return shown + ratio + details + ("" if accurate else f", error {row['error']:.2g}")


def _rates(row: dict[str, Any] | None, runs: list[dict[str, Any]]) -> tuple[str, str]:
    """TF/s, and their share of what a large product reached in the same run."""
    if row is None or not row.get("tf_per_s"):
        return "–", "–"
    ceiling = runs[row["run"]]["matrix_ceiling_tf_per_s"]
    return f"{row['tf_per_s']:.0f}", f"{100 * row['tf_per_s'] / ceiling:.0f}%"


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
