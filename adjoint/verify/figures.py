"""Recorded figures: how far off every op was on its cases, in one reviewed file for each machine and dtype.

    recorded/<machine>/<dtype>.json:   subject → plans, with their revisions → case → output → figure

A machine is a GPU ("nvidia-h200"), "cpu", or "interpreter" for kernels in Triton's. A figure is `MARGIN` times the
norm-relative error that was measured, so an error that doubles is past it. A promise is for users and every input; a
figure is for one case on one machine, and promises nothing. `adjoint verify --record FOLDER` writes the files.

Outputs that are copied have no figures: their promise is that they have no error. Nor has float64, in which the
reference rounds as much as the op does.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adjoint.bench.environment import slug
from adjoint.contract.cases import Case, Subject
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify.run import Comparison, Evaluation, compare, evaluate

FOLDER = Path(__file__).with_name("recorded")

MARGIN = 1.5
"""Figures over the errors that were measured: what other libraries and drivers change is less."""

FEWEST = 256
"""Numbers whose error is no luck. An output that has fewer in every case is computed for several seeds."""

MOST_SEEDS = 16

ROUNDED_ONCE = 12**-0.5
"""Of the unit roundoff: the smallest norm-relative error of numbers that are rounded, however often. What is below it
are exact numbers among others, and whichever library multiplied. Such an error counts as this, unless an output has no
larger one."""

Figures = dict[str, dict[str, dict[str, dict[str, float]]]]
"""The content of a file."""


class Place(NamedTuple):
    """Where the figures of a case stand: the file, and the keys within it."""

    machine: str
    dtype: str
    subject: str
    plans: str
    case: str


class Error(NamedTuple):
    """The norm-relative error of an output, and the unit roundoff of its dtype."""

    value: float
    roundoff: float

    @property
    def is_rounding(self) -> bool:
        return self.value >= ROUNDED_ONCE * self.roundoff


Errors = dict[Place, dict[str, Error]]
"""By case and output."""


def machine_of(device: torch.device, backend: str) -> str:
    """The name of a machine, as its folder has it, for plans of a backend."""
    if device.type == "cuda":
        return slug(torch.cuda.get_device_name(device))
    return "interpreter" if backend == "triton" else device.type


def place_of(found: Evaluation, dtype: torch.dtype, case: Case) -> Place:
    plan = found.plan
    assert plan.adjoint is not None
    device = next(x.device for x in found.inputs if x is not None)
    candidates = [plan.candidate, plan.adjoint.candidate]
    return Place(
        machine_of(device, plan.backend),
        short(dtype),
        found.subject.name,
        revised(candidates),
        case.name,
    )


def revised(candidates: Sequence[Any]) -> str:
    """The names of plans with their revisions: another revision has other bits, and needs other figures."""
    return " + ".join(dict.fromkeys(f"{candidate.name} r{candidate.revision}" for candidate in candidates))


# ------------------------------------------------------------------------------------------------- files


def path_of(machine: str, dtype: str, folder: Path) -> Path:
    return folder / machine / f"{dtype}.json"


@cache
def read(path: Path) -> Figures | None:
    """The figures of a file; None where there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def load(machine: str, dtype: str) -> Figures | None:
    """The figures of a machine and dtype; None where nobody recorded any."""
    return read(path_of(machine, dtype, FOLDER))


def recorded(place: Place) -> Mapping[str, float] | None:
    """The figures of a case by output; None on a machine that nobody recorded."""
    figures = load(place.machine, place.dtype)
    if figures is None:
        return None
    return figures.get(place.subject, {}).get(place.plans, {}).get(place.case, {})


def put(figures: Figures, errors: Errors) -> None:
    """Adds the figures of errors; where two preferences lead to the same plans, the larger of both."""
    for place, by_output in errors.items():
        alike = [outputs for other, outputs in errors.items() if other[:-1] == place[:-1]]
        of_case = figures.setdefault(place.subject, {}).setdefault(place.plans, {}).setdefault(place.case, {})
        for output, error in by_output.items():
            figure = _figure(place, error, [outputs[output] for outputs in alike if output in outputs])
            of_case[output] = max(figure, of_case.get(output, 0.0))


