"""Recorded figures: the error of every op on its cases, in one reviewed file for each machine and dtype.

    recorded/<machine>/<dtype>.json:   subject → plans, with their revisions → case → output → figure

A machine is a GPU ("nvidia-h200"), "cpu", or "interpreter" for kernels in Triton's interpreter. A figure is `MARGIN`
times the norm-relative error that was measured, so an error that doubles exceeds it. A promise is for users and for
every input. A figure is for one case on one machine, and promises nothing. `adjoint verify --record FOLDER` writes the
files. It lists the cases that it did not reach in recorded/<machine>/pending.json.

Outputs that are copied have no figures, because their promise is that they have no error. float64 has none, because the
reference rounds as much as the op does.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from adjoint.bench.environment import slug
from adjoint.contract.cases import Case, Subject
from adjoint.contract.undrawn import undrawn
from adjoint.core.errors import Unsupported
from adjoint.core.guarantee import Derived, Guarantee
from adjoint.core.layout import to_meta
from adjoint.core.plan import select
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import short
from adjoint.verify.run import Comparison, Evaluation, compare, evaluate

FOLDER = Path(__file__).with_name("recorded")

MARGIN = 1.5
"""The ratio of a figure to the measured error. Other libraries and drivers change errors by less."""

FEWEST = 256
"""The fewest numbers whose error does not depend on luck. An output that has fewer in every case is computed for
several seeds."""

MOST_SEEDS = 16

ROUNDED_ONCE = 12**-0.5
"""The smallest norm-relative error of numbers that are rounded, as a share of the unit roundoff. A smaller error means
that some of the numbers are exact, which may depend on the library that multiplied. It counts as this much, unless the
output has no larger error in any case."""

Figures = dict[str, dict[str, dict[str, dict[str, float]]]]
"""The content of a file."""


class Place(NamedTuple):
    """The place of a case's figures: the file, and the keys within it."""

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
"""Errors by case and output."""


def machine_of(device: torch.device, backend: str) -> str:
    """The name of the machine's folder, for plans of a backend."""
    if device.type == "cuda":
        return slug(torch.cuda.get_device_name(device))
    return "interpreter" if backend == "triton" else device.type


def is_on_kernels(preference: Preference) -> bool:
    """Whether a preference that names a backend or plans asks for kernels."""
    return preference.backend == "triton" or "triton" in str(preference.plan)


def place_of(evaluation: Evaluation, dtype: torch.dtype, case: Case) -> Place:
    plan = evaluation.plan
    assert plan.adjoint is not None
    device = next(x.device for x in evaluation.inputs if x is not None)
    candidates = [plan.candidate, plan.adjoint.candidate]
    return Place(
        machine_of(device, plan.backend),
        short(dtype),
        evaluation.subject.name,
        revised(candidates),
        case.name,
    )


def revised(candidates: Sequence[Any]) -> str:
    """The names of plans with their revisions. Another revision has other bits, and needs its own figures."""
    return " + ".join(dict.fromkeys(f"{candidate.name} r{candidate.revision}" for candidate in candidates))


# ------------------------------------------------------------------------------------------------- files


def path_of(machine: str, dtype: str, folder: Path) -> Path:
    return folder / machine / f"{dtype}.json"


@cache
def read(path: Path) -> Figures | None:
    """The figures of a file; None if there is no such file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def load(machine: str, dtype: str) -> Figures | None:
    """The figures of a machine and dtype; None if nobody recorded any."""
    return read(path_of(machine, dtype, FOLDER))


def recorded(place: Place) -> Mapping[str, float] | None:
    """The figures of a case by output; None if nobody recorded this machine."""
    figures = load(place.machine, place.dtype)
    if figures is None:
        return None
    return figures.get(place.subject, {}).get(place.plans, {}).get(place.case, {})


def of_errors(errors: Errors) -> Figures:
    """Makes figures from errors."""
    figures: Figures = {}
    for place, by_output in errors.items():
        alike = [outputs for other, outputs in errors.items() if other[:-1] == place[:-1]]
        figures.setdefault(place.subject, {}).setdefault(place.plans, {})[place.case] = {
            output: _figure(place, error, [outputs[output] for outputs in alike if output in outputs])
            for output, error in by_output.items()
        }
    return figures


def _figure(place: Place, error: Error, all_cases: Sequence[Error]) -> float:
    if not math.isfinite(error.value):
        raise ValueError(f"{', '.join(place)}: an error of {error.value} cannot be recorded")
    smallest = ROUNDED_ONCE * error.roundoff if any(other.is_rounding for other in all_cases) else 0.0
    return float(f"{MARGIN * max(error.value, smallest):.2g}")


def save(figures: Figures, path: Path) -> None:
    """Writes figures to a file, one case a line."""

    def lines(value: Any, depth: int) -> str:
        if depth == 3 or not value:
            return json.dumps(value, ensure_ascii=False)
        indent = "  " * (depth + 1)
        items = [
            f"{indent}{json.dumps(key, ensure_ascii=False)}: {lines(value[key], depth + 1)}" for key in sorted(value)
        ]
        return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"

    _write(lines(figures, 0), path)


def _write(text: str, path: Path) -> None:
    """Writes a file completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


