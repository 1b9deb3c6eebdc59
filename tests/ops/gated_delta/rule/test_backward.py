"""The plan `triton.chunked` of the backward beyond the shared checks: needs, bits, norms, packing, memory."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import Inputs, leaves, widened
from adjoint.core.problem import Problem
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.arguments import NEED_STATE
from adjoint.ops.gated_delta.rule import _rule, guarantee, plans
from adjoint.ops.gated_delta.values import nearly_equal, orthogonal, tokens
from tests.ops.gated_delta.rule.bound.promised import assert_gradients_are_as_promised

FORWARD, BACKWARD = _rule.forward, _rule.forms[""].operator
KERNELS = Preference(plan="triton.chunked").text
NAMES = ("dq", "dk", "dv", "dg", "dbeta", "dinitial_state")


def drawn(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, **options: Any) -> Inputs:
    return tokens(shape, **options)(dtype, device, torch.Generator().manual_seed(4))  # type: ignore[arg-type]


def upstream_of(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Gradients of the outputs and of the final states."""
    q, v, cu_seqlens = inputs[0], inputs[2], inputs[6]
    number = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    generator = torch.Generator().manual_seed(5)
    state = (number, v.shape[2], q.shape[3], v.shape[3])
    return (
        torch.randn(v.shape, generator=generator).to(v),
        torch.randn(state, generator=generator).to(q.device),
    )


def backward(
    inputs: Inputs, do: Tensor | None, dfinal: Tensor | None, need: int = 63, normalize: bool = False
) -> tuple[Tensor, ...]:
    """The gradients, by the kernels alone."""
    _, _, saved = FORWARD.launch((*inputs, 0.5, normalize, False, False, True), KERNELS)
    return BACKWARD.launch((do, dfinal, *inputs, saved, 0.5, normalize, need), KERNELS)


def exact(inputs: Inputs, do: Tensor | None, dfinal: Tensor | None, **options: Any) -> list[Tensor]:
    exact_inputs = leaves(widened(inputs))
    outputs = reference.gated_delta_rule(*exact_inputs, scale=0.5, by_chunks=True, **options)
    pairs = [(o, u.double()) for o, u in zip(outputs, (do, dfinal), strict=True) if u is not None]
    differentiable = [x for x in exact_inputs[:6] if x is not None]
    results, slopes = zip(*pairs, strict=True)
    return list(torch.autograd.grad(results, differentiable, slopes, allow_unused=True, materialize_grads=True))


def inside_the_ceiling(results: tuple[Tensor, ...], right: list[Tensor], dtype: torch.dtype) -> None:
    for name, got, expected in zip(NAMES, results, right, strict=False):
        assert torch.isfinite(got).all(), name
        error = (got.double() - expected).norm() / expected.norm().clamp_min(1e-30)
        assert error <= guarantee.BACKWARD_CEILINGS[dtype], (name, float(error))


# ----------------------------------------------------------------------------------------------- results


@pytest.mark.kernels
@pytest.mark.parametrize("present", ("both", "do", "dfinal"))
def test_either_gradient_may_be_absent(device: torch.device, present: str) -> None:
    inputs = drawn(device, (1, 70, 1, 2, 20, 12))
    do, dfinal = upstream_of(inputs)
    do, dfinal = (do if present != "dfinal" else None), (dfinal if present != "do" else None)
    results, right = backward(inputs, do, dfinal), exact(inputs, do, dfinal)
    inside_the_ceiling(results, right, torch.float32)
    assert_gradients_are_as_promised("triton.chunked", inputs, (do, dfinal), results, right)


