"""The rule's scan with states ahead of the outputs, in the model of Gluon: its bits are those of a scan in one."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.op.operator import forget
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule import shape as rule_shape
from adjoint.ops.gated_delta.rule.hopper.states_ahead import rounds_of
from adjoint.ops.gated_delta.values import nearly_equal
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.rule.examples import Example

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]

EXAMPLES: dict[str, Callable[[], Example]] = {
    "seven stretches": lambda: Example.of((1, 8 * 64 + 3, 1, 2, 64, 128)),
    "one token": lambda: Example.of((1, 1, 1, 2, 64, 128)),
    "states in and out": lambda: Example.of((2, 300, 1, 2, 128, 128), torch.float16),
    "packed": lambda: Example.of((1, 400, 1, 2, 64, 128), cu_seqlens=(0, 0, 1, 66, 390, 400)),
    "neither state": lambda: Example.of((1, 330, 1, 2, 64, 128), state=False, final=False),
    "two programs": lambda: Example.of((1, 330, 1, 2, 64, 256)),
    "keys nearly equal": lambda: Example.of((1, 450, 1, 2, 128, 128), keys=nearly_equal, decay=0.1),
    "resets": lambda: Example.of((1, 330, 1, 2, 64, 128), decay=0.1, resets=(0, 63, 64, 70, 71, 329)),
    "saved": lambda: Example.of((1, 800, 1, 2, 64, 128), decay=0.05),
    "saved, packed": lambda: Example.of((1, 600, 1, 2, 64, 128), decay=0.05, cu_seqlens=(0, 70, 600)),
}
"""Of one stretch to several, whose first has fewer chunks than the others, or none. States are saved every two chunks:
within stretches, and at their ends."""

MORE = {"two programs", "keys nearly equal", "resets", "saved, packed"}
"""Those that run with --all."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sequences of few heads are not split, so that few suffice; and segments of two chunks."""
    monkeypatch.setattr(rule_shape, "FEW_HEADS", 0)
    monkeypatch.setattr(packing, "SEGMENT", 128)
    forget()
    yield
    monkeypatch.undo()
    forget()


def outputs(example: Example, parameters: dict[str, int], schedule: Schedule = SCHEDULES[0]) -> tuple[Tensor, ...]:
    call = example.call
    return hopper.run(call.operator, call.arguments, schedule, parameters=parameters)


@cache
def first_outputs(name: str) -> tuple[Tensor, ...]:
    """Of an example, with states ahead, under the first schedule."""
    return outputs(EXAMPLES[name](), hopper.AHEAD)


@pytest.mark.parametrize("name", EXAMPLES)
def test_bits_are_those_of_a_scan_in_one(name: str, everything: bool) -> None:
    if name in MORE and not everything:
        pytest.skip("with --all")
    right, got = outputs(EXAMPLES[name](), hopper.WHOLE_V), first_outputs(name)
    assert any(x.numel() for x in right)
    for one, other in zip(right, got, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["seven stretches", "packed"])
def test_schedules_change_no_bit(name: str, everything: bool) -> None:
    for schedule in SCHEDULES[1 : None if everything else 2]:
        other = outputs(EXAMPLES[name](), hopper.AHEAD, schedule)
        assert other and all(map(torch.equal, first_outputs(name), other))


def test_stretches_have_all_chunks() -> None:
    for chunks in range(1, 600):
        a, y, z = rounds_of(chunks)
        assert a >= 0 and min(y, z) >= 1 and chunks <= a + 2 * y + 4 * z < chunks + 6
