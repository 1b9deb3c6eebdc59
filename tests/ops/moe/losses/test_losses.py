"""The router's losses: what only they know. The shared checks are in test_contract."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference, moe
from adjoint.core.kernels import interpreting
from adjoint.ops.moe.losses import plans, reference
from adjoint.verify.checks.bits import same_bits

BACKENDS = [pytest.param("triton", marks=pytest.mark.kernels), pytest.param("eager")]
backends = pytest.mark.parametrize("backend", BACKENDS)


def _logits(tokens: int, experts: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def as_hugging_face(logits: Tensor, k: int, mask: Tensor | None = None) -> Tensor:
    """`load_balancing_loss_func` of the Qwen mixture models, for one layer, written out again from its definition."""
    shares = torch.softmax(logits, -1)
    chosen = torch.nn.functional.one_hot(torch.topk(shares, k, -1).indices, logits.shape[-1]).to(logits.dtype)
    if mask is None:
        tokens_per_expert, share_per_expert = chosen.mean(0), shares.mean(0)
    else:
        factor = mask.to(logits.dtype)
        tokens_per_expert = (chosen * factor[:, None, None]).sum(0) / factor.sum()
        share_per_expert = (shares * factor[:, None]).sum(0) / factor.sum()
    return (tokens_per_expert * share_per_expert[None]).sum() * logits.shape[-1]


def inside(function: Callable[..., Tensor], backend: str, expected: Callable[[Tensor], Tensor], *inputs: Any) -> bool:
    """Whether a loss and its gradient are within their bounds of what torch's autograd makes of another formulation."""
    preference = Preference(backend=backend)
    logits, *rest = inputs
    x, exact = logits.clone().requires_grad_(), logits.double().clone().requires_grad_()
    loss, truth = function(x, *rest, preference=preference), expected(exact)
    (gradient,), (dtruth,) = torch.autograd.grad(loss, x), torch.autograd.grad(truth, exact)
    plan = adjoint.plan(function, *inputs, preference=preference)
    assert plan.adjoint is not None
    wide, one = logits.double(), torch.ones((), dtype=torch.float64, device=logits.device)
    measured = (
        plan.guarantee["loss"].error.measure(loss.detach(), truth.detach(), wide, *rest),
        plan.adjoint.guarantee["dlogits"].error.measure(gradient, dtruth, one, wide, *rest),
    )
    return all(error.holds for error in measured)


@backends
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("distance", [90.0, 104.0, 300.0])
def test_probabilities_that_underflow(distance: float, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """Experts of no probability that were chosen all the same: their loss is 0, or the smallest of numbers."""
    logits = torch.zeros(6, 12, dtype=dtype, device=device)
    logits[:, :2] = -distance
    indices = torch.tensor([[0, 1]], device=device).expand(6, 2).contiguous()
    expected = lambda x: reference.load_balancing_loss(x, indices)  # noqa: E731
    assert inside(moe.load_balancing_loss, backend, expected, logits, indices)


@backends
@pytest.mark.parametrize("masked", [False, True])
def test_load_balancing_is_hugging_faces(masked: bool, backend: str, device: torch.device) -> None:
    logits = _logits(50, 12).to(device)
    mask = torch.arange(50, device=device) % 3 != 0 if masked else None
    _, indices = moe.route(logits, 3)
    assert inside(moe.load_balancing_loss, backend, lambda x: as_hugging_face(x, 3, mask), logits, indices, mask)


# ----------------------------------------------------------------------------------------- several layers


@backends
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_layers_are_counted_as_one(masked: bool, dtype: torch.dtype, backend: str, device: torch.device) -> None:
    """`load_balancing_loss_func` of several layers is that of their tokens one after the other, the mask repeated."""
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("float64 is for plain PyTorch")
    layers = [(layer + 1) * _logits(24, 7, layer).to(device, dtype).view(4, 6, 7) for layer in range(3)]
    mask = torch.arange(24, device=device).view(4, 6) % 5 != 0 if masked else None
    indices = [moe.route(logits, 2)[1] for logits in layers]
    preference = Preference(backend=backend)
    leaves = [logits.clone().requires_grad_() for logits in layers]
    loss = moe.load_balancing_loss(leaves, indices, mask, preference=preference)
    gradients = torch.autograd.grad(loss, leaves)

    exact = [logits.double().clone().requires_grad_() for logits in layers]
    concatenated = torch.cat([logits.view(24, 7) for logits in exact])
    truth = as_hugging_face(concatenated, 2, None if mask is None else mask.view(24).repeat(3))
    expected = torch.autograd.grad(truth, exact)

    stacked = torch.stack(layers)
    counted = None if mask is None else mask.expand(3, 4, 6)
    plan = adjoint.plan(moe.load_balancing_loss, layers, indices, mask, preference=preference)
    assert plan.adjoint is not None and loss.dtype == dtype
    rest = stacked.double(), torch.stack(indices), counted
    assert plan.guarantee["loss"].error.measure(loss.detach(), truth.detach(), *rest).holds
    error, one = plan.adjoint.guarantee["dlogits"].error, torch.ones((), dtype=torch.float64, device=device)
    assert error.measure(torch.stack(gradients), torch.stack(expected), one, *rest).holds

    mean = sum(float(moe.load_balancing_loss(x, i, mask)) for x, i in zip(layers, indices, strict=True)) / 3
    assert abs(mean - float(loss.detach())) > 1e-3, "which the mean of the layers' losses is not"
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda *x: moe.load_balancing_loss(x, indices, mask), leaves)


