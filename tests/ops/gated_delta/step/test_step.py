"""`gated_delta_step` beyond the shared checks: it goes on where the rule stops; pools; what it refuses."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch

import adjoint
from adjoint.contract.inputs import leaves
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.promises import FORWARD
from adjoint.ops.gated_delta.step.cases import SUBJECTS
from adjoint.ops.gated_delta.step.plans import CEILING
from adjoint.ops.gated_delta.values import gradients
from adjoint.verify.run import compare, differentiate
from tests.ops.gated_delta.sequences import BACKWARD_64, FORWARD_64, by_recurrence, drawn, gradients_of, relative

STEP = SUBJECTS[0]


def test_prefill_then_steps_follow_the_recurrence() -> None:
    *tokens, state, _ = drawn((2, 200, 1, 2, 8, 8), torch.float32, decay=0.05)
    whole, last = adjoint.gated_delta_rule(
        *(x.double() for x in tokens), initial_state=state.double(), output_final_state=True
    )
    o, state = adjoint.gated_delta_rule(*(x[:, :70] for x in tokens), initial_state=state, output_final_state=True)
    outputs, at = [o], 70
    for count in (1, 16, 2, *[1] * 11, 16, 16, 16, 16, 16, 16, 4):
        o, state = adjoint.gated_delta_step(*(x[:, at : at + count] for x in tokens), state)
        outputs.append(o)
        at += count
    assert at == 200
    assert relative(torch.cat(outputs, 1), whole) < FORWARD and relative(state, last) < FORWARD


def test_4096_decoded_tokens_follow_the_recurrence() -> None:
    """Errors do not pile up: what a token adds to the state's error decays with the state."""
    prefill, decoded = 100, 4096
    *tokens, state, _ = drawn((1, prefill + decoded, 1, 2, 8, 8), torch.float32, decay=0.05)
    exact, last = reference.gated_delta_rule(*(x.double() for x in tokens), state.double())
    o, state = adjoint.gated_delta_rule(*(x[:, :prefill] for x in tokens), initial_state=state, output_final_state=True)
    outputs, counts = [o], [1, 2, 1, 12, *[16] * 255]
    for begin, count in zip(accumulate(counts, initial=prefill), counts, strict=False):
        o, _ = adjoint.gated_delta_step(*(x[:, begin : begin + count] for x in tokens), state, in_place=True)
        outputs.append(o)
    found = torch.cat(outputs, 1)
    assert found.shape == exact.shape and relative(found, exact) < FORWARD and relative(state, last) < FORWARD
    assert relative(found[:, -64:], exact[:, -64:]) < FORWARD


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_in_place_writes_its_rows_and_nothing_else(dtype: torch.dtype) -> None:
    *tokens, _, _ = drawn((3, 2, 1, 2, 4, 4), torch.bfloat16)
    pool = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    indices = torch.tensor((4, -1, 0))
    o, rows = adjoint.gated_delta_step(*tokens, pool, state_indices=indices)
    mine = pool.clone()
    before = mine._version
    again, returned = adjoint.gated_delta_step(*tokens, mine, state_indices=indices, in_place=True)
    assert returned is mine and mine._version > before
    assert torch.equal(o, again) and not o[1].any() and not rows[1].any()
    assert torch.equal(mine[4], rows[0]) and torch.equal(mine[0], rows[2])
    others = [1, 2, 3, 5]
    assert torch.equal(mine[others], pool[others])


def test_all_states() -> None:
    *tokens, state, _ = drawn((2, 5, 1, 2, 4, 4))
    o, last = adjoint.gated_delta_step(*tokens, state)
    again, states = adjoint.gated_delta_step(*tokens, state, return_all_states=True)
    assert torch.equal(o, again) and torch.equal(states[:, -1], last) and states.shape == (2, 5, 2, 4, 4)
    two, second = adjoint.gated_delta_step(*(x[:, :2] for x in tokens), state)
    assert torch.equal(states[:, 1], second) and torch.equal(o[:, :2], two)
    pool = state.clone()
    _, states_again = adjoint.gated_delta_step(*tokens, pool, in_place=True, return_all_states=True)
    assert torch.equal(states_again, states) and torch.equal(pool, last)


