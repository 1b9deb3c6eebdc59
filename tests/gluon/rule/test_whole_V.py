"""The rule's scan with all of V in a program, in the model of Gluon: its bits are those of the scan in halves, so what
those show holds."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.ops.gated_delta.values import nearly_equal
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES, Schedule
from tests.gluon.rule.examples import Example

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]

EXAMPLES: dict[str, Callable[[], Example]] = {
    "few heads": lambda: Example.of((1, 330, 1, 2, 64, 128)),
    "many heads": lambda: Example.of((1, 100, 5, 10, 128, 128), torch.float16, state=False),
    "packed": lambda: Example.of((1, 200, 4, 16, 64, 128), cu_seqlens=(0, 0, 1, 66, 200), final=False),
    "two programs": lambda: Example.of((2, 66, 5, 10, 64, 256)),
    "keys nearly equal": lambda: Example.of((1, 128, 5, 10, 128, 128), keys=nearly_equal, decay=0.1),
    "resets": lambda: Example.of((1, 130, 2, 4, 64, 128), decay=0.1, resets=(0, 63, 64, 70, 71, 129)),
    "saved": lambda: Example.of((1, 1090, 5, 10, 64, 128), decay=0.05),
    "split": lambda: Example.of((1, 1090, 1, 2, 64, 128), decay=0.05),
    "split, packed": lambda: Example.of((1, 1300, 1, 2, 64, 128), decay=0.05, cu_seqlens=(0, 70, 1300), state=False),
}
"""Problems with an even number of value heads: of an odd one, the scan in halves has the scores of another kernel, and
serves alone."""


def outputs(example: Example, parameters: dict[str, int], schedule: Schedule = SCHEDULES[0]) -> tuple[Tensor, ...]:
    call = example.call
    return hopper.run(call.operator, call.arguments, schedule, parameters=parameters)


@cache
def first_outputs(name: str) -> tuple[Tensor, ...]:
    """Of an example, with all of V in a program, under the first schedule."""
    return outputs(EXAMPLES[name](), hopper.WHOLE_V)


@pytest.mark.parametrize("name", EXAMPLES)
def test_bits_are_those_of_64_columns_a_program(name: str) -> None:
    right, got = outputs(EXAMPLES[name](), hopper.HALVES), first_outputs(name)
    assert any(x.numel() for x in right)
    for one, other in zip(right, got, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["few heads", "packed"])
def test_schedules_change_no_bit(name: str, everything: bool) -> None:
    for schedule in SCHEDULES[1 : None if everything else 2]:
        other = outputs(EXAMPLES[name](), hopper.WHOLE_V, schedule)
        assert other and all(map(torch.equal, first_outputs(name), other))
