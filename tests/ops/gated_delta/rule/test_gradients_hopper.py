"""The plan `gluon.fused` of the backward: what it refuses, its memory, and on Hopper its gradients and their bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint import Preference
from adjoint.contract.inputs import Inputs
from adjoint.core.kernels import triton_missing
from adjoint.core.launch import Setup, set_up
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta.rule import plans
from tests.ops.gated_delta.rule.bound.promised import assert_gradients_are_as_promised
from tests.ops.gated_delta.rule.test_backward import BACKWARD, FORWARD, drawn, exact, inside_the_ceiling, upstream_of

FUSED = Preference(plan="gluon.fused").text
(CANDIDATE,) = (candidate for candidate in plans.RULE_BACKWARD if candidate.name == "gluon.fused")
ON_HOPPER = torch.cuda.is_available() and torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not ON_HOPPER, reason="is for Hopper")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="asks about a GPU that is not there")


def problem(
    device: str = "cuda", dtype: torch.dtype = torch.bfloat16, K: int = 128, V: int = 128, do: int = 1, need: int = 31
) -> Problem:
    sizes = (1, 32768, 1, 16, 32, K, V, 0, 0, do)
    dtypes = (dtype, torch.float32, torch.float32)
    index = 0 if device == "cuda" else None
    return Problem("gated_delta_rule_backward", torch.device(device, index), dtypes, "", sizes, (1.0, False, need))


BETWEEN = 32 * 128 * 128 * 4
"""Bytes of the state's gradient between parts of the reverse scan."""


def test_gradients_that_are_not_needed_have_room() -> None:
    if triton_missing():
        pytest.skip("a setup imports Triton")
    tokens, keys, values, gates = 32768, 16 * 128 * 2, 32 * 128 * 2, 32 * 4
    more = CANDIDATE.scratch_bytes(problem(need=1)) - CANDIDATE.scratch_bytes(problem())
    assert more == tokens * (keys + values + 2 * gates)
    assert CANDIDATE.scratch_bytes(problem(need=32)) == CANDIDATE.scratch_bytes(problem()) - BETWEEN


@no_gpu
@pytest.mark.parametrize(
    ("refused", "words"),
    (
        (problem(dtype=torch.float32), "takes 16-bit types, this is torch.float32"),
        (problem(K=96), "takes K and V of 64 or 128, these are 96 and 128"),
        (problem(V=192), "takes K and V of 64 or 128, these are 128 and 192"),
        (problem(do=0), "takes a gradient of the outputs, and there is none"),
    ),
)
def test_what_it_refuses(refused: Problem, words: str) -> None:
    assert words in CANDIDATE.refuse(refused)


def test_it_is_for_hopper_alone() -> None:
    assert CANDIDATE.why_not_on(torch.device("cpu")) == "is for sm_90 alone"


@no_gpu
@pytest.mark.parametrize("device", ("cpu", "cuda"))
def test_its_schedule_is_that_of_hopper_wherever_it_is_asked_about(device: str) -> None:
    asked = problem(device)
    assert CANDIDATE.schedule(asked, asked.device) == CANDIDATE.schedule_on(asked, "sm_90")


