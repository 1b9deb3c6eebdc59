"""The kernels of `gated_delta_step`: sizes that fill no tile, bits, pools, and what a skipped row holds."""

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import leaves
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.promises import empirical_error
from adjoint.ops.gated_delta.step import plans as step_plans
from tests.ops.gated_delta.sequences import drawn, gradients_of, relative

pytestmark = pytest.mark.kernels

TRITON, EAGER = Preference(backend="triton"), Preference(backend="eager")


def _on(device: torch.device, inputs: Any) -> list[Tensor]:
    return [x.to(device) for x in inputs if x is not None]


def _limit(dtype: torch.dtype) -> float:
    return empirical_error(dtype, torch.float32, step_plans.CEILING).ceiling


@pytest.mark.parametrize(
    ("shape", "normalize"),
    (((1, 1, 1, 1, 1, 1), False), ((1, 2, 1, 1, 20, 33), True), ((2, 1, 2, 4, 7, 3), False)),
    ids=str,
)
def test_any_size(device: torch.device, shape: tuple[int, ...], normalize: bool) -> None:
    inputs = leaves(_on(device, drawn(shape, torch.float32)))  # type: ignore[arg-type]
    *tokens, state = inputs
    results = adjoint.gated_delta_step(*tokens, state, normalize_qk=normalize, preference=TRITON)
    wide = leaves([x.detach().double() for x in inputs])
    exact = reference.gated_delta_rule(*wide, normalize_qk=normalize)
    for got, expected in zip(results, exact, strict=True):
        assert relative(got, expected) < _limit(torch.float32)
    for got, expected in zip(gradients_of(results, inputs), gradients_of(exact, wide), strict=True):
        assert relative(got.cpu(), expected.cpu()) < _limit(torch.float32)


def test_tokens_in_one_step_or_one_at_a_time(device: torch.device) -> None:
    """To the bit, where the state is not rounded in between; and so are all tiles and numbers of warps."""
    *tokens, state = _on(device, drawn((2, 3, 1, 2, 8, 9), torch.bfloat16))
    o, states = adjoint.gated_delta_step(*tokens, state, return_all_states=True, preference=TRITON)
    now, pool = state, state.clone()
    for t in range(3):
        token = [x[:, t : t + 1] for x in tokens]
        alone, now = adjoint.gated_delta_step(*token, now, preference=TRITON)
        in_place, returned = adjoint.gated_delta_step(*token, pool, in_place=True, preference=TRITON)
        assert returned is pool and torch.equal(alone, in_place) and torch.equal(pool, now)
        assert torch.equal(alone[:, 0], o[:, t]) and torch.equal(now, states[:, t])
    plan = adjoint.plan(adjoint.gated_delta_step, *tokens, state, preference=TRITON)
    for change in ({"columns": 4}, {"columns": 2, "warps": 2}):
        outputs = plan.with_schedule(**change).run(*tokens, state, None)
        assert torch.equal(outputs[0], o) and torch.equal(outputs[1], states[:, -1])


def test_what_a_skipped_row_holds_does_not_matter(device: torch.device) -> None:
    *tokens, _ = _on(device, drawn((3, 2, 1, 2, 4, 3), torch.float32))
    pool = torch.randn(4, 2, 4, 3, generator=torch.Generator().manual_seed(2)).to(device)
    indices = torch.tensor((3, -1, 0), device=device)
    for x in tokens:
        x[1] = float("nan")
    inputs = leaves([*tokens, pool])
    o, rows = adjoint.gated_delta_step(
        *inputs[:5], inputs[5], state_indices=indices, normalize_qk=True, preference=TRITON
    )
    gradients = torch.autograd.grad((o.sum(), rows.sum()), inputs)
    for result in (o, rows, *gradients[:5]):
        assert not result[1].any() and result.isfinite().all()
    assert not gradients[5][1:3].any() and gradients[5][0].any()
    before = pool.clone()
    adjoint.gated_delta_step(*tokens, pool, state_indices=indices, in_place=True, normalize_qk=True, preference=TRITON)
    assert torch.equal(pool[1:3], before[1:3]) and torch.equal(pool[0], rows[2])


