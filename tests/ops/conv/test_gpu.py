"""What only a GPU can show of the convolution: bits at the sizes of models, tensors past 2^31 elements, and graphs."""

import pytest
import torch

import adjoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("transposed", [False, True])
def test_past_two_to_the_31_elements(transposed: bool, device: torch.device) -> None:
    """The last tokens of a batch are those that a batch of their own has."""
    time, channels = 2**19 + 16, 2112
    shape = (2, channels, time) if transposed else (2, time, channels)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    x = x.mT if transposed else x
    weight = torch.randn(channels, 4, dtype=torch.bfloat16, device=device)
    assert x.numel() > 2**31
    own, weight_too = x.detach().requires_grad_(), weight.clone().requires_grad_()
    y = adjoint.causal_conv1d(own, weight_too)
    dy = torch.empty_like(y).normal_()
    dx, dweight = torch.autograd.grad(y, (own, weight_too), dy)
    assert torch.isfinite(dweight).all()
    tail = x[1:, -64:].detach().requires_grad_()
    state = x[1:, -67:-64].mT.contiguous()
    expected = adjoint.causal_conv1d(tail, weight, initial_state=state)
    assert torch.equal(y[1:, -64:], expected)
    (expected_dx,) = torch.autograd.grad(expected, tail, dy[1:, -64:])
    assert torch.equal(dx[1:, -64:], expected_dx)


@pytest.mark.parametrize("sequences", [1, 64])
def test_bits_at_the_size_of_a_model(sequences: int, device: torch.device) -> None:
    """Blocks without an edge and blocks with one have the same bits: a sequence alone is cut into others."""
    tokens, channels = 8192, 2048
    bounds = torch.arange(sequences + 1, device=device) * (tokens // sequences)
    x = torch.randn(1, tokens, channels, dtype=torch.bfloat16, device=device)
    weight, dy = torch.randn(channels, 4, device=device), torch.randn_like(x)

    def run(first: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = x[:, first:].detach().requires_grad_()
        y = adjoint.causal_conv1d(own, weight, cu_seqlens=bounds[bounds >= first] - first)
        return y, torch.autograd.grad(y, own, dy[:, first:])[0]

    y, dx = run(0)
    for _ in range(20):
        assert all(map(torch.equal, run(0), (y, dx)))
    if sequences > 1:
        first = int(bounds[37])
        assert all(map(torch.equal, run(first), (y[:, first:], dx[:, first:])))


def test_a_graph_replays_a_step_of_decoding(device: torch.device) -> None:
    x, weight = torch.randn(4, 1, 512, device=device), torch.randn(512, 4, device=device)
    pool = torch.randn(9, 512, 3, device=device)
    indices = torch.tensor([8, 2, -1, 5], device=device)
    expected_pool = pool.clone()
    expected = [
        adjoint.causal_conv1d_step(x + n, expected_pool, weight, state_indices=indices, in_place=True)[0].clone()
        for n in range(3)
    ]
    token = x.clone()
    scratch = pool.clone()
    adjoint.causal_conv1d_step(token, scratch, weight, state_indices=indices, in_place=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = adjoint.causal_conv1d_step(token, scratch, weight, state_indices=indices, in_place=True)
    scratch.copy_(pool)
    for n in range(3):
        token.copy_(x + n)
        graph.replay()
        assert torch.equal(y, expected[n])
    assert torch.equal(scratch, expected_pool)