def pending(machine: str, folder: Path | None = None) -> dict[str, list[str]]:
    """The subjects, by dtype, that a run on a machine did not reach."""
    path = path_of(machine, "pending", folder or FOLDER)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def save_pending(subjects: Mapping[str, Sequence[str]], machine: str, folder: Path) -> None:
    """Writes the file that `pending` reads; if there are no subjects, removes it."""
    path = path_of(machine, "pending", folder)
    if subjects:
        _write(json.dumps(subjects, indent=1, ensure_ascii=False), path)
    else:
        path.unlink(missing_ok=True)


# ----------------------------------------------------------------------------------------------- errors


def has_error(guarantee: Guarantee) -> bool:
    """Whether an output is computed. An output that is only copied promises an error of 0."""
    statement = guarantee.error
    return not (isinstance(statement, Derived) and statement.is_zero)


def seeds_of(sizes: Mapping[Place, Mapping[str, int]]) -> dict[Place, dict[str, int]]:
    """The outputs of each case that have figures, each with the number of seeds over which its error is measured.

    `sizes` has the number of elements of each output of each case. An output has a figure in every case in which it has
    enough elements. If there is no such case, it has a figure in the case in which it is largest.
    """
    by_output: dict[tuple[Any, ...], dict[Place, int]] = {}
    for place, outputs in sizes.items():
        for output, size in outputs.items():
            by_output.setdefault((place[:-1], output), {})[place] = size
    chosen: dict[Place, dict[str, int]] = {}
    for (_, output), of_cases in by_output.items():
        largest = max(of_cases, key=lambda place: of_cases[place])
        for place, size in of_cases.items():
            if size >= FEWEST or (size and place == largest):
                chosen.setdefault(place, {})[output] = min(MOST_SEEDS, math.ceil(FEWEST / size))
    return {place: chosen[place] for place in sizes if place in chosen}


def samples(comparisons: Sequence[Comparison]) -> dict[str, "Sample"]:
    """Samples of the outputs that are computed, by name."""
    return {
        x.name: Sample(x.result.numel(), x.relative_error, torch.finfo(x.result.dtype).eps / 2)
        for x in comparisons
        if has_error(x.guarantee)
    }


class Sample(NamedTuple):
    """The number of elements of an output, its norm-relative error for one seed, and its dtype's unit roundoff."""

    size: int
    error: float
    roundoff: float


def due_of(
    subject: Subject, dtype: torch.dtype, preference: Preference, machine: str, device: torch.device
) -> dict[Place, dict[str, int]]:
    """The cases and outputs that have figures on a machine, each with its number of seeds; nothing is computed."""
    sizes: dict[Place, dict[str, int]] = {}
    for case in subject.cases:
        inputs = undrawn(case, dtype)
        call = subject.bind(inputs)
        outputs = call.operator.allocate(*map(to_meta, call.arguments))[: call.public_outputs]
        forward = {name: x for name, x in zip(call.operator.outputs, outputs, strict=False) if x.is_floating_point()}
        by_name = {f"d{name}": x for name, x in zip(subject.inputs, inputs, strict=True)}
        backward = {name: by_name[name] for name in subject.gradients(inputs)}
        try:
            plans = [select(operator, problem, resolve(preference)) for operator, problem in call.problems(device)]
        except Unsupported:  # a plan that is asked for by name may not take every case
            continue
        place = Place(machine, short(dtype), subject.name, revised([plan.candidate for plan in plans]), case.name)
        sizes[place] = {
            name: x.numel()
            for plan, results in zip(plans, (forward, backward), strict=True)
            for name, x in results.items()
            if has_error(plan.guarantee[name])
        }
    return seeds_of(sizes)


Draw = Callable[[str, int], Mapping[str, Sample]]
"""A function that gives the samples of a case for a seed."""


def errors_of(due: Mapping[Place, Mapping[str, int]], draw: Draw) -> Errors:
    """The errors of cases and outputs, each measured over its number of seeds."""
    errors: Errors = {}
    for place, seeds in due.items():
        of_seeds = [draw(place.case, seed) for seed in range(max(seeds.values()))]
        errors[place] = {
            output: _root_mean_square([one[output] for one in of_seeds[:count]]) for output, count in seeds.items()
        }
    return errors


def _root_mean_square(samples: Sequence[Sample]) -> Error:
    return Error(math.sqrt(sum(one.error**2 for one in samples) / len(samples)), samples[0].roundoff)


def drawing(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> Draw:
    """A function that evaluates a subject's cases for a seed."""
    cases = {case.name: case for case in subject.cases}
    return lambda case, seed: samples(compare(evaluate(subject, cases[case], dtype, device, preference, seed)))
