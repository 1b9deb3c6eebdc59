"""The backward of sequences that are split, long ones of few heads; segments of two chunks here."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.contract.inputs import Inputs
from adjoint.ops.gated_delta import packing
from adjoint.ops.gated_delta.rule import plans
from adjoint.ops.gated_delta.rule import shape as rule_shape
from tests.ops.gated_delta.rule.bound.promised import assert_gradients_are_as_promised
from tests.ops.gated_delta.rule.test_backward import (
    FORWARD,
    KERNELS,
    NAMES,
    backward,
    drawn,
    exact,
    inside_the_ceiling,
    run_poisoned,
    upstream_of,
)

pytestmark = pytest.mark.kernels

SHORT = 128

BOUNDS = (0, 0, 100, 4 * SHORT + 170, 5 * SHORT + 170, 5 * SHORT + 170)
"""Nothing, less than a segment, five segments of which the last is 70 tokens, one segment, nothing."""


@pytest.fixture(autouse=True)
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(packing, "SEGMENT", SHORT // 2)
    monkeypatch.setattr(rule_shape, "REVERSE_SEGMENT", SHORT)
    monkeypatch.setattr(rule_shape, "UNSPLIT_REVERSE", SHORT)
    adjoint.core.op.operator.forget()
    yield
    adjoint.core.op.operator.forget()


def remembered(device: torch.device, bounds: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Inputs:
    """Weak tokens that hardly decay, so that much of a gradient passes through every segment."""
    shape = (1, bounds[-1], 1, 1, 16, 24)
    return drawn(device, shape, dtype, decay=0.0005, strength=(0.0, 0.1), cu_seqlens=bounds)


# ----------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("present", ("both", "do", "dfinal"))
def test_gradients_pass_through_every_segment(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, present: str
) -> None:
    """From the outputs, and from the final state alone, to the first tokens; without what composes them they do not."""
    from adjoint.ops.gated_delta.rule import backward as rule_backward

    inputs = remembered(device, BOUNDS)
    do, dfinal = upstream_of(inputs)
    upstream = (do if present != "dfinal" else None), (dfinal if present != "do" else None)
    results, right = backward(inputs, *upstream), exact(inputs, *upstream)
    inside_the_ceiling(results, right, torch.float32)
    assert_gradients_are_as_promised("triton.chunked", inputs, upstream, results, right)
    for number in (0, 4):  # sequences without tokens
        expected = dfinal[number] if present != "do" else torch.zeros_like(dfinal[number])
        assert torch.equal(results[5][number], expected)
    assert right[5][2].norm() > 0.1 * right[5][1].norm(), "what passes through five segments counts"
    monkeypatch.setattr(rule_backward, "bind_compose_reverse_transitions", lambda *_: lambda memory: None)
    adjoint.core.op.operator.forget()
    with pytest.raises(AssertionError):
        inside_the_ceiling(backward(inputs, *upstream), right, torch.float32)


def test_rows_of_a_batch(device: torch.device) -> None:
    """Of two segments and a token, and two value heads of a key; K and V that fill no block."""
    inputs = drawn(device, (2, 2 * SHORT + 1, 1, 2, 40, 12), decay=0.001, strength=(0.0, 0.2))
    do, dfinal = upstream_of(inputs)
    results, right = backward(inputs, do, dfinal), exact(inputs, do, dfinal)
    inside_the_ceiling(results, right, torch.float32)
    assert_gradients_are_as_promised("triton.chunked", inputs, (do, dfinal), results, right)


def test_sixteen_bits(device: torch.device) -> None:
    inputs = remembered(device, (0, 3 * SHORT + 7), torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    results, right = backward(inputs, do, dfinal), exact(inputs, do, dfinal)
    inside_the_ceiling(results, right, torch.bfloat16)
    assert_gradients_are_as_promised("triton.chunked", inputs, (do, dfinal), results, right)


# -------------------------------------------------------------------------------------------------- bits


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_packed_sequences_are_separate_ones(device: torch.device, dtype: torch.dtype) -> None:
    """Also those of up to one segment, which alone launch nothing that is split."""
    inputs = remembered(device, BOUNDS, dtype)
    do, dfinal = upstream_of(inputs)
    packed = backward(inputs, do, dfinal)
    for number, (begin, end) in enumerate(pairwise(BOUNDS)):
        state, last = inputs[5][number : number + 1], dfinal[number : number + 1]
        alone = backward((*(x[:, begin:end] for x in inputs[:5]), state, None), do[:, begin:end], last)
        for name, got, expected in zip(NAMES, alone, packed, strict=True):
            part = expected[number : number + 1] if name == "dinitial_state" else expected[:, begin:end]
            assert torch.equal(got, part), (name, number)


def test_shorter_sequences_are_scanned_whole(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same sequence whole and split: neither is far from the other, and they differ."""
    inputs = remembered(device, (0, 3 * SHORT))
    do, dfinal = upstream_of(inputs)
    split = backward(inputs, do, dfinal)
    monkeypatch.setattr(rule_shape, "UNSPLIT_REVERSE", 3 * SHORT)
    adjoint.core.op.operator.forget()
    whole = backward(inputs, do, dfinal)
    assert not torch.equal(split[5], whole[5])
    inside_the_ceiling(split, [x.double() for x in whole], torch.float32)


# ------------------------------------------------------------------------------------------------ memory


def test_run_needs_no_other_memory(device: torch.device) -> None:
    """Outputs and workspace of the caller, whatever they held; no place of nobody is read."""
    bounds = (0, 50, 3 * SHORT + 60, 4 * SHORT)
    inputs = remembered(device, bounds, torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    _, _, saved = FORWARD.launch((*inputs, 0.5, False, False, False, True), KERNELS)
    outputs = run_poisoned((do, dfinal, *inputs, saved, 0.5, False, 63))
    expected: tuple[Tensor, ...] = backward(inputs, do, dfinal)
    assert all(torch.equal(got, right) for got, right in zip(outputs, expected, strict=True))


def test_what_a_split_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """K·4·(K + V) / 2048 bytes a token and head beside what is needed anyway: 64 at K = V = 128."""
    if adjoint.core.kernels.triton_missing():
        pytest.skip("a setup imports Triton")
    from adjoint.core.problem import Problem

    monkeypatch.undo()  # segments of the length they have
    assert rule_shape.REVERSE_SEGMENT % packing.SEGMENT == 0
    assert rule_shape.UNSPLIT_REVERSE >= rule_shape.REVERSE_SEGMENT
    (candidate,) = (c for c in plans.RULE_BACKWARD if c.name == "triton.chunked")

    def each(heads: int) -> float:
        sizes: tuple[Any, ...] = (1, 32768, 1, heads // 2, heads, 128, 128, 0, 0, 1)
        dtypes = (torch.bfloat16, torch.float32, torch.float32)
        problem = Problem("gated_delta_rule_backward", torch.device("cuda", 0), dtypes, "", sizes, (1.0, False, 31))
        return candidate.scratch_bytes(problem) / (32768 * heads)

    assert 58 <= each(8) - each(16) <= 64
