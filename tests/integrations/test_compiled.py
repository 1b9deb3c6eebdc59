"""Patched models under torch.compile and torch.export: with a mask, with positions, with bounds."""

# ruff: noqa: F811  (fixtures are imported, and arguments have their names)

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.integrations.transformers import patch
from tests.integrations.test_patch import _version, ids, their_model  # noqa: F401
from tests.integrations.test_positions import PACKED
from tests.models.small import GRADIENTS, LOGITS, distance

MASK = torch.ones(2, 40, dtype=torch.int64)
MASK[1, :9] = 0
BOUNDS = torch.tensor([0, 13, 40], dtype=torch.int32)

WHOLE: dict[str, dict[str, Any]] = {"rows": {}, "mask": {"attention_mask": MASK}}
"""Inputs with which a model compiles to one graph."""

READ: dict[str, dict[str, Any]] = {
    "positions": {"position_ids": torch.arange(40)[None].expand(2, -1)},
    "positions and a mask": {"position_ids": torch.arange(40)[None].expand(2, -1), "attention_mask": MASK},
    "packed positions": {"position_ids": PACKED},
    "bounds": {"position_ids": PACKED, "cu_seq_lens_q": BOUNDS},
}
"""Inputs whose values are read: between graphs."""


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def patched(name: str, loss: bool = True) -> Any:
    model = their_model(name).train()
    model.config.output_router_logits = False
    patch(model, loss=loss, verbose=False)
    return model


def batch(ids: Tensor, kind: str) -> dict[str, Any]:
    row = ids[:1] if kind in ("packed positions", "bounds") else ids
    return {"input_ids": row, "labels": row, "use_cache": False, **(WHOLE | READ)[kind]}


def step(model: nn.Module, compiled: Any, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = compiled(**inputs).loss
    loss.backward()
    return loss.detach(), {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_training_step_compiles_to_one_graph(kind: str, ids: Tensor) -> None:
    model, inputs = patched("qwen3_5_moe"), batch(ids, kind)
    expected, gradients = step(model, model, inputs)
    loss, ours = step(model, torch.compile(model, backend="aot_eager", fullgraph=True), inputs)
    assert distance(loss, expected) <= 2 * LOGITS
    assert all(distance(ours[key], gradient) <= 2 * GRADIENTS for key, gradient in gradients.items())


@pytest.mark.parametrize("kind", READ)
def test_positions_and_bounds_are_read_between_graphs(kind: str, ids: Tensor) -> None:
    model, inputs = patched("qwen3_5"), batch(ids, kind)
    with torch.no_grad():
        expected = model(**inputs).loss
        assert distance(torch.compile(model, backend="eager")(**inputs).loss, expected) <= 2 * LOGITS


def test_one_graph_with_positions_is_an_error_that_says_why(ids: Tensor) -> None:
    model = torch.compile(patched("qwen3_5"), backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="reads in position_ids whether they pack sequences"):
        model(**batch(ids, "positions"))


class Logits(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.model(ids, position_ids=positions, use_cache=False).logits  # type: ignore[no-any-return]


def test_an_exported_program_has_the_logits_and_takes_no_positions(ids: Tensor) -> None:
    model = Logits(patched("qwen3_5").eval())
    program = torch.export.export(model, (ids,), strict=False).module()
    with torch.no_grad():
        assert distance(program(ids), model(ids)) <= 2 * LOGITS
    with pytest.raises(adjoint.Unsupported, match="an exported program cannot read in position_ids"):
        torch.export.export(model, (ids, torch.arange(40)[None].expand(2, -1)), strict=False)
