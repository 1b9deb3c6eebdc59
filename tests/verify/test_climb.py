"""No op breaks what it promises on inputs that climb towards its limits: every op, every plan that runs here."""

from dataclasses import replace

import pytest
import torch

from adjoint.contract.cases import Subject
from adjoint.core.guarantee import Derived
from adjoint.core.kernels import interpreting
from adjoint.core.preference import Preference
from adjoint.verify.listing.jobs import named_plans, on_device, served_backends, subjects
from tests.verify.climbing import climb

SLOW = ("gated_delta_rule", "linear_cross_entropy", "causal_conv1d")
"""Subjects of which an evaluation takes longest, by how their names begin: the rule has a search of its own."""

RESETS = "resets"
"""Of subjects all of whose gates are infinite."""


def _preferences(subject: Subject, device: torch.device, on_kernels: bool) -> list[tuple[Preference, Subject]]:
    """The plans of a subject, each with the dtypes it serves."""
    named = [(Preference(plan=plan), subject) for plan in named_plans(subject, device)]
    every = [(Preference(backend=name), served) for name, served in served_backends(subject, device)] + named
    return [
        (preference, served)
        for preference, served in every
        if ("triton" in f"{preference.backend} {preference.plan}") == on_kernels
    ]


def _climb_all(subject: Subject, device: torch.device, on_kernels: bool, climbs: int, steps: int) -> None:
    subject = on_device(subject, device)
    for preference, served in _preferences(subject, device, on_kernels):
        for dtype in served.dtypes:
            if dtype == torch.float64 and on_kernels:
                continue
            largest = climb(subject, dtype, device, preference, climbs=climbs, steps=steps)
            broken = {name: share for name, share in largest.items() if not share <= 1.0}
            assert not broken or (dtype == torch.float16 and _overflows(broken)), (dtype, preference, broken)


def _overflows(broken: dict[str, float]) -> bool:
    """float16 has few exponents: what is infinite there, of a layer's products for example, is outside of a domain."""
    return all(share == float("inf") for share in broken.values())


SUBJECTS = [subject for subject in subjects() if RESETS not in subject.name]


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.name)
def test_no_climbed_input_breaks_a_promise_in_torch(subject: Subject, everything: bool) -> None:
    climbs, steps = (1, 3) if subject.name.startswith(SLOW) else (2, 6)
    _climb_all(subject, torch.device("cpu"), False, *((4, 20) if everything else (climbs, steps)))


@pytest.mark.kernels
@pytest.mark.parametrize(
    "subject", [x for x in SUBJECTS if not x.name.startswith("gated_delta_rule")], ids=lambda subject: subject.name
)
def test_no_climbed_input_breaks_a_promise_of_kernels(subject: Subject, device: torch.device, everything: bool) -> None:
    climbs, steps = (1, 2) if interpreting() else (6, 20)
    _climb_all(subject, device, True, *((2, 8) if everything and interpreting() else (climbs, steps)))


def test_a_bound_that_is_too_small_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is promised of rounded results is passed at once, and so is what a sum of float32 may lose."""

    def measure(self: Derived, output: torch.Tensor, exact: torch.Tensor, *inputs: torch.Tensor) -> object:
        measured = original(self, output, exact, *inputs)
        return replace(measured, value=2 * measured.value)

    original = Derived.measure
    monkeypatch.setattr(Derived, "measure", measure)
    for name in ("rms_norm", "sigmoid_gate", "moe.experts", "gated_delta_step"):
        (subject,) = (x for x in SUBJECTS if x.name == name)
        found = climb(on_device(subject, torch.device("cpu")), torch.bfloat16, torch.device("cpu"),
                      Preference(backend="eager"), climbs=2, steps=6)  # fmt: skip
        assert max(found.values()) > 1.0, name