def test_long_sequences_have_room_for_a_gradient_between_parts() -> None:
    """One that is neither packed, nor short, nor of few heads and split; and none where no token needs a gradient."""
    if triton_missing():
        pytest.skip("a setup imports Triton")

    def setup(time: int, heads: int = 32, rows: int = 1, packed: bool = False, need: int = 31) -> Setup:
        sizes = (rows, time, rows, heads // 2, heads, 128, 128, 0, 0, 1)
        dtypes = (torch.bfloat16, torch.float32, torch.float32, *[torch.int32] * packed)
        asked = Problem("gated_delta_rule_backward", torch.device("cuda", 0), dtypes, "", sizes, (1.0, False, need))
        return set_up(CANDIDATE, asked, "sm_90")

    def has_room(time: int, **others: Any) -> bool:
        return "dmiddle_state" in setup(time, **others).regions

    short, long = ({launch.variant for launch in setup(time).launches} for time in (4095, 4096))
    assert short == long, "no length compiles anything new"
    assert has_room(4096) and has_room(16384, heads=8)
    assert not (has_room(4095) or has_room(16385, heads=8) or has_room(4096, rows=2) or has_room(4096, packed=True))
    assert not has_room(4096, need=32)


def test_it_stores_less_between_kernels() -> None:
    """Neither M, its transpose and E, nor the parts of dg and dβ, nor W and Tᵀ Pᵀ do."""
    if triton_missing():
        pytest.skip("a setup imports Triton")
    (chunked,) = (candidate for candidate in plans.RULE_BACKWARD if candidate.name == "triton.chunked")
    saved = chunked.scratch_bytes(problem()) - CANDIDATE.scratch_bytes(problem())
    of_gradients, of_scan = 3 * 64 * 64 * 2 + (3 + 1 + 1) * 64 * 4 + 4, 2 * 64 * 128 * 2
    assert (saved + BETWEEN) / (512 * 32) == pytest.approx(of_gradients + of_scan, abs=1)


# ---------------------------------------------------------------------------------------------- on Hopper


def backward(inputs: Inputs, do: Tensor, dfinal: Tensor, normalize: bool = False, need: int = 63) -> tuple[Tensor, ...]:
    _, _, saved = FORWARD.launch((*inputs, 0.5, normalize, False, False, True), FUSED)
    return BACKWARD.launch((do, dfinal, *inputs, saved, 0.5, normalize, need), FUSED)


@hopper
@pytest.mark.kernels
@pytest.mark.parametrize("normalize", (False, True))
@pytest.mark.parametrize(
    ("shape", "dtype", "options"),
    (
        ((2, 200, 2, 4, 128, 128), torch.bfloat16, {}),
        ((1, 700, 1, 4, 64, 64), torch.float16, {"cu_seqlens": (0, 0, 1, 66, 194, 700)}),
        ((1, 333, 1, 3, 128, 64), torch.float16, {}),
        ((1, 130, 2, 2, 64, 128), torch.bfloat16, {}),
    ),
)
def test_gradients(
    device: torch.device, shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any], normalize: bool
) -> None:
    """Groups of one to four heads, tails, sequences without tokens, of one, and of one more than a chunk."""
    inputs = drawn(device, shape, dtype, **options)
    do, dfinal = upstream_of(inputs)
    results = backward(inputs, do, dfinal, normalize)
    right = exact(inputs, do, dfinal, normalize_qk=normalize)
    inside_the_ceiling(results, right, dtype)
    assert_gradients_are_as_promised("gluon.fused", inputs, (do, dfinal), results, right, normalize=normalize)
    again = backward(inputs, do, dfinal, normalize)
    assert all(torch.equal(one, other) for one, other in zip(results, again, strict=True))


@hopper
@pytest.mark.kernels
@pytest.mark.parametrize("normalize", (False, True))
def test_bits_do_not_depend_on_what_else_is_needed(device: torch.device, normalize: bool) -> None:
    """All gradients are computed together, wherever those that are not needed go."""
    inputs = drawn(device, (1, 130, 2, 4, 128, 128), torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    for bit, expected in enumerate(backward(inputs, do, dfinal, normalize)):
        results = backward(inputs, do, dfinal, normalize, need=1 << bit)
        assert torch.equal(results[bit], expected)
        assert all(other.numel() == 0 for number, other in enumerate(results) if number != bit)


@hopper
@pytest.mark.kernels
def test_bits_of_a_row_are_its_own(device: torch.device) -> None:
    inputs = drawn(device, (3, 150, 2, 4, 128, 128), torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    results = backward(inputs, do, dfinal)
    alone = backward((*(x[1:2] for x in inputs[:6]), None), do[1:2], dfinal[1:2])
    assert all(torch.equal(one[0], all_[1]) for one, all_ in zip(alone, results, strict=True))
