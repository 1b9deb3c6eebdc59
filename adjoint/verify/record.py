"""What `adjoint verify --record FOLDER` does: it makes the errors of ops' cases on a machine its recorded figures."""

from collections import Counter
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
from adjoint.verify import figures
from adjoint.verify.figures import Errors, Figures
from adjoint.verify.listing.jobs import Job, job_of, named_plans, on_device, served_backends, subjects
from adjoint.verify.parallel import workers
from adjoint.verify.run import Row

RECORDED, FAILED, INTERRUPTED = 0, 1, 130
"""Exit statuses. The last one is the status that shells give for Ctrl-C."""


@dataclass(frozen=True)
class Measured(Row):
    """A row that carries the errors of a subject's cases."""

    errors: Errors = field(default_factory=dict)


CASES_OF_A_JOB = 4
"""The number of cases in a job, so small that no process has much left to compile at the end."""


def measure(
    subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference, part: slice = slice(None)
) -> list[Row]:
    """Measures the errors of all cases that have figures, or of a part of these cases."""
    machine = figures.machine_of(device, "triton" if figures.is_on_kernels(preference) else "eager")
    due = figures.due_of(subject, dtype, preference, machine, device)
    chosen = {place: due[place] for place in list(due)[part]}
    errors = figures.errors_of(chosen, figures.drawing(subject, dtype, device, preference))
    count = sum(map(len, errors.values()))
    return [Measured(subject.name, "record", short(dtype), "", "", f"{count} figures", True, errors=errors)]


def jobs(ops: Sequence[str] | None, device: torch.device) -> list[Job]:
    """The jobs that measure errors on a device, kernels first. In Triton's interpreter there are only kernels, because
    PyTorch gives the same results there as without it."""
    listing = []
    for subject in (on_device(subject, device) for subject in subjects(ops)):
        preferences = [(Preference(backend=name), served.dtypes) for name, served in served_backends(subject, device)]
        preferences += [(Preference(plan=plan), subject.dtypes) for plan in named_plans(subject, device)]
        parts = [slice(begin, begin + CASES_OF_A_JOB) for begin in range(0, len(subject.cases), CASES_OF_A_JOB)]
        listing += [
            job_of(subject, f"record {number}/{len(parts)}", dtype, device, preference, partial(measure, part=part))
            for preference, dtypes in preferences
            for dtype in dtypes
            if dtype != torch.float64  # it has no figures, because the reference rounds as much as the results
            for number, part in enumerate(parts, 1)
        ]
    chosen = [job for job in listing if not interpreting() or job.backend == "triton"]
    return sorted(chosen, key=lambda job: job.backend != "triton")


def record(
    console: Console, ops: Sequence[str], device: torch.device, folder: Path, *, processes: int | None = None
) -> int:
    """Writes the figures of the ops' cases to a folder, beside the figures there. Returns the exit status.

    After a review of the changes, the files can replace those of the package.
    """
    processes = workers.default_processes(device) if processes is None else processes
    if processes < 1:
        raise ArgumentError(f"verify: --jobs must be 1 or more, not {processes}")
    list_jobs = partial(jobs, ops or None, device)
    listing = list_jobs()
    files = _Files(folder, listing, device)
    if processes == 1:
        results = workers.run_here(listing, range(len(listing)), lambda job: None)
    else:
        results = workers.run_in_processes(
            list_jobs, listing, range(len(listing)), lambda job: None, processes=processes, device=device, rank=_rank
        )
    done = failed = 0
    with suppress(KeyboardInterrupt), closing(results):
        for position, rows in results:
            done += 1
            for row in rows:
                failed += not row.passed
                if isinstance(row, Measured):
                    files.add(listing[position], row.errors)  # this also saves them, in case the run is interrupted
                line = f"{done}/{len(listing)} {listing[position].label}: {row.measured} {row.detail}"
                console.print(Text(line, style="dim" if row.passed else "red"), soft_wrap=True)
    for path in files.paths:
        console.print(f"{path}", highlight=False)
    console.print(f"{done} of {len(listing)} measured, {failed} failed", highlight=False)
    return INTERRUPTED if done < len(listing) else FAILED if failed else RECORDED


def _rank(job: Job) -> tuple[int, ...]:
    """The rank of a job: kernels first, and the first part of every subject before the second parts, which then find
    their kernels compiled."""
    part = int(job.check.split()[1].partition("/")[0])
    return int(job.backend != "triton"), part, workers.place_of_op(job)


class _Files:
    """Files of figures in a folder. A file that is not there begins as a copy of the package's own."""

    def __init__(self, folder: Path, listing: Sequence[Job], device: torch.device) -> None:
        self._folder = folder
        self._machine = {backend: figures.machine_of(device, backend) for backend in ("triton", "eager")}
        self._figures: dict[Path, Figures] = {}
        self._errors: dict[tuple[Path, str], Errors] = {}
        self._waiting = Counter(map(self._key, listing))
        try:
            self._save_pending()  # so that a folder that cannot be written to is refused before the work
        except OSError as error:
            raise ArgumentError(f"verify: cannot write figures to {folder}: {error}") from error

    def _key(self, job: Job) -> tuple[str, str, str]:
        return self._machine[job.backend], job.dtype, job.op

    @property
    def paths(self) -> list[Path]:
        return sorted(self._figures)

    def add(self, job: Job, errors: Errors) -> None:
        """Adds the errors that a job measured, and replaces the figures that its subject had before this run."""
        for place in errors:
            path = figures.path_of(place.machine, place.dtype, self._folder)
            if path not in self._figures:
                there = figures.read(path)
                own = figures.load(place.machine, place.dtype) if there is None else there
                self._figures[path] = deepcopy(own or {})
            of_subject = self._errors.setdefault((path, place.subject), {})
            # Two preferences may choose the same plans, and each may measure outputs that the other measures elsewhere.
            of_subject[place] = errors[place] | of_subject.get(place, {})
        for path, subject in {(figures.path_of(x.machine, x.dtype, self._folder), x.subject) for x in errors}:
            self._figures[path] |= figures.of_errors(self._errors[path, subject])
            figures.save(self._figures[path], path)
        self._waiting[self._key(job)] -= 1
        self._save_pending()

    def _save_pending(self) -> None:
        """Writes the names of the subjects that are not measured yet."""
        for machine in {machine for machine, _, _ in self._waiting}:
            pending = figures.pending(machine, self._folder)
            for (where, dtype, subject), count in self._waiting.items():
                if where == machine:
                    others = {*pending.get(dtype, ())} - {subject}
                    pending[dtype] = sorted(others | ({subject} if count else set()))
            figures.save_pending({dtype: names for dtype, names in pending.items() if names}, machine, self._folder)
