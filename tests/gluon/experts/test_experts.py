"""The expert layer's kernels for Hopper in the model of Gluon: errors, and what may change no bit."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from adjoint.contract.inputs import widened
from adjoint.core import kernels
from adjoint.core.errors import ArgumentError, check
from adjoint.ops.moe.experts.hopper import layer as layer_module
from tests.gluon import hopper
from tests.gluon.experts.layers import GRADIENTS, LAYERS, Layer
from tests.gluon.model.programs import SCHEDULES

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(not kernels.interpreting(), reason="portable kernels beside them need the interpreter"),
]


@pytest.fixture(autouse=True)
def _out_of_range(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An index out of range is reported at once on the CPU; here it is to have no effect, as on a GPU."""
    monkeypatch.setattr(layer_module, "check", lambda: None)
    yield
    with suppress(ArgumentError):
        check()


@pytest.mark.parametrize("name", LAYERS)
def test_results_are_within_their_guarantees(name: str) -> None:
    layer = LAYERS[name]()
    call, exact = layer.call, layer.exact()
    assert call.adjoint is not None and call.adjoint_arguments is not None
    kept = layer.kept()
    results = {"y": kept[0], **dict(zip(GRADIENTS, layer.gradients(kept), strict=True))}
    sides = (call.operator, call.arguments), (call.adjoint, call.adjoint_arguments((layer.dy,), kept))
    stated = {k: v for op, given in sides for k, v in hopper.candidate_of(op).guarantee(op.describe(*given)).items()}
    inputs, (slope,) = widened(layer.inputs), widened((layer.dy,))
    for output, result in results.items():
        arguments = inputs if output == "y" else (slope, *inputs)
        promise = stated[output]
        assert promise.recorded is not None
        assert promise.error.measure(result, exact[output], *arguments).holds, output
        assert promise.recorded.measure(result, exact[output]).holds, output


def test_schedules_and_numbers_of_programs_change_no_bit(everything: bool) -> None:
    layer = Layer.of(320, 192, (70, 20), slots=2)
    right = layer.results()
    schedules = SCHEDULES[1:] if everything else SCHEDULES[1:3]
    for schedule, programs in [*((schedule, 3) for schedule in schedules), (SCHEDULES[0], 1), (SCHEDULES[0], 200)]:
        results = layer.results(schedule, programs)
        assert all(torch.equal(right[output], results[output]) for output in right), (schedule, programs)


def test_a_token_has_the_same_bits_alone_and_an_expert_with_its_tokens() -> None:
    layer = Layer.of(128, 192, (70, 130, 9), slots=2)
    whole = layer.results()
    x, gate_up, down, indices, weights = layer.inputs
    for chosen in (torch.tensor([5]), (indices == 1).any(1).nonzero()[:, 0]):
        some = Layer((x[chosen], gate_up, down, indices[chosen], weights[chosen]), layer.dy[chosen]).results()
        for output in ("y", "dx", "dweights"):
            assert torch.equal(some[output], whole[output][chosen]), output
    for output in ("dgate_up", "ddown"):  # of the second choice
        assert torch.equal(some[output][1], whole[output][1]), output


def test_nan_stays_in_its_token_and_its_experts() -> None:
    """Rows of two experts meet in one tile of 64 terms, and in one tile of rows that is copied whole."""
    layer = Layer.of(128, 192, (70, 100, 30))
    right = layer.results()
    x, gate_up, down, indices, weights = (tensor.clone() for tensor in layer.inputs)
    token = int((indices[:, 0] == 1).nonzero()[0, 0])
    x[token] = torch.nan
    down[2] = torch.inf
    got = replace(layer, inputs=(x, gate_up, down, indices, weights)).results()
    untouched = (indices[:, 0] != 2) & (torch.arange(len(x)) != token)
    for output in ("y", "dx", "dweights"):
        assert torch.equal(got[output][untouched], right[output][untouched]), output
        assert got[output][token].isnan().all() or output == "dx"
    for output in ("dgate_up", "ddown"):
        assert torch.equal(got[output][0], right[output][0]), output
        assert got[output][1].isnan().any(), output


def test_a_lost_weight_or_upstream_gradient_stays_in_its_token_and_its_experts() -> None:
    """A weight has no part in any gradient of weights, and an upstream gradient none in y."""
    layer, token = Layer.of(128, 64, (70, 130, 10, 0), slots=2), 40
    right, (*others, indices, weights) = layer.results(), layer.inputs
    spoilt, dy = weights.clone(), layer.dy.clone()
    spoilt[token, 1] = dy[token, 5] = torch.nan
    elsewhere = torch.arange(len(indices)) != token
    for changed, entries, untouched in (
        (replace(layer, inputs=(*others, indices, spoilt)), indices[token, 1:], "dweights"),
        (replace(layer, dy=dy), indices[token], "y"),
    ):
        got, strangers = changed.results(), [e not in entries.tolist() for e in range(4)]
        for output in ("y", "dx", "dweights"):
            kept = torch.ones_like(elsewhere) if output == untouched else elsewhere
            assert torch.equal(got[output][kept], right[output][kept]), output
            assert output == untouched or got[output][token].isnan().any(), output
        for output in ("dgate_up", "ddown"):
            assert torch.equal(got[output][strangers], right[output][strangers]), output


def test_experts_without_rows_have_zero_gradients() -> None:
    results = Layer.of(128, 128, (0, 10, 0)).results()
    for output in ("dgate_up", "ddown"):
        assert not results[output][[0, 2]].any() and results[output][1].any()


def test_gradients_nobody_needs_are_not_computed() -> None:
    layer = LAYERS["tails on both sides of 64 rows"]()
    kept = layer.kept()
    right = layer.gradients(kept)
    call = layer.call
    assert call.adjoint is not None and call.adjoint_arguments is not None
    arguments = call.adjoint_arguments((layer.dy,), kept)
    for need in (1, 2, 4, 8, 9, 12):
        results = hopper.run(call.adjoint, (*arguments[:-1], need), SCHEDULES[0])
        for number, (result, expected) in enumerate(zip(results, right, strict=True)):
            if need >> number & 1:
                assert torch.equal(result, expected), (need, GRADIENTS[number])
            else:
                assert result.numel() == 0
