"""Saved results: one JSON file per machine, merged by workload, direction and contender; and as Markdown.

Every row names the run that it comes from, and every run its conditions. A file may have several runs, but a ratio is
always of one run. Rows and runs that earlier versions saved have fewer fields; tables show the fields that they have.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from adjoint.bench import environment
from adjoint.bench.measurement.check import OTHERS_LIMIT
from adjoint.bench.measurement.run import ABSENT, EAGER, FAILED, INACCURATE, LEFT_OUT, OK, OURS, TIMED, Result, Row
from adjoint.contract.cases import Workload
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short

FOLDER = Path("benchmarks") / "results"

UNKNOWN_SPREAD = 0.12
"""The spread of times that were saved without quartiles: larger than any spread that was measured."""

SCHEMA = 1


def save(result: Result, command: str, folder: Path = FOLDER) -> Path:
    """Writes a result into the file of its machine and returns the file."""
    name = environment.device_name(result.device)
    path = folder / f"{environment.slug(name)}.json"
    earlier = load(path) if path.exists() else {"runs": [], "rows": []}
    run = _describe_run(result, command)
    index = len(earlier["runs"])
    fresh = [_encode(row, result.ceiling, index) for row in result.rows if row.status != LEFT_OUT]
    replaced = {_key(row) for row in fresh}
    rows = [row for row in earlier["rows"] if _key(row) not in replaced] + fresh
    order = {_group(row): position for position, row in reversed([*enumerate(rows)])}
    rows.sort(key=lambda row: order[_group(row)])
    runs = [*earlier["runs"], run]
    used = sorted({row["run"] for row in rows})
    for row in rows:
        row["run"] = used.index(row["run"])
    content = _content(result, [runs[index] for index in used], rows)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def as_data(result: Result, command: str) -> dict[str, Any]:
    """A result as a file with this result alone would have it, including the rows that have no time."""
    return _content(result, [_describe_run(result, command)], [_encode(row, result.ceiling, 0) for row in result.rows])


def _content(result: Result, runs: list[dict[str, Any]], rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "device": environment.device_name(result.device),
        "device_type": result.device.type,
        "dtype": short(Workload.dtype),  # unless the name of a workload states another one
        "runs": runs,
        "rows": rows,
    }


def _describe_run(result: Result, command: str) -> dict[str, Any]:
    """A description of a run."""
    conditions = environment.conditions(command) | {
        "copy_ceiling_gb_per_s": round(result.ceiling, 1),
        "l2_bytes": environment.cache_bytes(result.device),
    }
    if result.matrix_ceiling is not None:
        conditions["matrix_ceiling_tf_per_s"] = round(result.matrix_ceiling, 1)
    return conditions


def load(path: Path) -> dict[str, Any]:
    """The content of a saved file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(f"bench: {path} cannot be read as saved results: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        raise ArgumentError(f"bench: {path} does not hold saved results of schema {SCHEMA}; delete it and save again")
    return content


def saved(folder: Path = FOLDER, device_type: str = "cuda") -> list[dict[str, Any]]:
    """The saved results of every machine of a device type, ordered by file name."""
    contents: Iterable[dict[str, Any]] = (load(path) for path in sorted(folder.glob("*.json")))
    return [content for content in contents if content["device_type"] == device_type]


def _encode(row: Row, ceiling: float, run: int) -> dict[str, Any]:
    speed = row.gigabytes_per_second
    return asdict(row) | {
        "microseconds": _round(row.microseconds, 2),
        "quartiles": None if row.quartiles is None else [round(time, 2) for time in row.quartiles],
        "gb_per_s": _round(speed, 1),
        "share_of_copy_ceiling": _round(None if speed is None else speed / ceiling, 4),
        "tf_per_s": _round(row.teraflops, 1),
        "ratio": _round(row.ratio, 4),
        # JSON has no NaN. A row without an error failed or never ran.
        "error": float(f"{row.error:.3g}") if row.error is not None and row.error == row.error else None,
        "run": run,
    }


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["direction"], row["contender"]


def _group(row: dict[str, Any]) -> tuple[str, str]:
    return row["workload"], row["direction"]


# ---------------------------------------------------------------------------------------------- markdown


def markdown(content: dict[str, Any], family: str) -> str:
    """A table of a family's rows in one saved file, with the conditions of the measurement.

    There is one line for each workload and direction. The fastest contender is bold, whichever it is, unless others are
    within its spread.
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
    notes: dict[str, str] = {}
    for (workload, direction), group in groups.items():
        fastest = _fastest(list(group.values()))
        cells = [_cell(group.get(name), name == fastest, graphs) for name in contenders]
        rates = _rates(group.get(OURS), content["runs"]) if products else ()
        speed = _speed(group.get(OURS), content["runs"], notes)
        lines.append(_line([workload, direction, *cells, *speed, *rates]))
    used = sorted({row["run"] for row in rows})
    conditions = [_conditions(content, content["runs"][index]) for index in used]
    bold = "bold is the fastest, where its lead is more than the spread: no other's first quartile is below its third"
    if any(row["status"] in TIMED and not row.get("quartiles") for row in rows):
        bold += f", or by more than {100 * UNKNOWN_SPREAD:g}% in rows that were saved without quartiles"
    legend = [
        f"Microseconds, {content['dtype']} where the workload says no other, median, cold L2; in brackets the time "
        f"over ours, so above 1 ours is faster; {bold}. GB/s and the share of the copy ceiling are ours. "
        f"Every time stands for a result checked against float64 before and after.",
        *(f"{mark} {note}" for note, mark in notes.items()),
    ]
    if any(row["status"] == INACCURATE for row in rows):
        legend.append(
            f"A time with an error beside it belongs to a result whose norm-relative error is past "
            f"{100 * OTHERS_LIMIT:g}%, and is never the bold one."
        )
    if any(row.get("ties") for row in rows):
        legend.append(
            "Ties: items in which equal values were chosen in another order than ours, the lower index first; their "
            "gradients are compared with those of the same choice."
        )
    if any(row.get("peak_bytes") for row in rows):
        legend.append(
            "GiB: the most memory a step takes beyond what was there before it, without the gradients of inputs that "
            "all items share."
        )
    if any(row.get("kept_bytes") is not None for row in rows):
        legend.append("MiB: what the forward keeps for the backward, beside the inputs.")
    if graphs:
        legend.append("Times are of CUDA graphs, replayed; “no graph” marks calls that were launched one by one.")
    return "\n".join([*lines, "", " ".join(legend), "", *conditions])


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _fastest(rows: list[dict[str, Any]]) -> str | None:
    """The contender that is ahead of all others by more than its spread and theirs; None if there is none."""
    ranked = sorted((row for row in rows if row["status"] == OK), key=lambda row: row["microseconds"])
    if not ranked:
        return None
    first, *others = ranked
    for other in others:
        if first.get("quartiles") and other.get("quartiles"):
            (_, end), (begin, _) = first["quartiles"], other["quartiles"]
        else:
            end, begin = (1 + UNKNOWN_SPREAD) * first["microseconds"], other["microseconds"]
        if end >= begin:
            return None
    return first["contender"]  # type: ignore[no-any-return]


def _cell(row: dict[str, Any] | None, is_fastest: bool, graphs: bool) -> str:
    if row is None:
        return "–"
    if row["status"] not in TIMED:
        return "FAILED" if row["status"] == FAILED else row["status"]
    accurate = row["status"] == OK
    time = f"{row['microseconds']:.1f}"
    cell = f"**{time}**" if is_fastest else time
    ratio = "" if row["contender"] == OURS or row["ratio"] is None else f" ({row['ratio']:.2f}×)"
    peak = row.get("peak_bytes")
    details = f", {peak / 2**30:.2f} GiB" if peak else ""
    if (memory := row.get("kept_bytes")) is not None:
        details += f", keeps {memory / 2**20:.0f} MiB"
    if graphs and not row.get("recorded"):
        details += ", no graph"
    if row.get("ties"):
        details += f", {row['ties']} ties"
    return cell + ratio + details + ("" if accurate else f", error {row['error']:.2g}")


def _rates(row: dict[str, Any] | None, runs: list[dict[str, Any]]) -> tuple[str, str]:
    """TF/s, and their share of the TF/s of a large product in the same run."""
    if row is None or not row.get("tf_per_s"):
        return "–", "–"
    ceiling = runs[row["run"]]["matrix_ceiling_tf_per_s"]
    return f"{row['tf_per_s']:.0f}", f"{100 * row['tf_per_s'] / ceiling:.0f}%"


def _speed(row: dict[str, Any] | None, runs: list[dict[str, Any]], notes: dict[str, str]) -> tuple[str, str]:
    """GB/s, and their share of a copy's. A share above 100% has the mark of a note, which is added to `notes`."""
    if row is None or row["gb_per_s"] is None:
        return "–", "–"
    share, mark = row["share_of_copy_ceiling"], ""
    if share > 1:
        note = _above_a_copy(row, runs[row["run"]])
        mark = notes.setdefault(note, "¹²³⁴⁵⁶⁷⁸⁹"[len(notes)] if len(notes) < 9 else f"({len(notes) + 1})")
    return f"{row['gb_per_s']:.0f}", f"{100 * share:.1f}%{mark}"


def _above_a_copy(row: dict[str, Any], run: dict[str, Any]) -> str:
    """Why a row moved its bytes faster than a copy, as far as its saved data show."""
    written, cache = row.get("written_bytes"), run.get("l2_bytes")
    if written is None:
        return (
            "Above 100%, and saved without the bytes it wrote: the text above this table says why such rows "
            "can be faster than a copy."
        )
    reasons, read_share = [], 1 - written / row["bytes"]
    if cache and written <= cache:
        size = f"{cache / 2**20:.0f} MiB"
        reasons.append(f"its results fit in the L2 of {size}, and may not have reached memory when the clock stops")
    if read_share > 0.5:
        reasons.append(f"{100 * read_share:.0f}% of its bytes are reads, faster than writes; of a copy's bytes, 50%")
    return "Above 100%: " + ("; ".join(reasons) or "nothing that was saved with it says why") + "."


def _conditions(content: dict[str, Any], run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    commit = run.get("commit") or ""
    state = f"commit {commit[:12]}{'+' * commit.endswith('+')}; " if commit else ""
    if not commit and run.get("source"):
        state = f"source {run['source']}; "
    return (
        f"{content['device']}, copy ceiling {run['copy_ceiling_gb_per_s']:.0f} GB/s; {versions}; "
        f"{run['date']}; {state}`{run['command']}`."
    )


def update_readme(path: Path, folder: Path = FOLDER) -> list[str]:
    """Replaces each family's table between its markers, from the saved GPU results.

    The markers are `<!-- bench:<family>:begin -->` and `<!-- bench:<family>:end -->`. Returns the
    families whose tables were written.
    """
    contents = saved(folder)
    if not contents:
        raise ArgumentError(f"bench: {folder} holds no results of a GPU; run `adjoint bench --save` on one first")
    return write_tables(path, "bench", lambda family: [markdown(content, family) for content in contents])


def write_tables(path: Path, kind: str, tables_of: Callable[[str], list[str]]) -> list[str]:
    """Replaces each family's tables of a kind between their markers; returns the families that have some."""
    from adjoint.ops import FAMILIES

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"bench: {path} cannot be read: {error}") from error
    families = []
    for family in FAMILIES:
        begin, end = f"<!-- {kind}:{family}:begin -->", f"<!-- {kind}:{family}:end -->"
        tables = [table for table in tables_of(family) if table]
        if begin not in text or end not in text or not tables:
            continue
        head, _, rest = text.partition(begin)
        _, _, tail = rest.partition(end)
        text = "\n\n".join([f"{head}{begin}", *tables, f"{end}{tail}"])
        families.append(family)
    if not families:
        raise ArgumentError(
            f"bench: {path} has no place for a table; mark it with <!-- {kind}:{FAMILIES[0]}:begin --> and "
            f"<!-- {kind}:{FAMILIES[0]}:end -->"
        )
    path.write_text(text, encoding="utf-8")
    return families
