"""Factors in two 16-bit parts lose no more than two parts do, and the carried state is rounded nowhere.

Scores have two parts on portable kernels, new values on Hopper. A chunk of orthogonal keys has the new values β v
and the scores e^(G_i − G_j), and nothing else is rounded before its outputs are. Values alternate in sign, so that
outputs are small beside their terms, and a part that is lost shows.
"""

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core import kernels
from adjoint.core.guarantee import absolute_error, spacing
from adjoint.ops.gated_delta.rule.guarantee import arithmetic_of
from tests.gluon import hopper
from tests.gluon.model.programs import SCHEDULES
from tests.gluon.rule.examples import Example

pytestmark = [pytest.mark.kernels, pytest.mark.skipif(not kernels.interpreting(), reason="in the interpreter")]

TIME = 64
SUMS = 2 * TIME * 2.0**-24
"""Of the sum of all terms: what sums in float32, and e^x there, may lose."""


def chunk(dtype: torch.dtype, decay: float, strengths: Tensor) -> Example:
    """A chunk of two value heads; `decay` is −g of every token."""
    signs = 1 - 2 * (torch.arange(TIME) % 2)
    v = (signs[:, None, None] * (1 + torch.arange(64) % 2)).expand(TIME, 2, 64)
    tensors = (torch.ones(TIME, 1, 64), torch.eye(TIME)[:, None], v)
    gates = (torch.full((TIME, 2), -decay), strengths[:, None].expand(TIME, 2).float())
    inputs = (*(x.to(dtype) for x in tensors), *gates)
    return Example((*(x[None].contiguous() for x in inputs), None, None), final=False)


def terms_of(example: Example) -> Tensor:
    """score · new value of every token i, and every token j up to it, in float64."""
    _, _, v, g, beta, _, _ = (None if x is None else x[0].double() for x in example.inputs)
    G = g.cumsum(0)
    scores = torch.exp(G[:, None] - G[None]) * torch.ones(TIME, TIME).tril()[..., None]
    return scores[..., None] * (beta[..., None] * v)[None] / 8  # scale = K^−½


def assert_two_parts(example: Example, o: Tensor, share: float) -> None:
    """`share` is the relative error of the factor that has two parts."""
    terms = terms_of(example)
    exact, size = terms.sum(1), terms.abs().sum(1)
    error = absolute_error(o[0], exact)
    limit = 0.5 * spacing(exact, o.dtype) + (share + SUMS) * size
    assert bool((error <= limit).all()), float((error / limit).max())
    lost = torch.finfo(o.dtype).eps / 8 * size  # half of what one part may lose: far more than is allowed
    assert bool((limit < lost)[TIME // 2 :].all()), "the outputs would not show a lost part"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_on_portable_kernels(dtype: torch.dtype) -> None:
    example = chunk(dtype, 0.003, torch.ones(TIME))
    q, k, v, g, beta, *_ = example.inputs
    o, _ = adjoint.gated_delta_rule(q, k, v, g, beta, preference=Preference(plan="triton.chunked"))
    call = example.call
    stated = arithmetic_of(call.operator.describe(*call.arguments), hopper=False)
    assert_two_parts(example, o, stated.score)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_new_values_on_hopper(dtype: torch.dtype) -> None:
    example = chunk(dtype, 0.0, torch.linspace(0.6, 0.9, TIME))
    call = example.call
    stated = arithmetic_of(call.operator.describe(*call.arguments), hopper=True)
    assert_two_parts(example, hopper.results(example, SCHEDULES[0])["o"], stated.new_value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("plan", ["triton.chunked", "gluon.fused"])
def test_the_carried_state_keeps_its_bits(plan: str, dtype: torch.dtype) -> None:
    """1 after the first chunk, 2^-12 more after the second, which 16 bits cannot hold, and the same after the third."""
    small, chunks = 2.0**-12, 3

    def each(*numbers: float) -> Tensor:
        return torch.tensor(numbers).repeat_interleave(TIME)

    beta, v = each(1.0, small, 0.0)[:, None].expand(-1, 2), each(1.0, 2.0, 5.0)[:, None, None].expand(-1, 2, 64)
    k = torch.eye(TIME).repeat(chunks, 1)[:, None]
    tensors = (k, k, v)
    inputs = (*(x.to(dtype) for x in tensors), torch.zeros(chunks * TIME, 2), beta)
    example = Example((*(x[None].contiguous() for x in inputs), None, None))
    if plan == "gluon.fused":
        final = hopper.results(example, SCHEDULES[0])["final_state"]
    else:
        _, final = adjoint.gated_delta_rule(
            *example.inputs[:5], output_final_state=True, preference=Preference(plan=plan)
        )
    assert torch.equal(final, torch.full_like(final, 1 + small))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_state_of_the_backward_keeps_its_bits(dtype: torch.dtype) -> None:
    """The scan that the backward on Hopper begins with: of eight additions 16 bits hold none, and all together."""
    small = torch.finfo(dtype).eps / 4
    beta = torch.tensor([1.0, *[small] * 8, 0.0]).repeat_interleave(TIME)[:, None].expand(-1, 2)
    v = torch.tensor([1.0, *[2.0] * 9]).repeat_interleave(TIME)[:, None, None].expand(-1, 2, 64)
    k = torch.eye(TIME).repeat(10, 1)[:, None]
    inputs = (*(x.to(dtype) for x in (k, k, v)), torch.zeros(10 * TIME, 2), beta)
    call = Example((*(x[None].contiguous() for x in inputs), None, None), final=False).call
    do = torch.ones(1, 10 * TIME, 2, 64, dtype=dtype)
    outputs, slopes = hopper.run_both(call, (do, None), SCHEDULES[0])
    dq = hopper.named(call, outputs, slopes)["dq"][0, -TIME:, 0].double()
    state = 2 - (1 - small) ** 8
    assert bool((dq - 2 * 8 * state).abs().max() <= 16 * small * 3), float((dq / 16).mean())
