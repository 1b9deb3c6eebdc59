"""What only a GPU can show: sizes past 2^31 elements, graphs of a whole training step, bits under load."""

import pytest
import torch

import adjoint

pytestmark = pytest.mark.gpu

BFLOAT16 = torch.bfloat16


def _free_memory(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0]


def test_a_table_past_two_to_the_31_elements(device: torch.device) -> None:
    rows, columns = 2**19 + 3, 4096 + 16
    if _free_memory(device) < 16 * 2**30:
        pytest.skip("needs 16 GiB")
    weight = torch.empty(rows, columns, dtype=BFLOAT16, device=device)
    ids = torch.tensor([0, rows - 1, rows // 2, rows - 1], device=device)
    weight[ids] = torch.randn(4, columns, device=device, dtype=BFLOAT16)
    weight.requires_grad_()
    out = adjoint.embedding(ids, weight)
    assert torch.equal(out, weight.detach()[ids])
    dout = torch.randn_like(out)
    (dweight,) = torch.autograd.grad(out, weight, dout)
    assert torch.equal(dweight[0], dout[0]) and torch.equal(dweight[rows // 2], dout[2])
    assert torch.equal(dweight[rows - 1], (dout[1].float() + dout[3].float()).to(BFLOAT16))
    assert int((dweight != 0).any(1).sum()) == 3


def test_a_gradient_past_two_to_the_31_elements(device: torch.device) -> None:
    tokens, columns = 2**19 + 5, 4096
    if _free_memory(device) < 24 * 2**30:
        pytest.skip("needs 24 GiB")
    weight = torch.zeros(50, columns, dtype=BFLOAT16, device=device, requires_grad=True)
    ids = torch.randint(50, (tokens,), device=device)
    dout = torch.randn(tokens, columns, dtype=BFLOAT16, device=device)
    (dweight,) = torch.autograd.grad(adjoint.embedding(ids, weight), weight, dout)
    adjoint_plan = adjoint.plan(adjoint.embedding, ids, weight).adjoint
    assert adjoint_plan is not None
    for column in (0, columns - 1):
        some = dout[:, column : column + 1].double()
        exact = torch.zeros(50, 1, dtype=torch.float64, device=device).index_add_(0, ids, some)
        promised = adjoint_plan.guarantee["dweight"].error
        assert promised.measure(dweight[:, column : column + 1], exact, some, ids, torch.zeros_like(exact)).holds


@pytest.mark.parametrize("kind", ["uniform", "hot"])
def test_bits_repeat_while_another_stream_loads_the_gpu(device: torch.device, kind: str) -> None:
    rows, columns, tokens = 30000, 1024, 16384
    ids = torch.randint(rows, (tokens,), device=device)
    if kind == "hot":
        ids[torch.randperm(tokens, device=device)[: tokens // 2]] = 7
    weight = torch.randn(rows, columns, dtype=BFLOAT16, device=device, requires_grad=True)
    dout = torch.randn(tokens, columns, dtype=BFLOAT16, device=device)

    def gradients() -> tuple[torch.Tensor, ...]:
        (dense,) = torch.autograd.grad(adjoint.embedding(ids, weight), weight, dout)
        (sparse,) = torch.autograd.grad(adjoint.embedding(ids, weight, sparse=True), weight, dout)
        buffer = torch.ones(rows, columns, device=device)
        out = adjoint.embedding(ids, weight, accumulate_into=buffer)
        torch.autograd.grad(out, weight, dout, allow_unused=True)
        return dense, sparse.indices(), sparse.values(), buffer

    first = gradients()
    assert torch.equal(first[0][first[1][0]], first[2]), "sparse and dense have the same bits"
    load, side = torch.randn(4096, 4096, dtype=BFLOAT16, device=device), torch.cuda.Stream(device)
    for _ in range(100):
        with torch.cuda.stream(side):
            torch.mm(load, load)
        assert all(map(torch.equal, gradients(), first))


def test_a_training_step_is_recorded_in_a_graph(device: torch.device) -> None:
    """Lookup and backward, through autograd, without a wait; an id out of range is reported after a replay."""
    table = adjoint.nn.Embedding(5000, 256, dtype=BFLOAT16, device=device)
    ids = torch.randint(5000, (2000,), device=device)
    dout = torch.randn(2000, 256, dtype=BFLOAT16, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):  # what is recorded must have run once
        table(ids).backward(dout)
    torch.cuda.current_stream(device).wait_stream(side)
    table.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table(ids).backward(dout)
    for _ in range(3):
        ids.random_(5000)
        dout.normal_()
        graph.replay()
        leaf = table.weight.detach().requires_grad_()
        (expected,) = torch.autograd.grad(adjoint.embedding(ids, leaf), leaf, dout)
        assert table.weight.grad is not None and torch.equal(table.weight.grad, expected)
    adjoint.check()
    ids[1234] = 5000
    graph.replay()
    with pytest.raises(adjoint.ArgumentError, match="got 5000 at position 1234"):
        adjoint.check()
