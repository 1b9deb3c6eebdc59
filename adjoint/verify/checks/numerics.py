"""Checks of values: accuracy, exhaustive enumeration, special values, mistakes, gradients."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import compress

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, Case, Special, Subject
from adjoint.contract.inputs import Inputs, each
from adjoint.core.guarantee import Guarantee, Measurement, absolute_error, spacing
from adjoint.core.preference import Preference
from adjoint.verify import figures
from adjoint.verify.checks.bits import NOTHING
from adjoint.verify.run import Comparison, Row, as_tuple, compare, evaluate, generator, plan_of

SPECIAL_COPIES = 19
"""The number of copies of a special value: more than one vector of every type, and a partial one at the end."""


def accuracy(
    subject: Subject,
    dtype: torch.dtype,
    device: torch.device,
    preference: Preference,
    cases: Iterable[Case] | None = None,
    check: str = "accuracy",
) -> list[Row]:
    """Every output and gradient is within its stated bound, and its error is no larger than was recorded.

    With `cases`, only these cases are checked, and only against the bound; by default, all cases of the subject are.
    """
    rows: list[Row] = []
    samples: dict[figures.Place, dict[str, figures.Sample]] = {}
    row_of: dict[figures.Place, Callable[..., Row]] = {}
    for case in subject.cases if cases is None else cases:
        evaluation = evaluate(subject, case, dtype, device, preference)
        comparisons = compare(evaluation)
        if not comparisons:
            rows.append(evaluation.row(check, dtype, "within its bound", wrong=[f"case {case.name!r}: {NOTHING}"]))
        measured = [(check, str(x.guarantee.error), x.name, x.promise) for x in comparisons]
        if cases is None:
            measured += [(RECORDED, CEILING, name, error) for name, error in _ceilings(comparisons)]
            place = figures.place_of(evaluation, dtype, case)
            samples[place], row_of[place] = figures.samples(comparisons), evaluation.row
        for about, guarantee, name, error in measured:
            wrong = [] if error.holds else [f"case {case.name!r}, output {name}"]
            rows.append(evaluation.row(about, dtype, guarantee, f"{name}: {error}", wrong))
    if dtype == torch.float64:  # it has no figures, because the reference rounds as much as the results
        return rows
    again = figures.drawing(subject, dtype, device, preference)
    by_name = {place.case: first for place, first in samples.items()}
    due = figures.seeds_of({place: {name: x.size for name, x in first.items()} for place, first in samples.items()})
    errors_of_cases = figures.errors_of(due, lambda case, seed: again(case, seed) if seed else by_name[case])
    for place, errors in errors_of_cases.items():
        rows += [row_of[place](RECORDED, dtype, *verdict) for verdict in _verdicts(place, errors)]
    return rows


RECORDED = "recorded errors"
"""The name in rows of the check that compares errors with figures."""

AS_RECORDED, CEILING = "no more than was recorded", "within the ceiling of all cases"
"""The limits of that check: the figure of a case, or the ceiling that a plan states."""

NO_FIGURE = "no figure of this machine"
"""The words of a row for which nothing was recorded."""


def _ceilings(comparisons: Iterable[Comparison]) -> Iterator[tuple[str, Measurement]]:
    """The norm-relative errors, with the ceiling that a plan states for the op's cases."""
    for x in comparisons:
        if x.guarantee.recorded is not None:
            yield x.name, x.guarantee.recorded.measure(x.result, x.exact)


def _verdicts(place: figures.Place, errors: Mapping[str, figures.Error]) -> Iterator[tuple[str, str, list[str]]]:
    """The limit, the measurement and the failures of each output that has a figure, or should have one."""
    recorded = figures.recorded(place) or {}
    for output, error in errors.items():
        measured = f"{output}: {NO_FIGURE}"
        wrong = []
        if output in recorded:
            figure = Measurement(error.value, recorded[output], "relative")
            measured = f"{output}: {figure}"
            wrong = [] if figure.holds else [f"case {place.case!r}, output {output}"]
        yield AS_RECORDED, measured, wrong


