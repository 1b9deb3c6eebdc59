"""Every wait, arrival and commit of the kernels for Hopper is left out in turn; the model must notice."""

from functools import cache
from importlib import import_module

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from tests.gluon import hopper
from tests.gluon.breaks import Break, breaks
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.model.translation import Codes
from tests.gluon.model.values import Fault
from tests.gluon.rule.examples import Example

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]

EXAMPLES = {
    "few heads": Example.of((1, 330, 1, 2, 64, 64)),
    "many heads": Example.of((1, 330, 1, 10, 64, 64)),
    "split": Example.of((1, 1100, 1, 2, 64, 64), decay=0.05),
    "all of V": Example.of((1, 330, 1, 2, 64, 128)),
}
"""With more chunks than shared memory holds."""

CHECKED = {
    "forward_scan": (("few heads", "forward"),),
    "whole_scan": (("all of V", "forward"),),
    "chunk_inverse": (("few heads", "forward"),),
    "state_chunks": (("split", "forward"),),
    "state_scan": (("few heads", "backward"),),
    "reverse_scan": (("many heads", "backward"),),
    "gradients": (("few heads", "backward"),),
    "device": (("few heads", "forward"), ("few heads", "backward"), ("many heads", "backward")),
}
"""Examples and directions that launch what a module has."""

EQUIVALENT = {
    ("forward_scan", "mbarrier.wait(tiles.ring.full.index(stage), phase)"): (
        "of the outputs: the state of a chunk is there only after its tiles are, and is waited for next"
    ),
    ("state_scan", "async_copy.wait_group(0)"): "every copy has completed a barrier that the other partition waits for",
    ("reverse_scan", "dS = warpgroup_mma_wait(SLICES + 1, deps=[dS])"): "it waits for nothing, and says so",
    ("reverse_scan", "async_copy.wait_group(0)"): "every copy has completed a barrier that the others wait for",
    (
        "gradients",
        "async_copy.commit_group()",
    ): "the first: its copies and those of the second group are waited for at once",
}
"""What may survive, once in each module, and why."""


@cache
def kept(name: str) -> tuple[Tensor, ...]:
    """The outputs of an example, with the states that its backward reads."""
    call = EXAMPLES[name].call
    return hopper.run(call.operator, call.arguments, SCHEDULES[0])


def run(name: str, direction: str, schedule: Schedule, codes: Codes | None = None) -> tuple[Tensor, ...]:
    example = EXAMPLES[name]
    call = example.call
    if direction == "forward":
        parameters = hopper.WHOLE_V if name == "all of V" else hopper.HALVES
        return hopper.run(call.operator, call.arguments, schedule, codes, parameters)
    assert call.adjoint is not None and call.adjoint_arguments is not None
    return hopper.run(call.adjoint, call.adjoint_arguments(example.upstream(), kept(name)), schedule, codes)


def is_noticed(broken: Break) -> bool:
    codes = {(broken.module, broken.function): broken.code}
    for place in CHECKED[broken.module.rpartition(".")[2]]:
        for schedule in (*SCHEDULES[1:], SCHEDULES[0]):
            try:
                results = run(*place, schedule, codes)
            except Fault:
                return True
            if not all(map(torch.equal, results, expected(*place))):
                return True
    return False


@cache
def expected(name: str, direction: str) -> tuple[Tensor, ...]:
    return run(name, direction, SCHEDULES[0])


@pytest.mark.parametrize("module", CHECKED)
def test_synchronisation_is_needed(module: str, everything: bool) -> None:
    listed = list(breaks(import_module(f"adjoint.ops.gated_delta.rule.hopper.{module}")))
    assert listed
    unnoticed = [broken for broken in listed[:: 1 if everything else 6] if not is_noticed(broken)]
    explained = {statement for of, statement in EQUIVALENT if of == module}
    assert [str(broken) for broken in unnoticed if broken.statement not in explained] == []
    assert len(unnoticed) <= len(explained), [str(broken) for broken in unnoticed]
