"""Saved results: one JSON file per machine, merged by workload, direction and contender.

Every row names the run it comes from, and every run its conditions: a file may hold several, and a
ratio was always taken within one.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from adjoint.bench import environment
from adjoint.bench.run import LEFT_OUT, Result, Row
from adjoint.contract.cases import Workload
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short

FOLDER = Path("benchmarks") / "results"
SCHEMA = 1


def save(result: Result, command: str, folder: Path = FOLDER) -> Path:
    """Writes a result into the file of its machine and returns the file."""
    name = environment.device_name(result.device)
    path = folder / f"{environment.slug(name)}.json"
    earlier = load(path) if path.exists() else {"runs": [], "rows": []}
    run = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": command,
        "versions": environment.versions(),
        "copy_ceiling_gb_per_s": round(result.ceiling, 1),
    }
    if result.matrix_ceiling is not None:
        run["matrix_ceiling_tf_per_s"] = round(result.matrix_ceiling, 1)
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
    content = {
        "schema": SCHEMA,
        "device": name,
        "device_type": result.device.type,
        "dtype": short(Workload.dtype),  # where the name of a workload says no other
        "runs": [runs[index] for index in used],
        "rows": rows,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


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
    """The saved results of every machine of a type, by name of file."""
    contents: Iterable[dict[str, Any]] = (load(path) for path in sorted(folder.glob("*.json")))
    return [content for content in contents if content["device_type"] == device_type]


def _encode(row: Row, ceiling: float, run: int) -> dict[str, Any]:
    speed = row.gigabytes_per_second
    return asdict(row) | {
        "microseconds": _round(row.microseconds, 2),
        "gb_per_s": _round(speed, 1),
        "share_of_copy_ceiling": _round(None if speed is None else speed / ceiling, 4),
        "tf_per_s": _round(row.teraflops, 1),
        "ratio": _round(row.ratio, 4),
        # JSON has no NaN; a row without an error is one that failed or never ran.
        "error": float(f"{row.error:.3g}") if row.error is not None and row.error == row.error else None,
        "run": run,
    }


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["workload"], row["direction"], row["contender"]


def _group(row: dict[str, Any]) -> tuple[str, str]:
    return row["workload"], row["direction"]
