"""Models that accelerate spreads over devices, or loads module by module: patched under its hooks, and before them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.integrations.transformers import patch, unpatch
from tests.integrations.test_patch import families, their_model
from tests.models.small import LOGITS, distance

accelerate = pytest.importorskip("accelerate")
hooks = pytest.importorskip("accelerate.hooks")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(1))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits  # type: ignore[no-any-return]


def dispatched(name: str) -> Any:
    """As `device_map="auto"` leaves a model on a machine with several GPUs: every module with weights has a hook."""
    model = their_model(name).eval()
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{layer}" for layer in range(len(model.model.layers))]
    return accelerate.dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True, main_device="cpu")


@families
def test_a_model_on_several_devices_is_patched(name: str, ids: Tensor) -> None:
    model = dispatched(name)
    before = logits(model, ids)
    report = patch(model, verbose=False)
    assert all(not line.reason for line in report.replacements)
    assert 0 < distance(logits(model, ids), before) <= 2 * LOGITS
    unpatch(model)
    assert torch.equal(logits(model, ids), before)
    assert all(hasattr(module, "_hf_hook") for module in model.modules() if list(module.parameters(recurse=False)))


@families
@pytest.mark.parametrize("patch_first", (True, False))
def test_weights_that_lie_on_disk_are_there_when_they_are_used(
    name: str, patch_first: bool, ids: Tensor, tmp_path: Path
) -> None:
    model = their_model(name).eval()
    before = logits(model, ids)
    if patch_first:
        patch(model, verbose=False)
    accelerate.disk_offload(model, tmp_path, execution_device="cpu")
    if not patch_first:
        patch(model, verbose=False)
    assert distance(logits(model, ids), before) <= 2 * LOGITS
    assert model.model.layers[0].linear_attn.conv1d.weight.is_meta, "afterwards they are not in memory"


@families
@pytest.mark.parametrize("hooks_last", (True, False))
def test_hooks_and_patch_go_in_any_order(name: str, hooks_last: bool, ids: Tensor) -> None:
    model = their_model(name).eval()
    before = logits(model, ids)
    patch(model, verbose=False)
    ours = logits(model, ids)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(logits(model, ids), ours)
    for step in (unpatch, None) if hooks_last else (None, unpatch):
        if step is None:
            hooks.remove_hook_from_module(model, recurse=True)
        else:
            step(model)
    assert torch.equal(logits(model, ids), before)


def test_a_forward_of_someone_else_under_a_hook_stays() -> None:
    model = their_model("qwen3_5")
    norm = model.model.norm
    mine = norm.forward = lambda x: x
    hooks.add_hook_to_module(norm, hooks.ModelHook())
    left = [(line.module, line.reason) for line in patch(model, verbose=False).replacements if line.reason]
    assert left == [("Qwen3_5RMSNorm", "its forward is replaced already")] and norm._old_forward is mine
