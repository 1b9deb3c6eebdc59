"""Every kernel for Hopper on small problems, in the model of Gluon: errors, bits under other schedules, and mutants."""

import pytest
import torch
from torch import Tensor

from adjoint.contract.inputs import widened
from adjoint.core import kernels
from adjoint.ops.gated_delta.values import nearly_equal
from tests.gluon import hopper
from tests.gluon.examples import Example
from tests.gluon.model import SCHEDULES, Schedule

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter")


EXAMPLES = {
    "few heads": lambda: Example.of((1, 130, 2, 4, 64, 64)),
    "one head to a key head": lambda: Example.of((1, 70, 3, 3, 64, 128)),
    "many heads": lambda: Example.of((1, 100, 5, 10, 128, 64), torch.float16),
    "packed": lambda: Example.of((1, 200, 4, 16, 64, 64), cu_seqlens=(0, 0, 1, 66, 200)),
    "normalised": lambda: Example.of((2, 66, 5, 10, 64, 64), normalize=True),
    "keys nearly equal": lambda: Example.of((1, 128, 5, 10, 64, 128), keys=nearly_equal, decay=0.1),
    "resets": lambda: Example.of((1, 130, 2, 4, 64, 64), decay=0.1, resets=(0, 63, 64, 70, 71, 129)),
    "resets of many heads": lambda: Example.of(
        (1, 140, 5, 10, 128, 64), torch.float16, decay=0.1, resets=tuple(range(64, 112)), wide_gates=False
    ),
    "resets, split": lambda: Example.of((1, 1090, 1, 2, 64, 64), decay=0.05, resets=(700, 1023, 1024)),
    "split": lambda: Example.of((1, 1090, 1, 2, 64, 64), decay=0.05, state=False),
    "split, packed": lambda: Example.of((1, 1300, 1, 1, 128, 128), decay=0.05, cu_seqlens=(0, 70, 1300)),
}


def run(example: Example, schedule: Schedule) -> dict[str, Tensor]:
    """Outputs and gradients of the plan for Hopper, by name, without the states that it keeps."""
    call = example.call
    assert call.adjoint is not None
    outputs, slopes = hopper.run_both(call, example.upstream(), schedule)
    named = zip((*call.operator.outputs, *call.adjoint.outputs), (*outputs, *slopes), strict=True)
    return {name: result for name, result in named if name != "saved" and result.numel()}


@pytest.mark.parametrize("name", EXAMPLES)
def test_results_are_within_their_guarantees(name: str) -> None:
    example = EXAMPLES[name]()
    call, results = example.call, run(example, SCHEDULES[0])
    assert call.adjoint is not None and call.adjoint_arguments is not None
    upstream, kept = example.upstream(), call.operator.allocate(*call.arguments)
    promises = {}
    for operator, arguments in (
        (call.operator, call.arguments), (call.adjoint, call.adjoint_arguments(upstream, kept))
    ):  # fmt: skip
        promises |= hopper.candidate_of(operator).guarantee(operator.describe(*arguments))
    inputs, slopes = widened(example.inputs), widened(upstream)
    for (output, result), exact in zip(results.items(), example.exact(), strict=True):
        arguments = inputs if output in call.operator.outputs else (*slopes, *inputs)
        for statement in (promises[output].error, promises[output].recorded):
            measured = statement.measure(result, exact, *arguments)
            assert measured.holds, (output, measured)


@pytest.mark.parametrize("name", ["few heads", "many heads", "packed", "split, packed"])
def test_schedules_change_no_bit(name: str) -> None:
    example = EXAMPLES[name]()
    first, *others = (run(example, schedule) for schedule in SCHEDULES)
    for other in others:
        assert all(torch.equal(first[output], other[output]) for output in first)


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
def test_resets_change_no_bit_before_them_and_have_no_gradient(heads: int, key_heads: int) -> None:
    shape, options = (1, 130, key_heads, heads, 64, 64), {"decay": 0.1}
    before = run(Example.of(shape, **options), SCHEDULES[0])
    after = run(Example.of(shape, **options, resets=(70, 71)), SCHEDULES[0])
    assert torch.equal(after["o"][:, :70], before["o"][:, :70])
    assert not after["dg"][:, 70:72].any() and after["dg"][:, 72:].any()


@pytest.mark.parametrize(("heads", "key_heads"), [(2, 1), (10, 5)], ids=["few heads", "many heads"])
@pytest.mark.parametrize("names", [("k", "v", "g", "beta"), ("q",)], ids=["all but q", "q"])
def test_nan_stays_within_its_chunk_and_after(heads: int, key_heads: int, names: tuple[str, ...]) -> None:
    """Chunks before it, other sequences, and their gradients keep every bit; a query reaches its own output alone."""
    token, begin, end = 100, 64, 130
    example = Example.of((1, 200, key_heads, heads, 64, 64), cu_seqlens=(0, end, 200))
    right = run(example, SCHEDULES[0])
    inputs = [None if x is None else x.clone() for x in example.inputs]
    for name, x in zip(("q", "k", "v", "g", "beta"), inputs, strict=False):
        if name in names:
            x[:, token] = torch.nan
    got = run(Example(tuple(inputs)), SCHEDULES[0])
    reach = slice(token, token + 1) if names == ("q",) else slice(begin, end)
    assert got["o"][:, token].isnan().all()
    elsewhere = torch.ones(200, dtype=torch.bool)
    elsewhere[reach] = False
    assert torch.equal(got["o"][:, elsewhere], right["o"][:, elsewhere])
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert torch.equal(got[name][:, end:], right[name][:, end:]), name
    for name in ("final_state", "dinitial_state"):
        assert torch.equal(got[name][1], right[name][1]), name
