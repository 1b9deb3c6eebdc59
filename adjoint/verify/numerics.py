"""Checks of values: accuracy, exhaustive enumeration, special values, mistakes, gradients."""

import math
from collections.abc import Iterable

import torch

from adjoint.contract.cases import Answers, Case, Subject
from adjoint.contract.inputs import Inputs, each, is_differentiable
from adjoint.core.preference import Preference
from adjoint.core.problem import short
from adjoint.verify.row import Row
from adjoint.verify.run import Evaluation, as_tuple, evaluate, generator, measure, plan_names, plan_of


def accuracy(
    subject: Subject,
    dtype: torch.dtype,
    device: torch.device,
    preference: Preference,
    cases: Iterable[Case],
    check: str,
) -> list[Row]:
    """Every output and gradient of every case is inside its stated bound."""
    rows = []
    for case in cases:
        found = evaluate(subject, case, dtype, device, preference)
        chosen = plan_of(subject, found.inputs, preference)
        assert chosen.adjoint is not None
        guarantees = {**chosen.guarantee, **chosen.adjoint.guarantee}
        for name, measured in measure(subject, chosen, found).items():
            rows.append(
                Row(
                    subject.name,
                    check,
                    short(dtype),
                    plan_names(chosen),
                    str(guarantees[name].error),
                    f"{name}: {measured}",
                    measured.holds,
                    "" if measured.holds else f"case {case.name!r}, output {name}",
                )
            )
    return rows


def specials(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Special values give what is stated, signs of zeros included, in every position of a tile."""
    copies = 19  # more than one vector of every type, and a ragged end
    rows = []
    for special in subject.specials:
        if special.dtypes and dtype not in special.dtypes:
            continue
        inputs = tuple(torch.full((copies,), value, dtype=dtype, device=device) for value in special.inputs)
        leaves = tuple(tensor.requires_grad_() for tensor in inputs)
        outputs = as_tuple(subject(*leaves, preference=preference))
        upstream = [torch.full_like(output, special.upstream) for output in outputs]
        gradients = torch.autograd.grad(outputs, leaves, upstream)
        wrong = []
        names = (*(f"output {i}" for i in range(len(outputs))), *subject.inputs)
        for name, got, expected in zip(
            names, (*outputs, *gradients), (*special.outputs, *special.gradients), strict=True
        ):
            if expected is not None and not all(_same(value, expected) for value in got.tolist()):
                wrong.append(f"{name} is {got[0].item()}, stated {expected}")
        chosen = plan_of(subject, inputs, preference)
        rows.append(
            Row(
                subject.name,
                "special values",
                short(dtype),
                plan_names(chosen),
                "as stated",
                special.name,
                not wrong,
                "; ".join(wrong),
            )
        )
    return rows


def _same(got: float, expected: float) -> bool:
    if math.isnan(expected):
        return math.isnan(got)
    return got == expected and math.copysign(1, got) == math.copysign(1, expected)


def mistakes(subject: Subject, dtype: torch.dtype, device: torch.device, preference: Preference) -> list[Row]:
    """Plausible wrong answers fail the accuracy check: a check that cannot fail proves nothing."""
    case = max(subject.cases, key=lambda c: _elements(c.make(dtype, torch.device("cpu"), generator())))
    found = evaluate(subject, case, dtype, device, preference)
    chosen = plan_of(subject, found.inputs, preference)
    rows = []
    for name, mistake in subject.mistakes.items():
        outputs, gradients = mistake(found.upstream, found.inputs)
        wrong = Evaluation(found.inputs, found.upstream, outputs, gradients)
        caught = [output for output, measured in measure(subject, chosen, wrong).items() if not measured.holds]
        rows.append(
            Row(
                subject.name,
                "mistakes are caught",
                short(dtype),
                plan_names(chosen),
                "rejected",
                f"{name}: {', '.join(caught) or 'nothing'} rejected",
                bool(caught),
                "" if caught else f"the mistake {name!r} passes the accuracy check",
            )
        )
    return rows


def gradients(subject: Subject, device: torch.device, preference: Preference) -> list[Row]:
    """Finite differences, in float64, agree with the op's gradient and with no mistaken one."""
    case = next(c for c in subject.cases if 0 < _elements(c.make(torch.float64, device, generator())) <= 1000)
    inputs = each(
        lambda t: (t * 0.1).requires_grad_() if t.is_floating_point() else t,
        case.make(torch.float64, device, generator()),
    )
    found = evaluate(subject, case, torch.float64, device, preference)
    chosen = plan_of(subject, found.inputs, preference)

    def row(name: str, passed: bool, detail: str = "") -> Row:
        return Row(subject.name, "gradients", "float64", plan_names(chosen), "finite differences", name, passed, detail)

    ok = torch.autograd.gradcheck(
        lambda *x: as_tuple(subject(*x, preference=preference)), inputs, raise_exception=False, fast_mode=False
    )
    rows = [row("op agrees", ok, "" if ok else "gradcheck disagrees with the op's gradient")]
    plain = each(torch.Tensor.detach, inputs)
    upstream = tuple(torch.ones_like(o) for o in subject.reference(*plain))
    numeric = _central_differences(subject, plain)

    def agrees(answer: Answers) -> bool:
        # Central differences: truncation of step²/6 and cancellation of 2⁻⁵³·|sum|/step, together below 1e-7 here.
        return all((a - n).norm() <= 1e-6 * (1 + n.norm()) for a, n in zip(answer[1], numeric, strict=True))

    reference = ((), subject.reference_backward(*upstream, *plain))
    rows.append(row("reference agrees", agrees(reference), "the reference's adjoint is wrong"))
    for name, mistake in subject.mistakes.items():
        answer = mistake(upstream, plain)
        right_gradient = all(torch.equal(a, r) for a, r in zip(answer[1], reference[1], strict=True))
        if not right_gradient and name != "upstream gradient ignored":  # upstream is all ones here
            rows.append(row(f"{name} disagrees", not agrees(answer), "finite differences accept a wrong gradient"))
    return rows


def _elements(inputs: Inputs) -> int:
    """The elements of all inputs together; 0 where one of them is empty."""
    sizes = [tensor.numel() for tensor in inputs if tensor is not None]
    return sum(sizes) if all(sizes) else 0


def _central_differences(subject: Subject, inputs: Inputs) -> list[torch.Tensor]:
    """The gradient of the sum of the reference's outputs, an element of a floating input at a time."""
    step = 1e-6
    numeric = []
    for index, tensor in enumerate(inputs):
        if not is_differentiable(tensor):
            continue
        flat = tensor.contiguous().flatten()
        slopes = torch.empty_like(flat)
        for position in range(flat.numel()):
            sums = []
            for sign in (1, -1):
                moved = flat.clone()
                moved[position] += sign * step
                changed = (*inputs[:index], moved.reshape(tensor.shape), *inputs[index + 1 :])
                sums.append(sum(float(o.sum()) for o in subject.reference(*changed)))
            slopes[position] = (sums[0] - sums[1]) / (2 * step)
        numeric.append(slopes.reshape(tensor.shape))
    return numeric
