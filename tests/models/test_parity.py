"""`HybridLM` beside transformers' own models, from one state dict: logits, losses and every parameter's gradient."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.models import HybridLM
from tests.models import oracle
from tests.models.small import CONFIGS, GRADIENTS, LOGITS, SIZES, distance, small_model

MODULES = {"qwen3_next": "qwen3_next", "qwen3_5": "qwen3_5", "qwen3_5_moe": "qwen3_5_moe"}

MARGIN = 2.0
"""How much of the error that transformers' model has, against itself in float64, ours may have."""


ROUNDINGS = 2e-5
"""An error of a few roundings, which one parameter's gradient has more of and another less, by chance."""

families = pytest.mark.parametrize("name", CONFIGS)


def their_class(name: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 8):
        pytest.skip("needs transformers 5.8 or newer")
    modeling = import_module(f"transformers.models.{MODULES[name]}.modeling_{MODULES[name]}")
    return getattr(modeling, CONFIGS[name].to_dict()["architectures"][0])


def their_model(name: str, ours: HybridLM) -> Any:
    """Transformers' model with our configuration and parameters."""
    kind = their_class(name)
    model = kind(kind.config_class(**ours.config.to_dict()))
    model.load_state_dict(ours.state_dict())
    return experts_in_a_loop(model)


def experts_in_a_loop(model: Any) -> Any:
    """Torch's grouped product, transformers' other choice, does not take so small experts."""
    if hasattr(model.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, SIZES["vocab_size"], (2, 80), generator=torch.Generator().manual_seed(1))


def labels_of(ids: Tensor) -> Tensor:
    labels = ids.clone()
    labels[1, 5:9] = -100
    return labels


def results(model: Any, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    options = {"output_logits": True} if isinstance(model, HybridLM) else {}
    output = model(input_ids=ids, labels=labels_of(ids), **options)
    output.loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return output.logits, output.loss, gradients


def exact_results(model: HybridLM, ids: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Of the oracle, in float64: transformers' rule and norms are float32 whatever the model is."""
    weights = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    loss, logits = oracle.loss_of(list(ids), list(labels_of(ids)), weights, model.config)
    loss.backward()
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    return logits.view(*ids.shape, -1), loss, gradients


@families
def test_logits_losses_and_gradients(name: str, ids: Tensor) -> None:
    model = small_model(name)
    logits, loss, gradients = results(model, ids)
    theirs = results(their_model(name, model), ids)
    exact = exact_results(model, ids)
    assert distance(logits, exact[0]) <= min(LOGITS, MARGIN * distance(theirs[0], exact[0]))
    assert distance(loss, exact[1]) <= LOGITS
    assert gradients.keys() == exact[2].keys()
    for key, gradient in exact[2].items():
        allowed = MARGIN * distance(theirs[2][key], gradient) + ROUNDINGS
        assert distance(gradients[key], gradient) <= min(GRADIENTS, allowed), key


@families
def test_transformers_opens_what_is_saved(name: str, ids: Tensor, tmp_path: Path) -> None:
    model = small_model(name).eval()
    kind = their_class(name)
    theirs = their_model(name, model).eval()
    model.save_pretrained(tmp_path)
    opened = experts_in_a_loop(kind.from_pretrained(tmp_path)).eval()
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, theirs(ids).logits)


@families
def test_what_transformers_saves_is_opened(name: str, ids: Tensor, tmp_path: Path) -> None:
    """In shards, and with experts one by one, as transformers writes them."""
    model = small_model(name).eval()
    their_model(name, model).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    opened = HybridLM.from_pretrained(tmp_path)
    assert all(torch.equal(mine, other) for mine, other in zip(opened.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        assert torch.equal(opened.eval()(ids).logits, model(ids).logits)