def specials(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Special values give the stated results, including signs of zeros, in every position of a tile."""
    rows = []
    for special in subject.specials:
        if special.dtypes and dtype not in special.dtypes:
            continue
        evaluation = evaluate(subject, case_of(special), dtype, device, preference)
        outputs, gradients = special.of_plans.get(evaluation.plan_names, (special.outputs, special.gradients))
        names = (*(f"output {i}" for i in range(len(evaluation.outputs))), *subject.inputs)
        wrong = [
            f"{name} is {result[0].item()}, stated {expected}"
            for name, result, expected in zip(names, evaluation.results, (*outputs, *gradients), strict=True)
            if expected is not None and not all(_same(value, expected) for value in result.tolist())
        ]
        if all(expected is None for expected in (*outputs, *gradients)):
            wrong.append(f"{special.name}: {NOTHING}, as nothing is stated")
        rows.append(evaluation.row("special values", dtype, "as stated", special.name, wrong))
    return rows


def case_of(special: Special) -> Case:
    """A case of copies of a special value."""

    def make(dtype: torch.dtype, device: torch.device, source: torch.Generator) -> Inputs:
        return tuple(torch.full((SPECIAL_COPIES,), value, dtype=dtype, device=device) for value in special.inputs)

    return Case(special.name, make, lambda output, source: torch.full_like(output, special.upstream))


def _same(value: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(value)
    return value == expected and math.copysign(1, value) == math.copysign(1, expected)


WIDER = {2: torch.float32, 4: torch.float64}
"""The type whose results are the comparison, by the bytes of a dtype."""

SLACK = {2: 2.0**-13, 4: 2.0**-40}
"""The share of the largest result that sums in the wider type may lose. It is far less than the error of one more
rounding to the narrow type."""


def arithmetic(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Results that are stated to be rounded at most once equal those of a wider type for the same numbers, rounded.

    For 16-bit inputs the wider type is float32. This shows that neither the accumulator nor any intermediate result has
    16 bits. For float32 inputs the wider type is float64, and the check applies where a plan states that its
    accumulator is float64.
    """
    wider, narrowest = WIDER.get(dtype.itemsize), "float32" if dtype.itemsize == 2 else "float64"
    if wider is None:
        return []

    def is_stated(promise: Guarantee) -> bool:
        return promise.roundings <= 1 and promise.accumulator in ("none", "float64", narrowest)

    rows = []
    for case in subject.cases:
        if dtype.itemsize == 4 and not _promises_float64(subject, case, device, preference):
            continue
        evaluation = evaluate(subject, case, dtype, device, preference)
        forward, backward = evaluation.guarantees
        stated = zip((forward | backward).items(), evaluation.results, strict=True)
        is_compared = [is_stated(promise) and result.dtype in (dtype, wider) for (_, promise), result in stated]
        if not any(is_compared):
            continue
        wide = evaluation.again(
            *(each(_widened(dtype), tensors) for tensors in (evaluation.inputs, evaluation.upstream))
        )
        every = zip((forward | backward).items(), evaluation.results, wide.results, strict=True)
        wrong, compared = [], []
        for (name, promise), narrow, exact in compress(every, is_compared):
            compared.append(name)
            limit = torch.zeros_like(exact, dtype=torch.float64)
            if promise.accumulator != "none" and exact.numel():
                limit += SLACK[dtype.itemsize] * torch.where(exact.isfinite(), exact.double().abs(), 0.0).max()
                if promise.roundings or narrow.dtype == wider:
                    limit += 0.5 * spacing(exact, narrow.dtype)
            if not bool((absolute_error(narrow, exact) <= limit).all()):
                wrong.append(f"case {case.name!r}: {name} is not rounded {promise.roundings} times")
        rows.append(evaluation.row("arithmetic", dtype, "rounded once", ", ".join(compared), wrong))
    return rows


def _promises_float64(subject: Subject, case: Case, device: torch.device, preference: Preference) -> bool:
    """Whether a plan states that it accumulates in float64 for float32 inputs."""
    chosen = plan_of(subject, case.make(torch.float32, device, generator()), preference)
    sides = (chosen, chosen.adjoint)
    return any(p.accumulator == "float64" for side in sides if side is not None for p in side.guarantee.values())


def _widened(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """A function that converts floating tensors of at most a dtype's size to the wider type."""
    most, wider = dtype.itemsize, WIDER[dtype.itemsize]
    return lambda tensor: tensor.to(wider) if tensor.is_floating_point() and tensor.itemsize <= most else tensor


def mistakes(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Plausible wrong answers fail the accuracy check. A check that cannot fail proves nothing."""
    case = max(subject.cases, key=lambda c: _elements(c.make(dtype, torch.device("cpu"), generator())))
    evaluation = evaluate(subject, case, dtype, device, preference)
    right = [comparison.with_bound() for comparison in compare(evaluation)] if subject.mistakes else []
    rows = []
    for name, mistake in subject.mistakes.items():
        outputs, gradients = mistake(evaluation.upstream, evaluation.inputs)
        comparisons = [x._replace(result=result) for x, result in zip(right, (*outputs, *gradients), strict=True)]
        errors = [(x.name, x.promise) for x in comparisons] + list(_ceilings(comparisons))
        figure_of = figures.recorded(figures.place_of(evaluation, dtype, case)) or {}
        errors += [
            (x.name, Measurement(x.relative_error, figure_of[x.name], "relative"))
            for x in comparisons
            if x.name in figure_of and x.result.numel() >= figures.FEWEST
        ]
        caught = dict.fromkeys(output for output, measured in errors if not measured.holds)
        wrong = [] if caught else [f"the mistake {name!r} passes the accuracy check"]
        words = f"{name}: {', '.join(caught) or 'nothing'} rejected"
        rows.append(evaluation.row("mistakes are caught", dtype, "rejected", words, wrong))
    return rows


def gradients(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Finite differences agree with the op's gradient and with no wrong one. The dtype must be float64."""
    case = next(c for c in subject.cases if 0 < _elements(c.make(dtype, device, generator())) <= 1000)
    evaluation = evaluate(subject, case, dtype, device, preference)
    plain = each(lambda t: t * 0.1 if t.is_floating_point() else t, case.make(dtype, device, generator()))

    def row(name: str, passed: bool, detail: str) -> Row:
        return evaluation.row("gradients", dtype, "finite differences", name, [] if passed else [detail])

    agrees_with_op = torch.autograd.gradcheck(
        lambda *x: as_tuple(subject(*x, preference=preference)),
        subject.leaves(plain),
        raise_exception=False,
        fast_mode=False,
    )
    rows = [row("op agrees", agrees_with_op, "gradcheck disagrees with the op's gradient")]
    # 1, 2, 3, 1, …, because outputs whose sum is constant, such as shares, have no gradient if all weights are equal.
    # Small integers, because their sums are exact in narrow types too, whose errors finite differences could not see.
    upstream = tuple(
        (torch.arange(o.numel(), device=o.device) % 3 + 1).to(o.dtype).view(o.shape) for o in subject.reference(*plain)
    )
    slopes = _central_differences(subject, plain, upstream)

    def agrees(answer: Answers) -> bool:
        # Central differences lose step²/6 by truncation and 2⁻⁵³·|sum|/step by cancellation, together below 1e-7 here.
        pairs = list(zip(answer[1], slopes, strict=True))
        return bool(pairs) and all((a - n).norm() <= 1e-6 * (1 + n.norm()) for a, n in pairs)

    reference = ((), subject.reference_backward(*upstream, *plain))
    rows.append(row("reference agrees", agrees(reference), "the reference's adjoint is wrong"))
    for name, mistake in subject.mistakes.items():
        answer = mistake(upstream, plain)
        right_gradient = all(torch.equal(a, r) for a, r in zip(answer[1], reference[1], strict=True))
        if not right_gradient:
            rows.append(row(f"{name} disagrees", not agrees(answer), "finite differences accept a wrong gradient"))
    return rows


def _elements(inputs: Inputs) -> int:
    """The number of elements of all inputs; 0 if one of them is empty."""
    sizes = [tensor.numel() for tensor in inputs if tensor is not None]
    return sum(sizes) if all(sizes) else 0


def _central_differences(subject: Subject, inputs: Inputs, upstream: tuple[Tensor, ...]) -> list[Tensor]:
    """The gradient of Σ upstream·output of the reference, computed for one element of a floating input at a time."""
    step = 1e-6

    def slope(index: int, position: int) -> float:
        sums = []
        for sign in (1, -1):
            moved = inputs[index].contiguous().flatten().clone()
            moved[position] += sign * step
            changed = (*inputs[:index], moved.reshape(inputs[index].shape), *inputs[index + 1 :])
            outputs = zip(upstream, subject.reference(*changed), strict=True)
            sums.append(sum(float((weight * output).sum()) for weight, output in outputs))
        return (sums[0] - sums[1]) / (2 * step)

    return [
        inputs[index]
        .new_tensor([slope(index, position) for position in range(inputs[index].numel())])
        .reshape(inputs[index].shape)
        for index in subject.places(inputs)
    ]
