"""Sequences that the reverse scan splits, in the model of Gluon, where segments are so short that few tokens have
several: B' from zero, composed with Mᵀ, and the scan of all segments at once."""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES
from tests.gluon.rule.examples import Example
from tests.mutants.calls.gluon import small

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]

BOUNDS = (0, 0, 100, 100 + 3 * 128 + 70, 100 + 4 * 128 + 70)
"""Of sequences without tokens, of less than a segment, of more than three, and of one."""


@pytest.fixture(autouse=True)
def _small_segments() -> Iterator[None]:
    with small():
        yield


@cache
def packed() -> tuple[Example, dict[str, Tensor]]:
    example = Example.of((1, BOUNDS[-1], 1, 2, 64, 64), decay=0.005, cu_seqlens=BOUNDS)
    return example, hopper.results(example, SCHEDULES[0])


def test_gradients_are_within_their_guarantees() -> None:
    for output, statement, measured in hopper.errors(*packed()):
        assert measured.holds, (output, statement, measured)


def test_schedules_change_no_bit() -> None:
    example, first = packed()
    other = hopper.results(example, SCHEDULES[1])
    assert first and all(torch.equal(first[output], other[output]) for output in first)


def test_a_sequence_has_the_gradients_that_it_has_alone() -> None:
    example, together = packed()
    do, dfinal = example.upstream()
    assert do is not None and dfinal is not None
    for number, (begin, end) in enumerate(pairwise(BOUNDS)):
        if begin == end:
            continue
        tokens = tuple(x[:, begin:end] for x in example.inputs[:5] if x is not None)
        state = example.inputs[5]
        assert state is not None
        call = Example((*tokens, state[number : number + 1], None)).call
        results = hopper.run_both(call, (do[:, begin:end], dfinal[number : number + 1]), SCHEDULES[0])
        for name, result in hopper.named(call, *results).items():
            if name in ("final_state", "dinitial_state"):
                assert torch.equal(result[0], together[name][number]), (name, number)
            else:
                assert torch.equal(result, together[name][:, begin:end]), (name, number)
