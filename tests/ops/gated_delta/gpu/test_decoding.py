"""Decoding on a GPU: steps in place, and thousands of them after a prefill."""

import pytest
import torch

import adjoint
from adjoint import Preference
from adjoint.contract.inputs import widened
from tests.ops.gated_delta.gpu.examples import BFLOAT16, Example, drawn, forward

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", (torch.float32, BFLOAT16), ids=str)
def test_a_step_in_place_and_paged(device: torch.device, kind: torch.dtype) -> None:
    """The pool's other states stay as they are, a row is as if alone, and in place is as out of place."""
    rows, time, heads = 37, 3, (16, 32)
    example = drawn(device, time, heads, rows=rows)
    pool = torch.randn(64, 32, 128, 128, device=device).to(kind)
    indices = torch.randperm(64, device=device)[:rows]
    indices[5] = -1
    o, states = adjoint.gated_delta_step(*example.tokens, pool, state_indices=indices)
    updated = pool.clone()
    again, returned = adjoint.gated_delta_step(*example.tokens, updated, state_indices=indices, in_place=True)
    assert returned is updated and torch.equal(again, o) and not o[5].any()
    chosen = indices >= 0
    assert torch.equal(updated[indices[chosen]], states[chosen])
    others = torch.ones(64, dtype=torch.bool, device=device)
    others[indices[chosen]] = False
    assert torch.equal(updated[others], pool[others])
    row = 11
    token = tuple(x[row : row + 1] for x in example.tokens)
    alone, state = adjoint.gated_delta_step(*token, pool[indices[row]][None])
    assert torch.equal(alone[0], o[row]) and torch.equal(state[0], states[row])
    wide = example._replace(state=pool[indices.clamp_min(0)].float())
    exact = forward(Preference(plan="eager.chunked"), Example(*widened(wide)))
    stated = adjoint.plan(adjoint.gated_delta_step, *example.tokens, pool, state_indices=indices).guarantee
    inputs = (*widened((*example.tokens, pool)), indices)
    for key, got, expected in zip(("o", "new_state"), (o, states), exact, strict=True):
        expected = torch.where(chosen.view(-1, *(1,) * (expected.dim() - 1)), expected, 0.0)
        assert stated[key].error.measure(got, expected, *inputs).holds, key


def test_4096_decoded_tokens_follow_a_prefill(device: torch.device) -> None:
    """Within the ceiling of the prefill, whose state they begin with, and that of one step, every 64 tokens."""
    prefill, decoded = 1024, 4096
    example = drawn(device, prefill + decoded, decay=1 / 64)._replace(state=torch.zeros(1, 16, 128, 128, device=device))
    exact, _ = forward(Preference(plan="eager.chunked"), Example(*widened(example)))
    _, pool = forward(Preference(), example.of(0, prefill, 0))
    steps = []
    for t in range(prefill, prefill + decoded):
        token = (x[:, t : t + 1] for x in example.tokens)
        steps.append(adjoint.gated_delta_step(*token, pool, in_place=True)[0])
    rule = adjoint.plan(adjoint.gated_delta_rule, *example.tokens).guarantee["o"].recorded
    step = adjoint.plan(adjoint.gated_delta_step, *(x[:, :1] for x in example.tokens), pool).guarantee["o"].recorded
    limit = rule.ceiling + step.ceiling  # type: ignore[union-attr]
    got, expected = torch.cat(steps, 1).double(), exact[:, prefill:]
    for begin in range(0, decoded, 64):
        part = slice(begin, begin + 64)
        assert float((got[:, part] - expected[:, part]).norm()) <= limit * float(expected[:, part].norm()), begin
