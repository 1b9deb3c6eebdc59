"""The kernels of `gate` beyond the shared checks: the order of sums, and gates far out."""

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.stages.gate.plans import RUN

pytestmark = pytest.mark.kernels

TRITON = Preference(backend="triton")


def by_halves(terms: Tensor) -> Tensor:
    """The stated order: runs of RUN terms, the first half plus the second; then runs of runs."""
    while True:
        padded = torch.nn.functional.pad(terms, (0, 0, 0, -len(terms) % RUN)).unflatten(0, (-1, RUN))
        while padded.shape[1] > 1:
            padded = padded[:, : padded.shape[1] // 2] + padded[:, padded.shape[1] // 2 :]
        terms = padded[:, 0]
        if len(terms) == 1:
            return terms[0]


@pytest.mark.parametrize("tokens", [1, 64, 65, RUN * RUN + 3])
def test_sums_over_tokens_have_the_stated_order(device: torch.device, tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    a, b = (torch.randn(tokens, 3, generator=generator).to(device).requires_grad_() for _ in range(2))
    A_log, dt_bias = (torch.randn(3, generator=generator).to(device).requires_grad_() for _ in range(2))
    g, beta = adjoint.gated_delta.gate(a, b, A_log, dt_bias, preference=TRITON)
    dg = torch.randn(tokens, 3, generator=generator).to(device)
    da, dA_log, ddt_bias = torch.autograd.grad(g, (a, A_log, dt_bias), dg)
    assert torch.equal(ddt_bias, by_halves(da))
    inputs = [x.detach() for x in (a, b, A_log, dt_bias)]
    promised = adjoint.plan(adjoint.gated_delta.gate, *inputs, preference=TRITON).adjoint.guarantee["dA_log"].error
    exact = [x.double() for x in inputs]
    through = dg.double() * reference.gate(*exact)[0]
    measured = promised.measure(dA_log, through.sum(0), dg.double(), torch.zeros_like(through), *exact)
    assert measured.holds, str(measured)
    assert beta.shape == b.shape


def test_gates_far_out(device: torch.device) -> None:
    """log(1 + e^t) where 1 + e^t is 1 in float32, and σ where e^t overflows."""
    a = torch.tensor([[-80.0, -20.0, 0.0, 30.0, 200.0]], device=device)
    inputs = (a, a, torch.zeros(5, device=device), torch.zeros(5, device=device))
    results = adjoint.gated_delta.gate(*inputs, preference=TRITON)
    exact = [x.double() for x in inputs]
    truth = (-torch.logaddexp(exact[0], torch.zeros_like(exact[0])), exact[0].sigmoid())
    promised = adjoint.plan(adjoint.gated_delta.gate, *inputs, preference=TRITON).guarantee
    for name, got, right in zip(("g", "beta"), results, truth, strict=True):
        measured = promised[name].error.measure(got, right, *exact)
        assert measured.holds, f"{name}: {measured}"
    assert (results[0][0, :2] < 0).all()
