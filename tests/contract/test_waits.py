"""Plans in PyTorch that state that they never wait for the device read no value of a tensor, and the others do.

They run on tensors without values, which take the branches of an accelerator: whatever would copy a number to the
host, or needs one to know how large a result is, raises there.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo  # it remembers functions of torch as they are when it is imported: none is replaced yet

from adjoint import ops
from adjoint.contract import directions
from adjoint.contract.cases import Subject
from adjoint.contract.inputs import Inputs, each
from adjoint.core import errors
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Call, bind
from adjoint.core.preference import Preference, resolve

SUBJECTS = [subject for module in ops.cases() for subject in module.SUBJECTS]


def _preferences(subject: Subject) -> list[Preference]:
    named = [plan for plan in subject.plans if all(name.startswith("eager") for name in plan.split("+"))]
    return [Preference(backend="eager"), *(Preference(plan=plan) for plan in named)]


def _calls(subject: Subject) -> Iterator[Call]:
    """Of every case, in every form, on tensors without values."""
    dtype = torch.bfloat16 if torch.bfloat16 in subject.dtypes else subject.dtypes[0]
    for case in subject.cases:
        if case.heavy:
            continue
        drawn = case.make(dtype, torch.device("cpu"), torch.Generator().manual_seed(0))
        inputs: Inputs = each(lambda x: x.to("meta"), drawn)
        positional, named = subject.arguments(inputs)
        forms = [form.keywords(inputs) for form in subject.forms if form.takes(drawn)]
        for keywords in ({}, *forms):
            yield bind(subject.function, *positional, **named, **keywords)


def _reads(bound: directions.Bound) -> bool:
    """Whether a plan reads values."""
    try:
        bound.plan.execute(bound.arguments)
    except (NotImplementedError, RuntimeError) as error:
        assert "meta" in str(error).lower(), error
        return True
    return False


def _directions(call: Call, preference: Preference) -> Iterator[directions.Bound]:
    text = resolve(preference)
    forward = directions.forward(call, text)
    yield forward
    if call.adjoint is not None:
        outputs = forward.plan.allocate(forward.arguments)
        public = outputs[: call.public_outputs]
        yield directions.backward(
            call, tuple(torch.empty_like(x) for x in public if x.is_floating_point()), outputs, text
        )


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_a_plan_waits_where_it_says_so_and_nowhere_else(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "autocast", lambda *arguments, **keywords: nullcontext())  # knows no such device
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *device: False)
    monkeypatch.setattr(errors, "_words", {})  # none of a device without values is left for others to read
    reads: dict[tuple[str, str, bool], set[bool]] = defaultdict(set)
    for preference in _preferences(subject):
        for call in _calls(subject):
            try:
                for bound in _directions(call, preference):
                    plan = bound.plan
                    reads[plan.operator.name, plan.name, plan.waits].add(_reads(bound))
            except Unsupported:
                continue
    assert reads
    for (operator, name, waits), found in reads.items():
        assert waits or found == {False}, f"{operator}: the plan {name} says that it never waits, and reads values"
        assert not waits or True in found, f"{operator}: the plan {name} says that it waits, and reads nothing"
