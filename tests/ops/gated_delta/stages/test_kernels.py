"""The kernels of `recompute_w_u`, `gate` and `normalize` beyond the shared checks: orders, edges, what is not read."""

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.core.errors import status_word
from adjoint.ops.gated_delta import packing, reference
from adjoint.ops.gated_delta.stages.cases import _solved
from adjoint.ops.gated_delta.stages.gate_plans import RUN
from tests.ops.gated_delta.sequences import CPU

pytestmark = pytest.mark.kernels

TRITON = Preference(backend="triton")


def chunks(shape: tuple[int, int, int, int, int, int], chunk: int, device: torch.device) -> list[Tensor]:
    made = _solved(shape, chunk)(torch.float32, CPU, torch.Generator().manual_seed(0))
    return [x.to(device) for x in made[:5]]


@pytest.mark.parametrize("bounds", [(0, 0, 3, 3, 40), (0, 50, 20, 45), (-3, 7, 7, 40), (2, 9), (0,), (41, 40)])
def test_bounds_are_put_in_order(device: torch.device, bounds: tuple[int, ...]) -> None:
    """As the path in plain PyTorch puts them, with the tokens before the first and after the last beside them."""
    from adjoint.ops.gated_delta.stages.w_u_launch import bounds_variant

    time = 40
    given = torch.tensor(bounds, device=device, dtype=torch.int32)
    out = torch.full((len(bounds) + 2,), -7, device=device, dtype=torch.int64)
    launch = bounds_variant(torch.int32, report=False).prepare(device)
    launch((1, 1, 1), given, out, status_word(device), 0, len(bounds), time, 1)
    starts, lengths = packing.bounds(1, time, given, raises=False)
    ends = given.cpu().long().clamp(0, time).cummax(0).values
    assert out.tolist() == [0, *ends.tolist(), time]
    assert out[1:-2].tolist() == starts.tolist() and out[1:-1].diff().tolist() == lengths.tolist()


def test_what_stands_past_the_end_is_not_used(device: torch.device) -> None:
    """Columns of T for tokens that are not there: NaN in them reaches nothing."""
    k, v, beta, G, T = chunks((1, 5, 1, 2, 3, 2), 4, device)
    spoiled = T.clone()
    spoiled[:, 4:, :, 1:] = torch.nan
    found = []
    for matrix in (T, spoiled):
        leaves = [x.clone().requires_grad_() for x in (k, v, beta, G, matrix)]
        w, u = adjoint.gated_delta.recompute_w_u(*leaves, preference=TRITON)
        found.append((w, u, *torch.autograd.grad((w, u), leaves, (torch.ones_like(w), torch.ones_like(u)))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not found[1][-1][:, 4:, :, 1:].any()


@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_is_not_used_counts_as_one_without_a_gradient(device: torch.device, used: int) -> None:
    leaves = [x.requires_grad_() for x in chunks((1, 6, 1, 2, 3, 2), 4, device)]
    out = adjoint.gated_delta.recompute_w_u(*leaves, preference=TRITON)
    upstream = [torch.ones_like(x) if place == used else torch.zeros_like(x) for place, x in enumerate(out)]
    both = torch.autograd.grad(out, leaves, upstream, retain_graph=True)
    alone = torch.autograd.grad(out[used], leaves, upstream[used])
    assert all(torch.equal(a, b) for a, b in zip(both, alone, strict=True))
    assert both[used].any() and not both[1 - used].any()


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
    given = [x.detach() for x in (a, b, A_log, dt_bias)]
    promised = adjoint.plan(adjoint.gated_delta.gate, *given, preference=TRITON).adjoint.guarantee["dA_log"].error
    exact = [x.double() for x in given]
    through = dg.double() * reference.gate(*exact)[0]
    found = promised.measure(dA_log, through.sum(0), dg.double(), torch.zeros_like(through), *exact)
    assert found.holds, str(found)
    assert beta.shape == b.shape


def test_gates_far_out(device: torch.device) -> None:
    """log(1 + e^t) where 1 + e^t is 1 in float32, and σ where e^t overflows."""
    a = torch.tensor([[-80.0, -20.0, 0.0, 30.0, 200.0]], device=device)
    given = (a, a, torch.zeros(5, device=device), torch.zeros(5, device=device))
    found = adjoint.gated_delta.gate(*given, preference=TRITON)
    exact = [x.double() for x in given]
    truth = (-torch.logaddexp(exact[0], torch.zeros_like(exact[0])), exact[0].sigmoid())
    promised = adjoint.plan(adjoint.gated_delta.gate, *given, preference=TRITON).guarantee
    for name, got, right in zip(("g", "beta"), found, truth, strict=True):
        measured = promised[name].error.measure(got, right, *exact)
        assert measured.holds, f"{name}: {measured}"
    assert (found[0][0, :2] < 0).all()


def test_vectors_without_length(device: torch.device) -> None:
    """0 stays 0, and its gradient is dy / sqrt(1e-6)."""
    x = torch.zeros(3, 7, device=device, requires_grad=True)
    y = adjoint.gated_delta.normalize(x, preference=TRITON)
    (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert not y.any()
    promised = adjoint.plan(adjoint.gated_delta.normalize, x.detach(), preference=TRITON).adjoint.guarantee["dx"]
    zero = torch.zeros(3, 7, device=device, dtype=torch.float64)
    measured = promised.error.measure(dx, torch.full_like(zero, 1e3), torch.ones_like(zero), zero)
    assert measured.holds, str(measured)