def test_gradients_are_those_of_the_rule() -> None:
    inputs = leaves(drawn((2, 16, 1, 2, 4, 3)))
    *tokens, state, _ = inputs
    steps = gradients_of(adjoint.gated_delta_step(*tokens, state), inputs)
    _, exact = by_recurrence(inputs)
    for got, expected in zip(steps, exact, strict=True):
        assert relative(got, expected) < BACKWARD_64


def test_rows_may_share_a_state_out_of_place() -> None:
    *tokens, state, _ = drawn((2, 1, 1, 1, 3, 3))
    pool = state[:1].clone().requires_grad_()
    o, rows = adjoint.gated_delta_step(*tokens, pool, state_indices=torch.zeros(2, dtype=torch.int32))
    (shared,) = torch.autograd.grad(o.sum() + rows.sum(), pool)
    alone = state[:1].expand(2, -1, -1, -1).clone().requires_grad_()
    o, rows = adjoint.gated_delta_step(*tokens, alone)
    (separate,) = torch.autograd.grad(o.sum() + rows.sum(), alone)
    assert relative(shared, separate.sum(0, keepdim=True)) < FORWARD_64


def test_repeated_indices_in_checking_mode() -> None:
    *tokens, state, _ = drawn((3, 1, 1, 1, 3, 3))
    indices = torch.tensor((1, 0, 1))
    adjoint.gated_delta_step(*tokens, state, state_indices=indices, in_place=True)
    with pytest.raises(adjoint.ArgumentError, match=r"must not repeat.*got 1 again at position 2"), adjoint.checked():
        adjoint.gated_delta_step(*tokens, state, state_indices=indices, in_place=True)
    with adjoint.checked():  # skipped rows may repeat
        adjoint.gated_delta_step(*tokens, state, state_indices=torch.tensor((-1, 0, -1)), in_place=True)


def test_in_place_refuses_a_state_that_overlaps_itself() -> None:
    *tokens, state, _ = drawn((2, 1, 1, 1, 3, 3))
    shared = state[:1].expand(2, -1, -1, -1)
    adjoint.gated_delta_step(*tokens, shared)
    with pytest.raises(adjoint.ArgumentError, match=r"state, which in_place=True overwrites.* share memory"):
        adjoint.gated_delta_step(*tokens, shared, in_place=True)


def test_in_place_compiled() -> None:
    *tokens, state, _ = drawn((2, 1, 1, 1, 3, 3), torch.float32)
    torch._dynamo.reset()

    def step(*given: torch.Tensor) -> torch.Tensor:
        return adjoint.gated_delta_step(*given, in_place=True)[0]

    mine, theirs = state.clone(), state.clone()
    expected = step(*tokens, theirs)
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(*tokens, mine)
    assert torch.equal(got, expected) and torch.equal(mine, theirs)
    torch._dynamo.reset()


# --------------------------------------------------------------------------------- the promise about errors


@pytest.mark.parametrize("backend", ["eager", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("normalize", (False, True))
def test_keys_that_repeat_are_inside_the_bounds(normalize: bool, backend: str, device: torch.device) -> None:
    """Sixteen equal keys of full strength, whose values the state has already: dg and dβ cancel, which no ceiling
    survives; every result is inside its bound."""
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.normalize(torch.randn(2, 1, 1, 8, generator=generator), dim=-1).expand(2, 16, 1, 8)
    v = torch.randn(2, 1, 2, 4, generator=generator).expand(2, 16, 2, 4)
    state = torch.einsum("bhk,bhv->bhkv", k[:, 0].expand(2, 2, 8), v[:, 0])
    q, gates = torch.randn(2, 16, 1, 8, generator=generator), torch.zeros(2, 16, 2)
    inputs = tuple(x.contiguous().to(device) for x in (q, k, v, gates, gates + 1, state))
    upstream = tuple(torch.randn(shape, generator=generator).to(device) for shape in (v.shape, state.shape))

    def exact(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, *others = tensors
        if normalize:
            q, k = reference.normalized(q), reference.normalized(k)
        return STEP.reference(q, k, *others)

    subject = replace(
        STEP, reference=exact, reference_backward=gradients(exact), keywords={"normalize_qk": normalize}
    )  # fmt: skip
    found = differentiate(subject, (*inputs, None), upstream, adjoint.Preference(backend=backend))
    measured = {comparison.name: comparison for comparison in compare(found)}
    for name, comparison in measured.items():
        assert comparison.promise.holds, (name, comparison.promise)
    assert measured["dbeta"].relative_error > CEILING, "why that is no promise"
