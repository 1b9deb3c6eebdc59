"""The rule in plain PyTorch: what only it knows."""

import pytest
import torch

import adjoint
from adjoint.ops.gated_delta.rule import eager
from adjoint.verify.checks.bits import same_bits


@pytest.mark.parametrize("steepness", [1e-3, 1.0, 30.0, 1e36])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
def test_decays_are_the_exponentials_of_what_remains(kind: torch.dtype, steepness: float, device: torch.device) -> None:
    """Bit for bit: decays that vanish, infinities and NaN, before a reset and after it."""
    generator = torch.Generator().manual_seed(5)
    g = -steepness * torch.rand(2, 3, 64, generator=generator, dtype=torch.float64)
    g[0, 1, 20] = torch.nan
    log_decay = g.to(device).cumsum(-1)
    future = torch.ones(64, 64, dtype=torch.bool, device=device).triu(1)
    high = log_decay.to(kind)
    between = high.unsqueeze(-1) - high.unsqueeze(-2)
    if kind == torch.float32:
        low = (log_decay - high).to(kind)
        between = between + low.unsqueeze(-1) - low.unsqueeze(-2)
    without = torch.zeros(2, 3, 64, dtype=torch.int8, device=device)
    some = (torch.rand(2, 3, 64, generator=generator) < 0.1).to(device).cumsum(-1, dtype=torch.int8)
    for resets in (without, some):
        absent = future | (resets.unsqueeze(-1) != resets.unsqueeze(-2))
        expected = between.masked_fill(absent, -torch.inf).exp()
        assert same_bits(eager._decays(log_decay, resets, kind), expected)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 16, 32, 64])
def test_the_inverse_of_a_chunk(kind: torch.dtype, size: int, device: torch.device) -> None:
    """Of matrices whose inverses grow, and where they lie apart: substitution loses a share of T (I + |A|) T."""
    generator = torch.Generator().manual_seed(7)
    A = torch.randn(2, 3, size, size, generator=generator, dtype=kind).to(device).tril(-1)
    apart = torch.empty(2, 3, size, 2 * size, dtype=kind, device=device)[..., ::2].copy_(A)
    unit = torch.eye(size, dtype=torch.float64, device=device)
    exact = unit.repeat(2, 3, 1, 1)
    for row in range(1, size):
        exact[..., row, :] -= torch.einsum("abk,abkj->abj", A[..., row, :row].double(), exact[..., :row, :])
    T = eager.inverse(A).view_as(A)
    lost = exact.abs() @ (unit + A.double().abs()) @ exact.abs()
    assert ((T.double() - exact).abs() <= 2 * size * torch.finfo(kind).eps * lost).all()
    assert torch.equal(eager.inverse(apart).view_as(A), T)


def test_no_state_is_a_state_of_zeros(device: torch.device) -> None:
    """Bit for bit, gradients too, of sequences of one chunk, of several, and of several segments."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    time, bounds = 1200, torch.tensor([0, 5, 70, 1200], device=device)
    q, k, v, do = draw(1, time, 1, 8), draw(1, time, 1, 8), draw(1, time, 2, 4), draw(1, time, 2, 4)
    g, beta = -draw(1, time, 2).abs(), draw(1, time, 2).sigmoid()

    def run(state: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v, g, beta)]
        o, final = adjoint.gated_delta_rule(
            *inputs, cu_seqlens=bounds, initial_state=state, normalize_qk=True, output_final_state=True,
            preference=adjoint.Preference(backend="eager"),
        )  # fmt: skip
        return (o, final, *torch.autograd.grad(o, inputs, do))

    for without, zeros in zip(run(None), run(torch.zeros(3, 2, 8, 4, device=device)), strict=True):
        assert torch.equal(without, zeros)