def _figure(place: Place, error: Error, all_cases: Sequence[Error]) -> float:
    if not math.isfinite(error.value):
        raise ValueError(f"{', '.join(place)}: an error of {error.value} cannot be recorded")
    smallest = ROUNDED_ONCE * error.roundoff if any(other.is_rounding for other in all_cases) else 0.0
    return float(f"{MARGIN * max(error.value, smallest):.2g}")


def save(figures: Figures, path: Path) -> None:
    """Writes figures to a file, a case on a line, whole or not at all."""

    def lines(value: Any, depth: int) -> str:
        if depth == 3 or not value:
            return json.dumps(value, ensure_ascii=False)
        indent = "  " * (depth + 1)
        items = [
            f"{indent}{json.dumps(key, ensure_ascii=False)}: {lines(value[key], depth + 1)}" for key in sorted(value)
        ]
        return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(lines(figures, 0) + "\n", encoding="utf-8")
    unfinished.replace(path)


# ----------------------------------------------------------------------------------------------- errors


def has_error(guarantee: Guarantee) -> bool:
    """Whether an output is computed, and not copied: the promise of a copy is an error of 0."""
    statement = guarantee.error
    return not (isinstance(statement, Derived) and statement.is_zero)


class Sizes:
    """Which outputs of which cases have figures: those of enough numbers, or the largest of an output that has none."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[Any, ...], dict[Any, int]] = {}

    def add(self, place: Place, output: str, size: int) -> None:
        if size:
            self._sizes.setdefault((place[:-1], output), {})[place] = size

    def seeds(self) -> Iterator[tuple[Place, str, int]]:
        """Each case and output that has a figure, and how many seeds its error is measured over."""
        for (_, output), sizes in self._sizes.items():
            largest = max(sizes, key=lambda place: sizes[place])
            for place, size in sizes.items():
                if size >= FEWEST or (place == largest and sizes[largest] < FEWEST):
                    yield place, output, min(MOST_SEEDS, math.ceil(FEWEST / size))


def samples(comparisons: Sequence[Comparison]) -> dict[str, "Sample"]:
    """The outputs that are computed, by name."""
    return {
        x.name: Sample(x.result.numel(), x.relative_error, torch.finfo(x.result.dtype).eps / 2)
        for x in comparisons
        if has_error(x.guarantee)
    }


class Sample(NamedTuple):
    """How many numbers an output has, their norm-relative error for one seed, and the unit roundoff of its dtype."""

    size: int
    error: float
    roundoff: float


def errors_of(first: Mapping[Place, Mapping[str, Sample]], again: Callable[[str, int], Mapping[str, Sample]]) -> Errors:
    """The errors that have figures, from the samples of all cases for the first seed, and of one for a further seed."""
    sizes = Sizes()
    for place, outputs in first.items():
        for output, sample in outputs.items():
            sizes.add(place, output, sample.size)
    chosen: dict[Place, dict[str, int]] = {}
    for place, output, seeds in sizes.seeds():
        chosen.setdefault(place, {})[output] = seeds
    errors: Errors = {}
    for place, seeds_of in chosen.items():
        drawn = [first[place], *(again(place.case, seed) for seed in range(1, max(seeds_of.values())))]
        errors[place] = {
            output: Error(
                math.sqrt(sum(one[output].error ** 2 for one in drawn[:seeds]) / seeds), first[place][output].roundoff
            )
            for output, seeds in seeds_of.items()
        }
    return errors


def errors_of_cases(
    subject: Subject,
    dtype: torch.dtype,
    device: torch.device,
    preference: Preference,
    first: dict[Place, dict[str, Sample]] | None = None,
) -> Errors:
    """The errors of a subject's cases that have figures; `first` are those of the first seed, where they are known."""
    cases = {case.name: case for case in subject.cases}

    def draw(case: str, seed: int) -> dict[str, Sample]:
        return samples(compare(evaluate(subject, cases[case], dtype, device, preference, seed)))

    if first is None:
        first = {}
        for case in subject.cases:
            found = evaluate(subject, case, dtype, device, preference)
            first[place_of(found, dtype, case)] = samples(compare(found))
    return errors_of(first, draw)
