"""The certificate: what was promised and measured on a machine, and bits of fixed inputs, as JSON and as a page."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import adjoint
from adjoint.core.errors import ArgumentError
from adjoint.verify.certificate.page import certificate_page
from adjoint.verify.checks.digests import CHECK as DIGEST
from adjoint.verify.report import summary
from adjoint.verify.report.files import paths
from adjoint.verify.report.tables import share_of_limit, worst
from adjoint.verify.run import Row

SCHEMA = 1
"""The version of the files; it goes up when their meaning changes."""


def describe(rows: Sequence[Row], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The certificate of a run, from its rows and the facts about it."""
    tallies = summary.tallies(rows)
    failed = sum(entry.failures for entry in tallies)
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        **facts,
        "verdict": "unfinished" if not facts.get("complete", True) else "failed" if failed else "passed",
        "passed": sum(entry.checks - entry.failures for entry in tallies),
        "failed": failed,
        "kernel_code": kernel_code(),
        "ops": [asdict(entry) for entry in tallies],
        "skus": summary.skus(rows),
        "checks": _checks(rows),
        "errors": _errors(rows),
        "digests": _digests(rows),
        "failures": [asdict(row) for row in rows if not row.passed],
    }


def kernel_code() -> dict[str, str]:
    """A digest of the source of the kernels of every family, and of the functions that they share."""
    folder = Path(adjoint.__file__).parent
    texts: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if parts[0] not in ("ops", "device"):
            continue
        text = path.read_text(encoding="utf-8")
        if re.search(r"^@(triton|gluon)\.jit", text, re.MULTILINE):
            texts.setdefault(parts[1] if parts[0] == "ops" else "device", []).append(text)
    return {family: hashlib.sha256("\0".join(own).encode()).hexdigest()[:32] for family, own in texts.items()}


def _checks(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The checks of each op, dtype and plan: the promise, the measurement that came closest to it, and the counts."""
    groups: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        if row.check != DIGEST:
            groups.setdefault((row.op, row.dtype, row.plan, row.check), []).append(row)
    entries = []
    for (op, dtype, plan, check), group in groups.items():
        guarantee, measured = worst(group)
        counts = {"checks": len(group), "failed": sum(not row.passed for row in group)}
        where = {"op": op, "dtype": dtype, "plan": plan, "check": check}
        entries.append(where | {"promise": guarantee, "measured": measured} | counts)
    return entries


def _errors(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The largest error of each output as a share of its bound, by op, dtype and plan."""
    shares: dict[tuple[str, str, str, str], tuple[float, Row]] = {}
    for row in rows:
        share = share_of_limit(row.measured) if row.check == "accuracy" else None
        if share is not None:
            key = row.op, row.dtype, row.plan, row.measured.partition(":")[0]
            if key not in shares or share > shares[key][0]:
                shares[key] = share, row
    return [
        {"op": op, "dtype": dtype, "plan": plan, "output": output, "share": share, "promise": row.guarantee}
        for (op, dtype, plan, output), (share, row) in shares.items()
    ]


def _digests(rows: Sequence[Row]) -> list[dict[str, Any]]:
    entries = []
    for row in rows:
        if row.check == DIGEST and row.passed:
            case, output, digest = row.measured.rsplit(": ", 2)
            where = {"op": row.op, "dtype": row.dtype, "plan": row.plan, "case": case, "output": output}
            entries.append(where | {"bits": row.guarantee, "digest": digest})
    return entries


# ------------------------------------------------------------------------------------------------- files


def save(certificate: Mapping[str, Any], path: Path) -> tuple[Path, Path]:
    """Writes both files and returns their paths."""
    data, page = paths(path)
    try:
        data.write_text(_as_json(certificate), encoding="utf-8")
        page.write_text(certificate_page(certificate), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"verify: cannot write a certificate to {path}: {error}") from error
    return data, page


def _as_json(certificate: Mapping[str, Any]) -> str:
    """JSON with one line for each entry of a list."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    fields = []
    for name, value in certificate.items():
        if isinstance(value, list) and value:
            fields.append(f" {text(name)}: [\n  " + ",\n  ".join(map(text, value)) + "\n ]")
        else:
            fields.append(f" {text(name)}: {text(value)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


_COMPARED: Mapping[str, tuple[str, ...]] = {
    "versions": (),
    "kernel_code": (),
    "skus": (),
    "checks": ("op", "dtype", "plan", "check"),
    "errors": ("op", "dtype", "plan", "output", "share"),
    "digests": ("op", "dtype", "plan", "case", "output", "bits", "digest"),
    "failures": ("op", "dtype", "plan", "check", "measured", "detail"),
}
"""The names in a file that a comparison reads, and those in each entry of a list."""


def _is_read(name: str, value: Any) -> bool:
    """Whether a comparison can read the value that a file has under a name."""
    if name in ("versions", "kernel_code"):
        return isinstance(value, dict) and all(isinstance(item, str | None) for item in value.values())
    if name == "skus":
        return isinstance(value, list) and all(isinstance(item, str) for item in value)
    return isinstance(value, list) and all(
        isinstance(item, dict)
        and all(isinstance(item.get(field), float | int if field == "share" else str) for field in _COMPARED[name])
        for item in value
    )


def load(path: Path) -> dict[str, Any]:
    """The certificate in a file."""
    data, _ = paths(path)
    try:
        content: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
        if not isinstance(content, dict) or "schema" not in content:
            raise ValueError("it is no certificate")
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, and this version reads {SCHEMA}")
        if absent := [name for name in _COMPARED if name not in content]:
            raise ValueError(f"it lacks {', '.join(absent)}")
        if wrong := [name for name in _COMPARED if not _is_read(name, content[name])]:
            raise ValueError(f"what it has as {', '.join(wrong)} is of another form")
    except OSError as error:
        raise ArgumentError(f"certificate: {data} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ArgumentError(f"certificate: {data} cannot be read as a file of verify --certificate: {error}") from error
    return content