@pytest.mark.kernels
def test_upstream_gradients_reach_the_initial_state_in_two_parts(device: torch.device) -> None:
    """The gradient of that state is closer than an exact one of upstream gradients that are rounded once more."""
    inputs = drawn(device, (1, 70, 1, 2, 16, 16), torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    rounded = (do.double() * 0.7).to(do.dtype).double() / 0.7
    result, expected = backward(inputs, do, dfinal, need=32)[5], exact(inputs, do, dfinal)[5]
    further = exact(inputs, rounded, dfinal)[5]
    assert (result.double() - expected).norm() < (further - expected).norm() / 2


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("keys", (nearly_equal, orthogonal), ids=("nearly equal keys", "orthogonal keys"))
def test_keys(device: torch.device, dtype: torch.dtype, keys: Any) -> None:
    inputs = drawn(device, (1, 80, 1, 1, 16, 16), dtype, keys=keys, decay=0.1, state=False)
    do, _ = upstream_of(inputs)
    results, right = backward(inputs, do, None, 31), exact(inputs, do, None)
    inside_the_ceiling(results, right, dtype)
    assert_gradients_are_as_promised("triton.chunked", inputs, (do, None), results[:5], right)


@pytest.mark.kernels
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_residuals_of_a_rounding(device: torch.device, dtype: torch.dtype) -> None:
    """Values that the state holds already, but for their rounding: v − Sᵀk is smaller than the errors of its terms, and
    so may be dβ, a sum of products with it. Its error is held to those terms, and to the promise for these inputs."""
    q, k, _, g, beta, state, _ = drawn(device, (1, 66, 1, 1, 16, 16), dtype)
    v = torch.einsum("bthk,bhkv->bthv", k.float(), state).to(dtype)
    inputs = (q, k, v, torch.zeros_like(g), beta, state, None)
    do, dfinal = upstream_of(inputs)
    results, right = backward(inputs, do, dfinal), exact(inputs, do, dfinal)
    assert_gradients_are_as_promised("triton.chunked", inputs, (do, dfinal), results, right)
    others = [x for place, x in enumerate(results) if place != 4], [x for place, x in enumerate(right) if place != 4]
    inside_the_ceiling(tuple(others[0]), others[1], dtype)
    terms = (v.double() * right[2] / beta.double()[..., None]).abs().sum(-1)
    error = (results[4].double() - right[4]).norm()
    assert error <= guarantee.BACKWARD_CEILINGS[dtype] * terms.norm()
    assert dtype == torch.float32 or error > guarantee.BACKWARD_CEILINGS[dtype] * right[4].norm(), "why it is stated so"


@pytest.mark.kernels
@pytest.mark.parametrize("K", (12, 40), ids=("whole rows", "rows in blocks"))
def test_gradients_pass_through_norms(device: torch.device, K: int) -> None:
    """Rows that one block holds, and rows that it does not."""
    from adjoint.ops.gated_delta.rule.shape import Shape
    from adjoint.ops.gated_delta.rule.triton.gradients import key_blocks

    inputs = list(drawn(device, (1, 66, 1, 2, K, 8)))
    inputs[0], inputs[1] = inputs[0] * 3, inputs[1] * torch.linspace(0.1, 4, 66, device=device)[:, None, None]
    do, dfinal = upstream_of(tuple(inputs))
    shape = Shape(*(torch.float32,) * 3, None, 1, 66, 1, 1, 2, K, 8)
    assert key_blocks(shape) == (2 if K == 40 else 1)
    results = backward(tuple(inputs), do, dfinal, normalize=True)
    right, upstream = exact(tuple(inputs), do, dfinal, normalize_qk=True), (do, dfinal)
    inside_the_ceiling(results, right, torch.float32)
    assert_gradients_are_as_promised("triton.chunked", tuple(inputs), upstream, results, right, normalize=True)


@pytest.mark.kernels
@pytest.mark.parametrize("need", (1, 2, 4, 24, 32))
def test_each_gradient_alone_has_the_same_bits(device: torch.device, need: int) -> None:
    inputs = drawn(device, (1, 66, 1, 2, 16, 16))
    do, dfinal = upstream_of(inputs)
    every = backward(inputs, do, dfinal)
    for bit, (got, expected) in enumerate(zip(backward(inputs, do, dfinal, need), every, strict=True)):
        if need >> bit & 1:
            assert torch.equal(got, expected), NAMES[bit]
        else:
            assert got.numel() == 0


# -------------------------------------------------------------------------------------------------- bits


@pytest.mark.kernels
def test_packed_sequences_are_separate_ones(device: torch.device) -> None:
    bounds = (0, 0, 1, 66, 141)
    inputs = drawn(device, (1, 141, 1, 1, 16, 24), torch.bfloat16, cu_seqlens=bounds)
    do, dfinal = upstream_of(inputs)
    packed = backward(inputs, do, dfinal)
    for number, (begin, end) in enumerate(pairwise(bounds)):
        state, last = inputs[5][number : number + 1], dfinal[number : number + 1]
        alone = backward((*(x[:, begin:end] for x in inputs[:5]), state, None), do[:, begin:end], last)
        for name, got, expected in zip(NAMES, alone, packed, strict=True):
            part = expected[number : number + 1] if name == "dinitial_state" else expected[:, begin:end]
            assert torch.equal(got, part), (name, number)


@pytest.mark.kernels
def test_strides_and_expanded_gradients_change_nothing(device: torch.device) -> None:
    inputs = drawn(device, (2, 9, 2, 4, 16, 16), torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    do = do[:, :1].expand_as(do)
    expected = backward(inputs, do.contiguous(), dfinal)
    strided = tuple(x if x is None else x.transpose(1, -1).contiguous().transpose(1, -1) for x in inputs[:6])
    results = backward((*strided, None), do, dfinal.transpose(1, 3).contiguous().transpose(1, 3))
    assert all(torch.equal(got, right) for got, right in zip(results, expected, strict=True))


@pytest.mark.kernels
def test_tokens_of_no_sequence_have_no_gradient(device: torch.device) -> None:
    inputs = list(drawn(device, (1, 90, 1, 1, 16, 16), cu_seqlens=(0, 90)))
    inputs[6] = torch.tensor((10, 70), device=device)
    do, dfinal = upstream_of(tuple(inputs))
    state = inputs[5]
    saved = state.new_empty(0, *state.shape[1:])
    results = BACKWARD.launch((do, dfinal, *inputs, saved, 0.5, False, 63), KERNELS)
    for got in results[:5]:
        assert not got[:, :10].any() and not got[:, 70:].any() and got[:, 10:70].any()


# ------------------------------------------------------------------------------------------------ memory


def run_poisoned(arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """The gradients, into memory that holds no numbers, by way of a workspace that holds none."""
    plan = adjoint.core.plan.select(BACKWARD, BACKWARD.describe(*arguments), KERNELS)
    outputs = tuple(torch.full_like(x, float("nan")) for x in BACKWARD.allocate(*arguments))
    workspace = torch.full((plan.workspace_bytes,), 255, dtype=torch.uint8, device=plan.problem.device)
    return plan.execute(arguments, outputs, workspace)


@pytest.mark.kernels
def test_run_needs_no_other_memory(device: torch.device) -> None:
    """Outputs and workspace of the caller, whatever they held."""
    inputs = drawn(device, (1, 9, 1, 2, 16, 16), torch.bfloat16)
    do, dfinal = upstream_of(inputs)
    saved = inputs[5].new_empty(0, *inputs[5].shape[1:])
    outputs = run_poisoned((do, dfinal, *inputs, saved, 0.5, False, 63))
    expected = backward(inputs, do, dfinal)
    assert all(torch.equal(got, right) for got, right in zip(outputs, expected, strict=True))


def test_what_is_saved_and_what_is_computed_again() -> None:
    """64 bytes a token and head are saved at K = V = 128, but for the last 1024; the workspace is what the docs say."""
    from adjoint.ops.gated_delta.packing import SEGMENT, saved_states

    assert saved_states(33 * SEGMENT) * 128 * 128 * 4 / (32 * SEGMENT) == 64
    dtypes = (torch.bfloat16, torch.float32, torch.float32)
    sizes = (1, 32768, 1, 16, 32, 128, 128, 0, 0, 1)
    problem = Problem("gated_delta_rule_backward", torch.device("cuda", 0), dtypes, "", sizes, (1.0, False, 31))
    (candidate,) = (c for c in plans.RULE_BACKWARD if c.name == "triton.chunked")
    if adjoint.core.kernels.triton_missing():
        pytest.skip("a setup imports Triton")
    each = candidate.scratch_bytes(problem) / (32768 * 32)
    assert 2723 <= each <= 2733, each


def test_eager_stays_for_float64() -> None:
    inputs = drawn(torch.device("cpu"), (1, 4, 1, 1, 3, 2), torch.float64)
    plan = adjoint.plan(adjoint.gated_delta_rule, *inputs[:5], initial_state=inputs[5])
    assert plan.name == "eager.chunked" and plan.adjoint is not None and plan.adjoint.name == "eager.chunked"
    assert NEED_STATE == 32
