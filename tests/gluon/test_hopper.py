"""Every kernel for Hopper on small problems, in the model of Gluon: errors, bits under other schedules, and mutants."""

import pytest
import torch

from adjoint.core import kernels
from tests.gluon import hopper
from tests.gluon.examples import EXAMPLES, Example
from tests.gluon.hopper import results
from tests.gluon.programs import SCHEDULES

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_within_their_guarantees(name: str) -> None:
    example = EXAMPLES[name]()
    for output, statement, measured in hopper.errors(example, results(example, SCHEDULES[0])):
        assert measured.holds, (output, statement, measured)


@pytest.mark.parametrize("name", ["few heads", "many heads", "packed", "split, packed"])
def test_schedules_change_no_bit(name: str, everything: bool) -> None:
    example = EXAMPLES[name]()
    first, *others = (results(example, schedule) for schedule in SCHEDULES[: None if everything else 2])
    for other in others:
        assert all(torch.equal(first[output], other[output]) for output in first)


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
def test_resets_change_no_bit_before_them_and_have_no_gradient(heads: int, key_heads: int) -> None:
    shape, options = (1, 130, key_heads, heads, 64, 64), {"decay": 0.1}
    before = results(Example.of(shape, **options), SCHEDULES[0])
    after = results(Example.of(shape, **options, resets=(70, 71)), SCHEDULES[0])
    assert torch.equal(after["o"][:, :70], before["o"][:, :70])
    assert not after["dg"][:, 70:72].any() and after["dg"][:, 72:].any()


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
@pytest.mark.parametrize("names", [("k", "v", "g", "beta"), ("q",)], ids=["all but q", "q"])
def test_nan_stays_within_its_chunk_and_after(heads: int, key_heads: int, names: tuple[str, ...]) -> None:
    """Chunks before it, other sequences, and their gradients keep every bit; a query reaches its own output alone."""
    token, begin, end = 100, 64, 130
    example = Example.of((1, 200, key_heads, heads, 64, 64), cu_seqlens=(0, end, 200))
    right = results(example, SCHEDULES[0])
    inputs = [None if x is None else x.clone() for x in example.inputs]
    for name, x in zip(("q", "k", "v", "g", "beta"), inputs, strict=False):
        if name in names:
            x[:, token] = torch.nan
    got = results(Example(tuple(inputs)), SCHEDULES[0])
    reach = slice(token, token + 1) if names == ("q",) else slice(begin, end)
    assert got["o"][:, token].isnan().all()
    elsewhere = torch.ones(200, dtype=torch.bool)
    elsewhere[reach] = False
    assert torch.equal(got["o"][:, elsewhere], right["o"][:, elsewhere])
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(got[name][:, end:], right[name][:, end:]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(got[name][1], right[name][1]), name