def test_rows_that_share_a_state_add_up_in_order(device: torch.device) -> None:
    *tokens, state = _on(device, drawn((4, 1, 1, 1, 3, 2), torch.float32))
    pool = state[:2].clone().requires_grad_()
    indices = torch.tensor((1, 1, -1, 1), dtype=torch.int32, device=device)
    o, rows = adjoint.gated_delta_step(*tokens, pool, state_indices=indices, preference=TRITON)
    upstream = torch.randn(rows.shape, generator=torch.Generator().manual_seed(3)).to(device)
    (shared,) = torch.autograd.grad((o, rows), pool, (torch.ones_like(o), upstream))
    alone = state[:2][indices.clamp_min(0).long()].clone().requires_grad_()
    o, rows = adjoint.gated_delta_step(*tokens, alone, preference=TRITON)
    (each,) = torch.autograd.grad((o, rows), alone, (torch.ones_like(o), upstream))
    assert not shared[0].any() and torch.equal(shared[1], (each[0] + each[1]) + each[3])


@pytest.mark.parametrize(("index", "position"), ((4, 1), (-2, 1)))
def test_an_index_out_of_range(device: torch.device, index: int, position: int) -> None:
    """The row is skipped, and the error names index and position."""
    *tokens, _ = _on(device, drawn((2, 1, 1, 1, 3, 2), torch.float32))
    pool = torch.ones(4, 1, 3, 2, device=device)
    indices = torch.tensor((2, index), device=device)
    with pytest.raises(adjoint.ArgumentError, match=f"state_indices.* got {index} at position {position}"):
        adjoint.gated_delta_step(*tokens, pool, state_indices=indices, in_place=True, preference=TRITON)
        adjoint.check()
    assert torch.equal(pool[[0, 1, 3]], torch.ones_like(pool[:3])) and not torch.equal(
        pool[2], torch.ones_like(pool[2])
    )


def test_a_positive_gate(device: torch.device) -> None:
    q, k, v, g, beta, state = _on(device, drawn((1, 2, 1, 2, 3, 2), torch.float32))
    g[0, 1, 0] = 0.5
    with pytest.raises(adjoint.ArgumentError, match=r"g is the logarithm of a decay .* position 2 "):
        adjoint.gated_delta_step(q, k, v, g, beta, state, preference=TRITON)
        adjoint.check()


def test_upstream_of_one_output_alone(device: torch.device) -> None:
    inputs = leaves(_on(device, drawn((1, 2, 1, 1, 3, 2), torch.float32)))
    *tokens, state = inputs
    for chosen in (0, 1):
        ours, theirs = (
            torch.autograd.grad(
                adjoint.gated_delta_step(*tokens, state, preference=preference)[chosen].sum(), inputs, allow_unused=True
            )
            for preference in (TRITON, EAGER)
        )
        for got, expected in zip(ours, theirs, strict=True):
            assert relative(got, expected) < _limit(torch.float32) or not expected.any()


@pytest.mark.parametrize(
    "shape", ((2, 2, 1, 1, 0, 3), (2, 2, 1, 1, 3, 0), (0, 2, 1, 1, 3, 2), (2, 2, 1, 0, 3, 2)), ids=str
)
def test_sizes_of_zero(device: torch.device, shape: tuple[int, ...]) -> None:
    """Empty sums are 0, in both directions; what only values show is reported all the same."""
    inputs = leaves(_on(device, drawn(shape, torch.float32)))  # type: ignore[arg-type]
    indices = torch.arange(shape[0], device=device)
    outputs = adjoint.gated_delta_step(*inputs, state_indices=indices, preference=TRITON)
    upstream = [torch.ones_like(x) for x in outputs]
    gradients = torch.autograd.grad(outputs, inputs, upstream)
    assert not any(x.any() for x in (*outputs, *gradients))
    if shape[0]:
        with pytest.raises(adjoint.ArgumentError, match=r"state_indices.* got 2 at position 1"):
            adjoint.gated_delta_step(*inputs, state_indices=indices + 1, preference=TRITON)
            adjoint.check()
    if shape[0] and shape[3]:
        inputs[3].data[1, 0, 0] = 0.5
        with pytest.raises(adjoint.ArgumentError, match=r"g is the logarithm of a decay .* position 2 "):
            adjoint.gated_delta_step(*inputs, state_indices=indices, preference=TRITON)
            adjoint.check()
