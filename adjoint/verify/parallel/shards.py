"""Shards of a run: which jobs a shard has, the file that it is saved in, and the whole that all shards make up.

Shards make up a whole if they are of the same suite, each is there once, and each has the rows of all its jobs.
Anything else is refused, because a table of fewer checks would look like a table of all.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from adjoint.bench.environment import digest, digest_source
from adjoint.core.errors import ArgumentError
from adjoint.verify.listing.jobs import Job
from adjoint.verify.run import Row

SCHEMA = 1


@dataclass(frozen=True)
class Shard:
    """Every `count`-th job, beginning with job number `index`. Numbers begin at 1."""

    index: int = 1
    count: int = 1

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def positions(self, jobs: int) -> range:
        """Its positions in a list of `jobs` jobs."""
        return range(self.index - 1, jobs, self.count)


def read_shard(text: str) -> Shard:
    """Reads a shard from a text such as "2/4"."""
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    shard = Shard(int(match[1]), int(match[2])) if match else Shard(0, 0)
    if not 1 <= shard.index <= shard.count:
        raise ArgumentError(f"verify: --shard must be I/N with I from 1 to N, such as 2/4, not {text!r}")
    return shard


@dataclass(frozen=True)
class Suite:
    """The jobs of a run and the machine that ran them.

    Attributes:
        device: the name of the GPU, or of the CPU.
        versions: of Python, torch and the other packages.
        source: a digest of the files of this package.
        labels: a digest of the labels of all jobs, in order.
        jobs: the number of all jobs.
    """

    device: str
    versions: Mapping[str, str | None]
    source: str
    labels: str
    jobs: int


def describe(jobs: Sequence[Job], device: str, versions: Mapping[str, str | None]) -> Suite:
    """The suite of all these jobs on this machine."""
    return Suite(device, versions, digest_source(), digest(job.label.encode() for job in jobs), len(jobs))


@dataclass(frozen=True)
class Part:
    """One shard of a suite, with the rows of its jobs by position. After an interruption some jobs are missing."""

    suite: Suite
    shard: Shard
    rows: Mapping[int, Sequence[Row]]

    @property
    def all_rows(self) -> list[Row]:
        """All rows in the order of the jobs."""
        return [row for position in sorted(self.rows) for row in self.rows[position]]

    @property
    def positions(self) -> range:
        """The positions of all its jobs."""
        return self.shard.positions(self.suite.jobs)

    @property
    def is_complete(self) -> bool:
        """Whether all its jobs have run."""
        return len(self.rows) == len(self.positions)


def save(part: Part, path: Path) -> None:
    """Writes a part to a file."""
    jobs = [
        {"position": position, "rows": [asdict(row) for row in part.rows[position]]} for position in sorted(part.rows)
    ]
    content = {"schema": SCHEMA, "suite": asdict(part.suite), "shard": asdict(part.shard), "jobs": jobs}
    try:
        path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"verify: cannot save results in {path}: {error}") from error


def load(path: Path) -> Part:
    """Reads a part from a file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']}, and this version reads {SCHEMA}")
        rows = {job["position"]: [_row(row) for row in job["rows"]] for job in content["jobs"]}
        return Part(Suite(**content["suite"]), Shard(**content["shard"]), rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArgumentError(
            f"verify: {path} cannot be read as a file of --save: {type(error).__name__}: {error}"
        ) from error


def _row(values: dict[str, Any]) -> Row:
    return Row(**(values | {"skus": tuple(values.get("skus", ()))}))


def merge(parts: Sequence[tuple[Path, Part]]) -> Part:
    """Joins the parts of a run to one whole. Errors name the files of the parts."""
    if not parts:
        raise ArgumentError("verify: --merge needs the files of all shards, as --save wrote them")
    files: dict[int, Path] = {}
    for file, part in parts:
        _match(parts[0], (file, part))
        if part.shard.index in files:
            raise ArgumentError(f"verify: shard {part.shard} is in {files[part.shard.index]} and again in {file}")
        files[part.shard.index] = file
        if not part.is_complete:
            raise ArgumentError(
                f"verify: {file} has {len(part.rows)} of the {len(part.positions)} checks of shard {part.shard}: "
                f"its run was interrupted; run it again"
            )
    whole = parts[0][1]
    absent = [f"{index}/{whole.shard.count}" for index in range(1, whole.shard.count + 1) if index not in files]
    if absent:
        raise ArgumentError(f"verify: no file has shard {' or '.join(absent)}; run it with --shard and --save")
    return Part(whole.suite, Shard(), {position: rows for _, part in parts for position, rows in part.rows.items()})


def _match(one: tuple[Path, Part], other: tuple[Path, Part]) -> None:
    """Raises unless both are parts of the same suite, cut into the same number of shards."""
    ours, theirs = _properties(one[1]), _properties(other[1])
    for name in [*ours, *theirs]:
        if ours.get(name) != theirs.get(name):
            raise ArgumentError(
                f"verify: {one[0]} and {other[0]} are no parts of one run: "
                f"{name} is {ours.get(name)} in the first, and {theirs.get(name)} in the second"
            )


def _properties(part: Part) -> dict[str, object]:
    """The properties that must be the same in all parts of a run."""
    properties = {"number of shards": part.shard.count, **asdict(part.suite), **part.suite.versions}
    del properties["versions"]
    return properties
