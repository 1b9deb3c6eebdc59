"""Races between programs, which the interpreter hides, are noticed; programs that share nothing are left alone."""

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.verify.interpreter.races import Race, watched

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="what the interpreter hides"),
]


def _run(name: str) -> Tensor:
    from tests.verify.interpreter import racing_kernels

    out = torch.zeros(16)
    getattr(racing_kernels, name)[(3,)](out, torch.arange(16.0))
    return out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("store_different", "two programs store different numbers"),
        ("store_past_the_end", "two programs store different numbers"),
        ("load_of_another", "a program loads what another one stores"),
        ("store_twice_at_once", "one store has two numbers"),
    ],
)
def test_a_race_is_noticed(name: str, words: str) -> None:
    _run(name)  # the interpreter has nothing against it
    with watched(), pytest.raises(Race, match=words):
        _run(name)


@pytest.mark.parametrize("name", ["store_own", "store_same", "store_again", "store_nothing"])
def test_what_is_no_race_is_not(name: str) -> None:
    expected = _run(name)
    with watched():
        assert torch.equal(_run(name), expected)


def test_the_interpreter_is_as_before_afterwards() -> None:
    with watched():
        _run("store_own")
    _run("store_different")