def test_layers_may_come_in_a_compiled_function(device: torch.device) -> None:
    layers = tuple(_logits(10, 6, layer).to(device) for layer in range(2))
    indices = tuple(moe.route(logits, 2)[1] for logits in layers)
    torch._dynamo.reset()
    compiled = torch.compile(moe.load_balancing_loss, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(layers, indices), moe.load_balancing_loss(list(layers), list(indices)))
    torch._dynamo.reset()


@pytest.mark.parametrize("masked", [False, True])
def test_losses_in_float64(masked: bool, device: torch.device) -> None:
    """Within bounds of 2⁻⁵³ of another formulation; and the loss is float64."""
    logits = _logits(50, 12).to(device).double()
    mask = torch.arange(50, device=device) % 3 != 0 if masked else None
    _, indices = moe.route(logits, 3)
    assert inside(moe.load_balancing_loss, "eager", lambda x: as_hugging_face(x, 3, mask), logits, indices, mask)
    counted = slice(None) if mask is None else mask
    assert inside(moe.z_loss, "eager", lambda x: (x[counted].exp().sum(-1).log() ** 2).mean(), logits, mask)
    assert moe.load_balancing_loss(logits, indices, mask).dtype == moe.z_loss(logits, mask).dtype == torch.float64


@backends
def test_an_even_load_costs_k_and_one_expert_for_all_costs_more(backend: str, device: torch.device) -> None:
    preference = Preference(backend=backend)
    even = torch.arange(16, device=device).view(8, 2) % 4
    assert float(moe.load_balancing_loss(torch.zeros(8, 4, device=device), even, preference=preference)) == 2.0
    logits = torch.zeros(8, 4, device=device)
    logits[:, 0] = 100.0
    hot = torch.zeros(8, 1, dtype=torch.int32, device=device)
    assert float(moe.load_balancing_loss(logits, hot, preference=preference)) == 4.0


@backends
def test_z_is_the_mean_of_squares(backend: str, device: torch.device) -> None:
    logits = _logits(40, 9).to(device)
    assert inside(moe.z_loss, backend, lambda x: (x.exp().sum(-1).log() ** 2).mean(), logits)


@backends
def test_what_does_not_count_counts_for_nothing(backend: str, device: torch.device) -> None:
    """Neither its logits, though they be NaN, nor its choices, though they be no experts."""
    preference = Preference(backend=backend)
    logits, indices = _logits(20, 7).to(device), torch.arange(40, device=device).view(20, 2) % 7
    mask = torch.arange(20, device=device) < 13
    spoilt = torch.where(mask[:, None], logits, float("nan"))
    wrong = torch.where(mask[:, None], indices, 99)
    for loss in (
        moe.load_balancing_loss(spoilt, wrong, mask, preference=preference),
        moe.z_loss(spoilt, mask, preference=preference),
    ):
        assert loss.isfinite()
    whole = moe.load_balancing_loss(logits[:13], indices[:13], preference=preference)
    assert same_bits(moe.load_balancing_loss(spoilt, wrong, mask, preference=preference), whole)
    x = spoilt.requires_grad_()
    (gradient,) = torch.autograd.grad(moe.z_loss(x, mask, preference=preference), x)
    assert not gradient[13:].any() and gradient[:13].isfinite().all()


