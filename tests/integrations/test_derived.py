"""Modules whose classes are made from those of transformers: by users, by sharding, by parametrisations."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from adjoint.integrations.transformers import patch, unpatch
from tests.integrations.test_patch import families, their_model
from tests.models.small import LOGITS, distance

pytest.importorskip("transformers")

POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2, 3, 4, 5]])


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 61, (1, 15), generator=torch.Generator().manual_seed(1))


def derive(module: nn.Module, **attributes: Any) -> None:
    """Exchanges a module's class for one made from it, as `fully_shard` does."""
    kind = type(module)
    module.__class__ = type(f"Own{kind.__name__}", (kind,), {"__module__": __name__, **attributes})


@families
def test_classes_made_from_those_of_transformers_are_replaced(name: str, ids: Tensor) -> None:
    model, plain = their_model(name).train(), their_model(name).train()
    for module in (model, plain):
        module.config.output_router_logits = False  # transformers records them of its own classes alone
    for module in (model, model.model, model.model.norm):
        derive(module)
    register_parametrization(model.model.layers[0].post_attention_layernorm, "weight", nn.Identity())
    report = patch(model, loss=True, verbose=False)
    counts = {line.module: line.count for line in report.replacements}
    assert all(not line.reason for line in report.replacements)
    assert sum(count for module, count in counts.items() if module.endswith("RMSNorm")) == 11
    assert sum(count for module, count in counts.items() if module.startswith("Own")) == 3
    output = model(ids, labels=ids, use_cache=False)
    assert output.logits is None and distance(output.loss, plain(ids, labels=ids, use_cache=False).loss) <= 2 * LOGITS
    with torch.no_grad():
        packed = model(ids, position_ids=POSITIONS, use_cache=False).logits
        alone = model(ids[:, 9:], use_cache=False).logits
    assert distance(packed[:, 9:], alone) <= 2 * LOGITS, "packed sequences see each other"
    unpatch(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)


def test_a_forward_of_a_made_class_stays_and_is_named(ids: Tensor) -> None:
    model = their_model("qwen3_5")
    derive(model.model.norm, forward=lambda self, x: 2 * x)
    expected = model(ids).logits
    left = {line.module: line.reason for line in patch(model, verbose=False).replacements if line.reason}
    assert left == {"OwnQwen3_5RMSNorm": "its class is made from Qwen3_5RMSNorm, with a forward of its own"}
    assert distance(model(ids).logits, expected) <= 2 * LOGITS
