"""Every kernel for Hopper on small problems, in the model of Gluon: errors, bits under other schedules, and mutants."""

from functools import cache

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from tests.gluon import hopper
from tests.gluon.hopper import results
from tests.gluon.model.programs import SCHEDULES
from tests.gluon.rule.examples import EXAMPLES, Example

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]


@cache
def first_results(name: str) -> dict[str, Tensor]:
    """Of an example, under the first schedule."""
    return results(EXAMPLES[name](), SCHEDULES[0])


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_within_their_guarantees(name: str) -> None:
    for output, statement, measured in hopper.errors(EXAMPLES[name](), first_results(name)):
        assert measured.holds, (output, statement, measured)


@pytest.mark.parametrize("name", ["few heads", "many heads", "packed", "split, packed"])
def test_schedules_change_no_bit(name: str, everything: bool) -> None:
    first = first_results(name)
    for schedule in SCHEDULES[1 : None if everything else 2]:
        other = results(EXAMPLES[name](), schedule)
        assert first and all(torch.equal(first[output], other[output]) for output in first)


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
def test_resets_change_no_bit_before_them_and_have_no_gradient(heads: int, key_heads: int) -> None:
    shape, options = (1, 130, key_heads, heads, 64, 64), {"decay": 0.1}
    before = results(Example.of(shape, **options), SCHEDULES[0])
    after = results(Example.of(shape, **options, resets=(70, 71)), SCHEDULES[0])
    assert torch.equal(after["o"][:, :70], before["o"][:, :70])
    assert not after["dg"][:, 70:72].any() and after["dg"][:, 72:].any()


END, TOKENS = 130, 200
"""Where the first of two sequences ends, and the second."""


@cache
def two_sequences(heads: int, key_heads: int) -> tuple[Example, dict[str, Tensor]]:
    example = Example.of((1, TOKENS, key_heads, heads, 64, 64), cu_seqlens=(0, END, TOKENS))
    return example, results(example, SCHEDULES[0])


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
@pytest.mark.parametrize("names", [("k", "v", "g", "beta"), ("q",)], ids=["all but q", "q"])
def test_nan_stays_within_its_chunk_and_after(heads: int, key_heads: int, names: tuple[str, ...]) -> None:
    """Chunks before it, other sequences, and their gradients keep every bit; a query reaches its own output alone."""
    token, begin = 100, 64
    example, right = two_sequences(heads, key_heads)
    inputs = [None if x is None else x.clone() for x in example.inputs]
    for name, x in zip(("q", "k", "v", "g", "beta"), inputs, strict=False):
        if name in names:
            x[:, token] = torch.nan
    got = results(Example(tuple(inputs)), SCHEDULES[0])
    reach = slice(token, token + 1) if names == ("q",) else slice(begin, END)
    assert got["o"][:, token].isnan().all()
    elsewhere = torch.ones(TOKENS, dtype=torch.bool)
    elsewhere[reach] = False
    assert torch.equal(got["o"][:, elsewhere], right["o"][:, elsewhere])
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(got[name][:, END:], right[name][:, END:]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(got[name][1], right[name][1]), name


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
def test_lost_gradients_of_outputs_reach_no_later_chunk_and_no_other_head(heads: int, key_heads: int) -> None:
    """Nor another sequence, which is as far as the lost gradient of a final state may reach."""
    token, end_of_chunk = 100, 128
    example, right = two_sequences(heads, key_heads)
    for output, reached in ((0, end_of_chunk), (1, END)):
        upstream = [x.clone() for x in example.upstream() if x is not None]
        upstream[output][(0, token, 0) if output == 0 else (0, 0)] = torch.nan
        call = example.call
        got = hopper.named(call, *hopper.run_both(call, tuple(upstream), SCHEDULES[0]))
        assert got["dv"][:, token, 0].isnan().all() and got["dv"][:, 0, 0].isnan().all()
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            assert torch.equal(got[name][:, reached:], right[name][:, reached:]), (name, output)
            assert torch.equal(got[name][:, :, 1:], right[name][:, :, 1:]), (name, output)
        for kept in ((1,), (0, slice(1, None))):
            assert torch.equal(got["dinitial_state"][kept], right["dinitial_state"][kept])