@backends
def test_without_tokens_both_are_zero(backend: str, device: torch.device) -> None:
    preference = Preference(backend=backend)
    none = torch.zeros(5, dtype=torch.bool, device=device)
    logits = _logits(5, 4).to(device).requires_grad_()
    indices = torch.zeros(5, 1, dtype=torch.int64, device=device)
    for loss in (
        moe.load_balancing_loss(logits, indices, none, preference=preference),
        moe.z_loss(logits, none, preference=preference),
    ):
        assert float(loss) == 0
        assert not torch.autograd.grad(loss, logits)[0].any()
    empty = torch.zeros(0, 4, device=device)
    assert float(moe.z_loss(empty, preference=preference)) == 0


@backends
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_special_values_of_tokens_that_count_are_those_of_ieee(
    value: float, backend: str, device: torch.device
) -> None:
    """As the formulas have them: a row of NaN, of +∞ or of −∞ has no shares, one −∞ alone a share of 0."""
    preference = Preference(backend=backend)
    indices = torch.arange(12, device=device).view(6, 2) % 4
    for places in (slice(0, 1), slice(0, 4)):
        logits = _logits(6, 4).to(device)
        logits[2, places] = value
        x = logits.requires_grad_()
        is_number = value == -torch.inf and places == slice(0, 1)
        losses = moe.load_balancing_loss(x, indices, preference=preference), moe.z_loss(x, preference=preference)
        for loss, expected in zip(losses, (torch.nan, abs(value)), strict=True):
            (gradient,) = torch.autograd.grad(loss, x)
            assert loss.isfinite() if is_number else same_bits(loss.detach().cpu(), torch.tensor(expected))
            assert gradient[2].isfinite().all() if is_number else gradient[2].isnan().all()
            assert gradient[[0, 1, 3, 4, 5]].isfinite().all()


@pytest.mark.kernels
def test_the_order_of_the_sum_is_that_of_runs(device: torch.device) -> None:
    """Several levels: the tokens of a run in order, then runs in order, in float32, is what the kernels do."""
    tokens = plans.RUN * plans.RUNS + 3 * plans.RUN + 5
    logits = _logits(tokens, 3).to(device)
    terms = [moe.z_loss(row[None], preference=Preference(backend="triton")) for row in logits[:40]]
    runs = []
    for begin in range(0, 40, plans.RUN):
        total = torch.zeros((), device=device)
        for term in terms[begin : begin + plans.RUN]:
            total = total + term
        runs.append(total)
    expected = torch.zeros((), device=device)
    for run in runs:
        expected = expected + run
    assert same_bits(moe.z_loss(logits[:40], preference=Preference(backend="triton")), expected / 40)
    assert inside(moe.z_loss, "triton", reference.z_loss, logits), "three levels"


@pytest.mark.skipif(interpreting(), reason="the ordinary process runs this")
def test_the_references_agree_with_finite_differences() -> None:
    logits = _logits(5, 4).double().requires_grad_()
    indices = torch.tensor([[0, 1], [1, 2], [1, 3], [0, 1], [2, 3]])
    mask = torch.tensor([True, False, True, True, True])
    assert torch.autograd.gradcheck(lambda x: reference.z_loss(x, mask), logits)
    assert torch.autograd.gradcheck(lambda x: reference.load_balancing_loss(x, indices, mask), logits)
    one = torch.tensor(1.5, dtype=torch.float64)
    for forward, backward, rest in (
        (reference.z_loss, reference.z_loss_backward, (mask,)),
        (reference.load_balancing_loss, reference.load_balancing_loss_backward, (indices, mask)),
    ):
        (expected,) = torch.autograd.grad(forward(logits, *rest), logits, one)
        # Two formulas in float64, of sums of 5 tokens and 4 experts: fewer than 64 roundings of the largest number.
        limit = 64 * torch.finfo(torch.float64).eps * float(expected.abs().max())
        assert float((backward(one, logits.detach(), *rest) - expected).abs().max()) <= limit
