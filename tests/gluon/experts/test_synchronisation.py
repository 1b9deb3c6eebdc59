"""Every wait and arrival of the expert layer's kernels for Hopper is left out in turn; the model must notice."""

from functools import cache
from importlib import import_module

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from tests.gluon.breaks import Break, breaks
from tests.gluon.experts.layers import Layer
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.model.translation import Codes
from tests.gluon.model.values import Fault

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]

LAYER = Layer.of(320, 256, (276, 0, 84))
"""With more stages than shared memory holds, an expert without rows, and a tile that has none for one warpgroup."""

CHECKED = {
    "up": ("forward",), "product": ("forward",), "hidden_gradients": ("backward",), "outer": ("backward",),
    "device": ("forward", "backward"),
}  # fmt: skip
"""Directions that launch what a module has."""

EQUIVALENT: dict[tuple[str, str], str] = {}
"""What may survive, and why."""


@cache
def kept() -> tuple[Tensor, ...]:
    return LAYER.kept(programs=1)


def run(direction: str, schedule: Schedule, codes: Codes | None = None) -> tuple[Tensor, ...]:
    if direction == "forward":
        return LAYER.kept(schedule, codes, programs=1)
    return LAYER.gradients(kept(), schedule, codes, programs=1)


@cache
def expected(direction: str) -> tuple[Tensor, ...]:
    return run(direction, SCHEDULES[0])


def is_noticed(broken: Break) -> bool:
    codes = {(broken.module, broken.function): broken.code}
    for direction in CHECKED[broken.module.rpartition(".")[2]]:
        for schedule in (*SCHEDULES[1:], SCHEDULES[0]):
            try:
                results = run(direction, schedule, codes)
            except Fault:
                return True
            if not all(map(torch.equal, results, expected(direction))):
                return True
    return False


@pytest.mark.parametrize("module", CHECKED)
def test_synchronisation_is_needed(module: str, everything: bool) -> None:
    listed = list(breaks(import_module(f"adjoint.ops.moe.experts.hopper.{module}")))
    assert listed
    unnoticed = [broken for broken in listed[:: 1 if everything else 4] if not is_noticed(broken)]
    explained = {statement for of, statement in EQUIVALENT if of == module}
    assert [str(broken) for broken in unnoticed if broken.statement not in explained] == []
    assert len(unnoticed) <= len(explained), [str(broken) for broken in unnoticed]


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_kernels_with_all_of_it_are_right(direction: str) -> None:
    """Or a fault of theirs would stand for every break."""
    for schedule in SCHEDULES[1:3]:
        assert all(map(torch.equal, run(direction, schedule), expected(direction)))
