"""`gated_delta_step` at the edge of its values: resets of the state, what NaN reaches, and what `checked()` reports.

Each test runs in plain PyTorch, and on the kernels where there is an interpreter or a GPU.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import leaves, widened
from adjoint.ops.gated_delta import reference
from tests.ops.gated_delta.sequences import drawn, upstream_of

PLANS = ("eager.tokens", pytest.param("triton.tiles", marks=pytest.mark.kernels))
NAMES = ("q", "k", "v", "g", "beta")

Tensors = tuple[Tensor, ...]


def tokens_on(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...] = (2, 4, 1, 2, 4, 3)) -> Tensors:
    """q, k, v, g, beta and states."""
    return tuple(x.to(device) for x in drawn(shape, dtype)[:6])  # type: ignore[arg-type]


def results(inputs: Tensors, plan: str) -> tuple[Tensors, Tensors]:
    fresh = leaves(inputs)
    outputs = adjoint.gated_delta_step(*fresh, preference=Preference(plan=plan))
    slopes = torch.autograd.grad(outputs, fresh, [upstream_of(x.cpu()).to(x) for x in outputs])
    return tuple(x.detach() for x in outputs), slopes


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16))
@pytest.mark.parametrize("value", (-torch.inf, -3e38, -1000.0))
def test_minus_infinity_resets_the_state(device: torch.device, value: float, dtype: torch.dtype, plan: str) -> None:
    """The recurrence in float64, dg = 0 there, and not a bit of another token before it."""
    inputs = tokens_on(device, dtype)
    g = inputs[3].clone()
    g[0, 2], g[1, 0], g[1, 3, 1] = value, value, value
    before, _ = results(inputs, plan)
    (o, state), slopes = results((*inputs[:3], g, *inputs[4:]), plan)
    assert torch.equal(o[0, :2], before[0][0, :2]) and not slopes[3][0, 2].any() and not slopes[3][1, 0].any()
    exact = leaves(widened(tuple(x.cpu() for x in (*inputs[:3], g, *inputs[4:]))))
    right = reference.gated_delta_rule(*exact)
    upstream = [upstream_of(x.cpu()).to(x.dtype).double() for x in (o, state)]
    exact_slopes = torch.autograd.grad(right, exact, upstream)
    chosen = adjoint.plan(adjoint.gated_delta_step, *inputs, preference=Preference(plan=plan))
    promises = {**chosen.guarantee, **chosen.adjoint.guarantee}
    names = ("o", "new_state", "dq", "dk", "dv", "dg", "dbeta", "dstate")
    for name, got, expected in zip(names, (o, state, *slopes), (*right, *exact_slopes), strict=True):
        arguments = (*widened(tuple(x.cpu() for x in (*inputs[:3], g, *inputs[4:]))), None)
        arguments = arguments if name in chosen.guarantee else (*upstream, *arguments)
        measured = promises[name].error.measure(got.cpu(), expected.detach(), *arguments)
        assert got.isfinite().all() and measured.holds, (name, measured)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", (torch.nan, -torch.inf))
def test_what_is_no_number_reaches_its_row_from_its_token_on(
    device: torch.device, value: float, name: str, plan: str
) -> None:
    inputs = tokens_on(device, torch.float32)
    index = NAMES.index(name)
    tensor = inputs[index].clone()
    tensor[0, 2] = value
    (o, state), slopes = results((*inputs[:index], tensor, *inputs[index + 1 :]), plan)
    (right, last), exact = results(inputs, plan)
    assert torch.equal(o[0, :2], right[0, :2]) and torch.equal(o[1], right[1]) and torch.equal(state[1], last[1])
    assert all(torch.equal(got[1], expected[1]) for got, expected in zip(slopes, exact, strict=True))
    if name == "q":
        assert torch.equal(o[0, 3:], right[0, 3:]) and torch.equal(state, last)
    assert o[0, 2].isfinite().all() == ((name, value) == ("g", -torch.inf))


INDICES = (2, 0, 2)
"""The states of three rows: the first and the last one share theirs."""


def paged_results(
    inputs: Tensors, plan: str, lost: tuple[int, tuple[int, ...], float] | None = None
) -> tuple[Tensors, Tensors]:
    """Outputs and gradients. `lost` is a number in the upstream gradient: of which output, where, and its value."""
    fresh, rows = leaves(inputs), torch.tensor(INDICES, device=inputs[0].device)
    outputs = adjoint.gated_delta_step(*fresh, state_indices=rows, preference=Preference(plan=plan))
    upstream = [upstream_of(x.cpu()).to(x) for x in outputs]
    if lost is not None:
        output, at, value = lost
        upstream[output][at] = value
    return tuple(x.detach() for x in outputs), torch.autograd.grad(outputs, fresh, upstream)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("value", (torch.nan, torch.inf))
@pytest.mark.parametrize("output", (0, 1), ids=("output", "new state"))
def test_a_lost_gradient_stays_in_its_row_and_head_and_in_the_state_it_reads(
    device: torch.device, output: int, value: float, plan: str
) -> None:
    """One of an output reaches no gradient of a later token."""
    inputs = tokens_on(device, torch.float32, (3, 4, 1, 2, 4, 3))
    _, exact = paged_results(inputs, plan)
    _, slopes = paged_results(inputs, plan, (output, ((0, 2, 0), (0, 0))[output], value))
    for name, got, right in zip(NAMES, slopes, exact, strict=False):
        assert torch.equal(got[1:], right[1:]), name
        assert got[0, 2, 0].isfinite().all() == (name == "q" and output == 1), name  # no query has a part in a state
        if output == 0:
            assert torch.equal(got[0, 3:], right[0, 3:]), name
        if name not in ("q", "k"):
            assert torch.equal(got[:, :, 1], right[:, :, 1]), name
    assert torch.equal(slopes[5][:2], exact[5][:2]) and torch.equal(slopes[5][:, 1], exact[5][:, 1])
    assert not slopes[5][2, 0].isfinite().all()


@pytest.mark.parametrize("plan", PLANS)
def test_a_lost_state_reaches_its_head_in_the_rows_that_read_it(device: torch.device, plan: str) -> None:
    inputs = tokens_on(device, torch.float32, (3, 4, 1, 2, 4, 3))
    state = inputs[5].clone()
    state[2, 0] = torch.nan
    (o, states), slopes = paged_results((*inputs[:5], state), plan)
    (right, last), exact = paged_results(inputs, plan)
    assert o[0, :, 0].isnan().all() and o[2, :, 0].isnan().all()
    for got, expected in ((o.transpose(1, 2), right.transpose(1, 2)), (states, last)):
        assert torch.equal(got[1], expected[1]) and torch.equal(got[:, 1], expected[:, 1])
    assert all(torch.equal(got[1], expected[1]) for got, expected in zip(slopes[:5], exact[:5], strict=True))
    assert torch.equal(slopes[5][:2], exact[5][:2]) and torch.equal(slopes[5][:, 1], exact[5][:, 1])


# --------------------------------------------------------------------------------------------- checked()


def checked_step(inputs: Tensors, plan: str, **options: Any) -> None:
    with torch.no_grad(), adjoint.checked():
        adjoint.gated_delta_step(*inputs, preference=Preference(plan=plan), **options)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("in_place", (False, True))
@pytest.mark.parametrize(
    ("name", "value", "words"),
    (
        ("g", torch.nan, r"g must be a number.* got NaN at position 13 "),
        ("beta", torch.nan, r"beta must be from 0 to 1.* position 13 "),
        ("beta", 1.01, r"beta must be from 0 to 1.* position 13 "),
        ("beta", -0.01, r"beta must be from 0 to 1.* position 13 "),
        ("k", 3.0, r"the state grow at position 12 .*normalize_qk=True"),
    ),
)
def test_values_that_are_reported_in_checking_mode(
    device: torch.device, name: str, value: float, words: str, in_place: bool, plan: str
) -> None:
    """The second row, its third token, the second value head; a key is that of both heads."""
    inputs = list(tokens_on(device, torch.float32))
    inputs[4] = inputs[4].clamp_min(0.5)
    checked_step(tuple(inputs), plan, in_place=in_place)
    index = NAMES.index(name)
    inputs[index] = inputs[index].clone()
    inputs[index][1, 2, -1] = value
    with torch.no_grad():
        adjoint.gated_delta_step(*inputs, preference=Preference(plan=plan))  # elsewhere nobody asks
    adjoint.check()
    with pytest.raises(adjoint.ArgumentError, match=words):
        checked_step(tuple(inputs), plan, in_place=in_place)
    if name == "k":
        checked_step(tuple(inputs), plan, normalize_qk=True)
    spare = torch.tensor((0, -1), device=device)
    checked_step(tuple(inputs), plan, state_indices=spare)  # of a row that is skipped, nobody reads anything


@pytest.mark.parametrize("plan", PLANS)
def test_gates_at_their_limits_are_not_reported(device: torch.device, plan: str) -> None:
    inputs = tokens_on(device, torch.float32)
    inputs[3][0], inputs[4][0], inputs[4][1] = -torch.inf, 0.0, 1.0
    checked_step(inputs, plan)
