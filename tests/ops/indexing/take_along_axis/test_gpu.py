"""What only a GPU can show: sizes past 2^31 elements, graphs of a whole training step, bits under load."""

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Preference
from adjoint.verify.checks.bits import same_bits

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16


def test_a_tensor_past_two_to_the_31_elements(device: torch.device) -> None:
    lines, length = 2**21 + 5, 1030
    if torch.cuda.mem_get_info(device)[0] < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    x = torch.randn(lines, length, dtype=BFLOAT16, device=device, requires_grad=True)
    indices = torch.rand(lines, 8, device=device).argsort(1)[:, :3] * 128 + 5
    out = adjoint.take_along_axis(x, indices)
    assert torch.equal(out, x.detach().gather(1, indices))
    (dx,) = torch.autograd.grad(out, x, out.detach())
    last = slice(lines - 3, lines)
    assert torch.equal(dx[last].gather(1, indices[last]), out[last])
    assert int(torch.count_nonzero(dx)) == int(torch.count_nonzero(out))


def test_more_than_two_to_the_30_indices(device: torch.device) -> None:
    lines, number = 2**12 + 1, 2**18
    if torch.cuda.mem_get_info(device)[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    x = torch.randn(lines, 4, dtype=BFLOAT16, device=device)
    indices = torch.randint(4, (1, number), dtype=torch.int32, device=device)
    out = adjoint.take_along_axis(x, indices)
    for line in (0, lines - 1):
        assert torch.equal(out[line], x[line][indices[0].long()])


@pytest.mark.parametrize(("entries", "name"), [(10, "few"), (40, "lines"), (700, "lines"), (3000, "sorted")])
@pytest.mark.parametrize("hot", [0.0, 0.5, 1.0])
def test_bits_repeat_while_another_stream_loads_the_gpu(
    device: torch.device, entries: int, name: str, hot: float
) -> None:
    """And are those of PyTorch on the CPU."""
    lines, length = 2048, 500
    indices = torch.randint(length, (lines, entries), device=device)
    indices = torch.where(torch.rand(lines, entries, device=device) < hot, 7, indices)
    x = torch.zeros(lines, length, device=device, requires_grad=True)
    dout = torch.randn(lines, entries, device=device)
    plan = adjoint.plan(adjoint.take_along_axis, x, indices).adjoint
    assert plan is not None and plan.name == f"triton.{name}"

    def gradient(x: Tensor, indices: Tensor, dout: Tensor) -> Tensor:
        return torch.autograd.grad(adjoint.take_along_axis(x, indices), x, dout)[0]

    first = gradient(x, indices, dout)
    some = slice(0, lines, 97)
    host = gradient(x[some].detach().cpu().requires_grad_(), indices[some].cpu(), dout[some].cpu())
    assert same_bits(first[some].cpu(), host)
    load, side = torch.randn(4096, 4096, dtype=BFLOAT16, device=device), torch.cuda.Stream(device)
    for _ in range(100):
        with torch.cuda.stream(side):
            torch.mm(load, load)
        assert torch.equal(gradient(x, indices, dout), first)


@pytest.mark.parametrize("entries", [8, 200, 2000])
def test_a_training_step_is_recorded_in_a_graph(device: torch.device, entries: int) -> None:
    """Through autograd, without a wait; an index out of range is reported after a replay."""
    x = torch.randn(300, 64, device=device, requires_grad=True)
    indices = torch.randint(64, (300, entries), device=device)
    dout = torch.randn(300, entries, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # what is recorded must have run once
        adjoint.take_along_axis(x, indices).backward(dout)
    torch.cuda.current_stream(device).wait_stream(side)
    x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        adjoint.take_along_axis(x, indices).backward(dout)
    for _ in range(3):
        indices.random_(64)
        dout.normal_()
        graph.replay()
        leaf = x.detach().requires_grad_()
        expected = torch.autograd.grad(
            adjoint.take_along_axis(leaf, indices, preference=Preference(backend="eager")), leaf, dout
        )[0]
        assert x.grad is not None and same_bits(x.grad, expected)
    adjoint.check()
    indices[123, 4] = 64
    graph.replay()
    with pytest.raises(adjoint.ArgumentError, match=f"got 64 at position {123 * entries + 4} "):
        adjoint.check()


def test_promises_are_checked_through_the_status_word(device: torch.device) -> None:
    indices = torch.stack([torch.randperm(512, device=device)[:10] for _ in range(1000)])
    x = torch.zeros(1000, 512, device=device)
    with adjoint.checked():
        adjoint.take_along_axis(x, indices, distinct=True)
    indices[700, 9] = indices[700, 2] - 512
    indices[900, 9] = indices[900, 2]
    with pytest.raises(adjoint.ArgumentError, match="at position 7009 "), adjoint.checked():
        adjoint.take_along_axis(x, indices, distinct=True)
