"""What `adjoint verify --record FOLDER` does: the errors of ops' cases on a machine become its recorded figures."""

from collections.abc import Sequence
from contextlib import closing, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from adjoint.contract.cases import Subject
from adjoint.core.errors import ArgumentError
from adjoint.core.kernels import interpreting
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify import figures, workers
from adjoint.verify.figures import Errors, Figures, errors_of_cases
from adjoint.verify.jobs import Job, job_of, named_plans, on_device, served_backends, subjects
from adjoint.verify.run import Row

RECORDED, FAILED, INTERRUPTED = 0, 1, 130
"""Exit statuses; the last is what shells give for Ctrl-C."""


@dataclass(frozen=True)
class Measured(Row):
    """A row that carries the errors of a subject's cases."""

    errors: Errors = field(default_factory=dict)


def measure(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """The errors of all cases that have figures."""
    errors = errors_of_cases(subject, dtype, device, preference)
    count = sum(map(len, errors.values()))
    return [Measured(subject.name, "record", short(dtype), "", "", f"{count} figures", True, "", errors)]


def jobs(ops: Sequence[str] | None, device: torch.device) -> list[Job]:
    """What is measured on a device: in Triton's interpreter kernels alone, as elsewhere nothing else is new."""
    listed = []
    for subject in (on_device(subject, device) for subject in subjects(ops)):
        preferences = [(Preference(backend=name), served.dtypes) for name, served in served_backends(subject, device)]
        preferences += [(Preference(plan=plan), subject.dtypes) for plan in named_plans(subject, device)]
        listed += [
            job_of(subject, "record", dtype, device, preference, measure)
            for preference, dtypes in preferences
            for dtype in dtypes
            if dtype != torch.float64  # whose reference rounds as much as it does
        ]
    return [job for job in listed if not interpreting() or job.backend == "triton"]


def record(
    console: Console, ops: Sequence[str], device: torch.device, folder: Path, *, processes: int | None = None
) -> int:
    """Writes the figures of the ops' cases to a folder, beside those that are there. Returns the exit status.

    The files can then take the place of the package's own, after a look at what changed.
    """
    processes = workers.default_processes(device) if processes is None else processes
    if processes < 1:
        raise ArgumentError(f"verify: --jobs must be 1 or more, not {processes}")
    listing = partial(jobs, ops or None, device)
    listed = listing()
    files = _Files(folder)
    if processes == 1:
        results = workers.run_here(listed, range(len(listed)), lambda job: None)
    else:
        results = workers.run_in_processes(
            listing, listed, range(len(listed)), lambda job: None, processes=processes, device=device
        )
    done = failed = 0
    with suppress(KeyboardInterrupt), closing(results):
        for position, rows in results:
            done += 1
            for row in rows:
                failed += not row.passed
                if isinstance(row, Measured):
                    files.add(row.errors)  # and saves them: what an interrupted run has measured is kept
                line = f"{done}/{len(listed)} {listed[position].label}: {row.measured} {row.detail}"
                console.print(Text(line, style="dim" if row.passed else "red"), soft_wrap=True)
    for path in files.paths:
        console.print(f"{path}", highlight=False)
    console.print(f"{done} of {len(listed)} measured, {failed} failed", highlight=False)
    return INTERRUPTED if done < len(listed) else FAILED if failed else RECORDED


class _Files:
    """Files of figures in a folder, which begin as they are there, or else as the package has them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._figures: dict[Path, Figures] = {}
        self._measured: set[tuple[Path, str]] = set()
        try:
            folder.mkdir(parents=True, exist_ok=True)  # refused before the work
        except OSError as error:
            raise ArgumentError(f"verify: cannot write figures to {folder}: {error}") from error

    @property
    def paths(self) -> list[Path]:
        return sorted(self._figures)

    def add(self, errors: Errors) -> None:
        """Replaces what subjects had before, and adds what other plans of theirs have now."""
        for place in errors:
            path = figures.path_of(place.machine, place.dtype, self._folder)
            if path not in self._figures:
                there = figures.read(path)
                own = figures.load(place.machine, place.dtype) if there is None else there
                self._figures[path] = deepcopy(own or {})
            if (path, place.subject) not in self._measured:
                self._measured.add((path, place.subject))
                self._figures[path].pop(place.subject, None)
        changed: dict[Path, Errors] = {}
        for place, of_case in errors.items():
            changed.setdefault(figures.path_of(place.machine, place.dtype, self._folder), {})[place] = of_case
        for path, of_file in changed.items():
            figures.put(self._figures[path], of_file)
            figures.save(self._figures[path], path)
