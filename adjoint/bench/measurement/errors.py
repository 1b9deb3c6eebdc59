"""Errors of workloads: ours beside its promise, and beside all other contenders' on the same inputs. Nothing is timed.

Errors are saved as one JSON file per machine, merged by workload and direction, and shown as Markdown in
docs/errors.md.
"""

import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.bench import environment
from adjoint.bench.contenders import FORWARD, Contender, NotInstalled, Task
from adjoint.bench.measurement.check import poison
from adjoint.bench.measurement.run import EAGER, OURS, builders_of, first_line, names_of, select, tasks_of
from adjoint.bench.report.results import write_tables
from adjoint.contract.cases import Workload
from adjoint.contract.inputs import widened
from adjoint.core.guarantee import Empirical, Guarantee, Measurement
from adjoint.ops import FAMILIES, cases

FOLDER = Path("benchmarks") / "errors"


@dataclass(frozen=True)
class Row:
    """The error of one output of one contender.

    Attributes:
        error: the norm-relative error against float64; None if there is none, and then the note says why.
        promise: for our outputs, the share of the promised limit that the error takes, in words.
        holds: whether the output keeps its promise. Outputs of other contenders promise nothing.
    """

    family: str
    workload: str
    direction: str
    output: str
    contender: str
    error: float | None
    promise: str = ""
    holds: bool = True
    note: str = ""


def workloads_of(ops: Sequence[str], rows: Sequence[str] = ()) -> list[tuple[str, Workload]]:
    """The workloads to measure, with their families.

    These are the workloads named by `rows`, if there are any. Otherwise there is one for each subject and dtype of the
    ops, or of all ops: the first one that is timed, or in its place those that the op lists for their errors.
    """
    named = select(ops, rows)
    if rows:
        return named
    candidates = []
    for family in FAMILIES:
        for module in cases(family):
            first: dict[Any, list[Workload]] = {}
            for workload in getattr(module, "ERROR_WORKLOADS", ()):
                first.setdefault(_kind(workload), []).append(workload)
            for workload in module.WORKLOADS:
                first.setdefault(_kind(workload), [workload])
            candidates += [(family, workload) for workloads in first.values() for workload in workloads]
    functions = {workload.subject.function for _, workload in named if ops}
    return [(family, workload) for family, workload in candidates if not ops or _is_meant(workload, ops, functions)]


def _is_meant(workload: Workload, ops: Sequence[str], functions: set[Any]) -> bool:
    """Whether ops name a workload's subject, or its function."""
    return workload.subject.function in functions and bool(names_of(workload) & set(ops))


def _kind(workload: Workload) -> tuple[Any, ...]:
    return workload.subject.name, workload.dtype, workload.devices


def measure(family: str, workload: Workload, device: torch.device, peers: Sequence[str] | None = None) -> Iterator[Row]:
    """The rows of a workload."""
    if device.type not in workload.devices:
        return
    try:
        name, _, tasks = tasks_of(workload, device)
    except Exception as error:  # for example too little memory for its inputs; other workloads go on
        yield Row(family, workload.name, "", "", OURS, None, holds=False, note=first_line(error))
        return
    for task in tasks:
        done: dict[str, tuple[Contender, tuple[Tensor, ...]]] = {}
        notes: dict[str, str] = {}
        for label, build in builders_of(workload, task.direction, compile=False, peers=peers).items():
            try:
                contender = build(task)
                poison(contender)
                if contender.restore is not None:
                    contender.restore()
                done[label] = contender, contender.run()
            except NotInstalled:
                continue
            except Exception as error:
                notes[label] = first_line(error)
        try:
            yield from _compared(family, name, task, done)
        except Exception as error:  # the reference or a bound raised, for example for lack of memory; others go on
            notes.setdefault(OURS, f"not compared: {first_line(error)}")
        for label, note in notes.items():
            yield Row(family, name, task.direction, "", label, None, holds=label != OURS, note=note)


def _compared(
    family: str, name: str, task: Task, done: dict[str, tuple[Contender, tuple[Tensor, ...]]]
) -> Iterator[Row]:
    """A row for each output and contender. The reference is computed once for all contenders without own choices."""
    subject = task.workload.subject
    sums = {label: [_Sum(promise) for promise in _promises(*entry)] for label, entry in done.items()}
    pieces = [subject.cut(task.arguments, (*outputs, *one.choices)) for one, outputs in done.values()]
    for piece_of_each in zip(*pieces, strict=True):
        arguments, common = widened(piece_of_each[0][0]), None
        for (label, (contender, outputs)), (_, parts) in zip(done.items(), piece_of_each, strict=True):
            if task.workload.chosen is not None and contender.choices:
                exact, _ = task.workload.chosen(arguments, parts[len(outputs) :])
            else:
                exact = common = task.reference(*arguments) if common is None else common
            for one, part, truth in zip(sums[label], parts, exact, strict=False):
                one.add(part, truth, arguments)
    names = subject.bind(task.inputs).operator.outputs if task.direction == FORWARD else subject.gradients(task.inputs)
    for label, of_outputs in sums.items():
        for output, one in zip(names, of_outputs, strict=False):
            yield Row(family, name, task.direction, output, label, one.error, *one.verdict())


def _promises(contender: Contender, outputs: tuple[Tensor, ...]) -> Sequence[Guarantee | None]:
    return contender.guarantee if contender.guarantee is not None else [None] * len(outputs)


