"""`HybridLM` in one graph of a compiler: packed sequences, and rows of sizes that are symbols."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.models import pack
from adjoint.nn import GatedAttention
from adjoint.nn.attention.packed import BACKWARD, FORWARD
from tests.models.small import sequences, small_model

LAYERS = {"num_hidden_layers": 2, "layer_types": ("linear_attention", "full_attention")}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@torch.no_grad()
def test_packed_sequences_are_one_graph() -> None:
    """Of any lengths, 0 among them: attention of sequences one after the other is an operator there."""
    model = small_model("qwen3_5", **LAYERS)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for lengths in ((9, 1, 0, 14, 5), (3, 0, 0, 20, 6)):
        ids, cu_seqlens = pack(sequences(lengths))
        right = model(ids, cu_seqlens=cu_seqlens, labels=ids, output_logits=True)
        output = compiled(ids, cu_seqlens=cu_seqlens, labels=ids, output_logits=True)
        assert torch.equal(output.logits, right.logits) and torch.equal(output.loss, right.loss), lengths


@torch.no_grad()
def test_rows_of_symbolic_sizes_are_one_graph() -> None:
    model = small_model("qwen3_5", **LAYERS)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((11, 11), (17, 17, 17)):
        ids = torch.stack(sequences(lengths))
        assert torch.equal(compiled(ids).logits, model(ids).logits), lengths


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_attention_in_a_graph_has_the_bits_and_gradients_of_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = GatedAttention(16, 4, 2, 8, dtype=dtype)
    x, tables = torch.randn(1, 40, 16, dtype=dtype, requires_grad=True), torch.randn(2, 40, 4, dtype=dtype).float()
    inputs, upstream = (x, *layer.parameters()), torch.randn(1, 40, 16, dtype=dtype)
    tables = tables.to(torch.promote_types(dtype, torch.float32))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")

    def results(call: object, bounds: Tensor) -> tuple[Tensor, ...]:
        y = call(x, *tables, cu_seqlens=bounds)  # type: ignore[operator]
        return (y, *torch.autograd.grad(y, inputs, upstream))

    for bounds in (torch.tensor([0, 9, 9, 10, 40]), torch.tensor([0, 0, 33, 40, 40])):
        for mine, right in zip(results(compiled, bounds), results(layer, bounds), strict=True):
            assert torch.equal(mine, right)
    with pytest.raises(adjoint.ArgumentError, match=r"GatedAttention: cu_seqlens .* 40, got \[0, 0, 33, 39, 39\]"):
        compiled(x, *tables, cu_seqlens=torch.tensor([0, 0, 33, 39, 39]))


@pytest.mark.parametrize("dtype", (torch.float64, torch.float32, torch.bfloat16), ids=str)
def test_the_operators_are_right_for_torch(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(1, 7, heads, 8, dtype=dtype) for heads in (4, 2, 2))
    bounds = torch.tensor([0, 3, 3, 7])
    torch.library.opcheck(FORWARD, (q, k, v, bounds))
    torch.library.opcheck(BACKWARD, (torch.randn_like(q), q, k, v, bounds, *FORWARD(q, k, v, bounds)))
