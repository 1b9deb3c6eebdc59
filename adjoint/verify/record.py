"""What `adjoint verify OP --record FILE` does: the errors of an op's cases on a device become its recorded figures."""

from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from adjoint.contract import recorded
from adjoint.contract.cases import Subject
from adjoint.core.errors import ArgumentError
from adjoint.core.kernels import interpreting
from adjoint.core.preference import Preference
from adjoint.verify import interpreter
from adjoint.verify.jobs import on_device, served_backends, subjects
from adjoint.verify.run import compare, evaluate, key_of


def record(console: Console, ops: Sequence[str], device: torch.device, path: Path) -> int:
    """Writes figures of the ops' cases to a file, with those that their own file has from elsewhere; returns 0.

    The file can then take the place of the ops' own, after a look at what changed.
    """
    chosen = subjects(ops or None)
    files = {subject.recorded for subject in chosen}
    if len(files) > 1:
        raise ArgumentError("verify: --record writes one file, and these ops have several: name ops of one family")
    if interpreting():
        interpreter.correct()
    (file,) = files
    figures = deepcopy(recorded.load(file)) if file is not None else {}
    recorded.save(figures, path)  # a path that cannot be written to is refused before the work
    for subject in chosen:
        for keys, errors in _errors(on_device(subject, device), device):
            recorded.put(figures, keys, errors)
            recorded.save(figures, path)  # what an interrupted run has measured is kept
            console.print(Text(f"{', '.join(keys)}: {len(errors)} figures", style="dim"), soft_wrap=True)
    return 0


def _errors(subject: Subject, device: torch.device) -> Iterator[tuple[tuple[str, ...], dict[str, float]]]:
    """The norm-relative errors of every case, dtype and plan, under the keys of their figures."""
    served = [(Preference(backend=backend), dtypes.dtypes) for backend, dtypes in served_backends(subject, device)]
    for preference, dtypes in served + [(Preference(plan=plan), subject.dtypes) for plan in subject.plans]:
        for dtype in dtypes:
            if dtype == torch.float64:  # whose reference rounds as much as it does
                continue
            for case in subject.cases:
                found = evaluate(subject, case, dtype, device, preference)
                errors = {x.name: x.relative_error for x in compare(found) if x.result.numel() >= recorded.FEWEST}
                if errors:
                    yield key_of(found, case), errors