class _Sum:
    """The error of an output, added up piece by piece."""

    def __init__(self, guarantee: Guarantee | None) -> None:
        self._guarantee = guarantee
        self._squared_error = self._squared_norm = 0.0
        self._worst: Measurement | None = None

    def add(self, output: Tensor, exact: Tensor, arguments: Any) -> None:
        self._squared_error += float((output.double() - exact).square().sum())
        self._squared_norm += float(exact.square().sum())
        if self._guarantee is not None:
            measured = self._guarantee.error.measure(output, exact, *arguments)
            if self._worst is None or not measured.value <= self._worst.value:
                self._worst = measured

    @property
    def error(self) -> float:
        return math.sqrt(self._squared_error / self._squared_norm) if self._squared_norm else self._squared_error

    def verdict(self) -> tuple[str, bool]:
        """The share of the promised limit that the error takes, in words, and whether the promise holds."""
        if self._guarantee is None or self._worst is None:
            return "", True
        statement, worst = self._guarantee.error, self._worst
        if isinstance(statement, Empirical):  # its norm is that of the whole tensor
            worst = Measurement(self.error, statement.ceiling, "relative")
        if worst.limit == 0 or worst.value == 0:
            return "exact" if worst.value == 0 else f"{worst}", worst.holds
        limit = "its bound" if worst.unit == "of the bound" else f"{worst.limit:.3g} {worst.unit}"
        percent = 100 * worst.value / worst.limit
        beside = "" if worst.expected is None else f", {worst.expected:.2f} of the expected"
        return f"{percent:.{'0f' if percent >= 10 else '2g'}}% of {limit}{beside}", worst.holds


def run(
    selected: Sequence[tuple[str, Workload]],
    device: torch.device,
    *,
    peers: Sequence[str] | None = None,
    report: Callable[[list[Row]], None] = lambda rows: None,
) -> list[Row]:
    """Measures workloads and returns their rows. After each workload, `report` is called with all rows so far."""
    rows: list[Row] = []
    for family, workload in selected:
        fresh = [*measure(family, workload, device, peers)]
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        if fresh:
            rows += fresh
            report(rows)
    return rows


# ------------------------------------------------------------------------------------------------ files


def content_of(
    rows: Sequence[Row], command: str, device: torch.device, earlier: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The content of a file: these rows, and the earlier rows of other workloads."""
    earlier = earlier or {"runs": [], "rows": []}
    runs = [*earlier["runs"], environment.conditions(command)]
    fresh = [asdict(row) | {"error": _rounded(row.error), "run": len(runs) - 1} for row in rows]
    replaced = {row["workload"] for row in fresh}
    merged_rows = [row for row in earlier["rows"] if row["workload"] not in replaced] + fresh
    used = sorted({row["run"] for row in merged_rows})
    return {
        "device": environment.device_name(device),
        "device_type": device.type,
        "runs": [runs[index] for index in used],
        "rows": [row | {"run": used.index(row["run"])} for row in merged_rows],
    }


def save(rows: Sequence[Row], command: str, device: torch.device, folder: Path = FOLDER) -> Path:
    """Writes rows into the file of a machine, where they replace those of the same workloads. Returns the file."""
    path = folder / f"{environment.slug(environment.device_name(device))}.json"
    earlier = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    content = content_of(rows, command, device, earlier)
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def _rounded(error: float | None) -> float | None:
    """A rounded error for JSON, which has no NaN."""
    return None if error is None or not math.isfinite(error) else float(f"{error:.2g}")


def markdown(content: dict[str, Any], family: str) -> str:
    """A family's rows as a table: a line for each workload, direction and output."""
    rows = [row for row in content["rows"] if row["family"] == family and row["error"] is not None]
    if not rows:
        return ""
    others = sorted({row["contender"] for row in rows} - {OURS}, key=lambda label: (label != EAGER, label))
    groups: dict[tuple[str, str, str], dict[str, Any]] = {}
    for row in rows:
        groups.setdefault((row["workload"], row["direction"], row["output"]), {})[row["contender"]] = row
    heads = ["workload", "direction", "output", OURS, "of its promise", *others]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(['---'] * 3 + ['---:'] * (len(heads) - 3))} |"]
    for key, group in groups.items():
        cells = [f"{group[label]['error']:.1e}" if label in group else "–" for label in (OURS, *others)]
        promise = group[OURS]["promise"] if OURS in group else "–"
        lines.append(f"| {' | '.join([*key, cells[0], promise, *cells[1:]])} |")
    used = sorted({row["run"] for row in rows})
    return "\n".join([*lines, "", *(_conditions(content["device"], content["runs"][index]) for index in used)])


def _conditions(device: str, run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items() if version)
    commit = run["commit"] or ""
    state = f"commit {commit[:12]}{'+' * commit.endswith('+')}" if commit else f"source {run['source']}"
    return f"{device}; {versions}; {run['date']}; {state}; `{run['command']}`."


def update_page(path: Path, folder: Path = FOLDER) -> list[str]:
    """Writes the tables of GPUs into a page, between `<!-- errors:<family>:begin -->` and `:end -->`."""
    contents = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))]
    return write_tables(
        path, "errors", lambda family: [markdown(one, family) for one in contents if one["device_type"] == "cuda"]
    )
