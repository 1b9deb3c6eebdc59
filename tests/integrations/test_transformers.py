"""A small Qwen3.5 of transformers with FLA's signatures of our rule in it, beside the model's own path and float64."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint.integrations.fla import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from tests.models.small import distance


def small_model(device: str | torch.device = "cpu") -> nn.Module:
    """Three layers of linear attention and one of attention; 2 key heads serve 4 value heads."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=8,
        pad_token_id=0,
    )
    model: nn.Module = Qwen3_5ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # decays of a trained model: states that remember
            nn.init.uniform_(parameter, -4, 0)
    return model.to(device)


@contextmanager
def exchanged(modeling: ModuleType) -> Iterator[None]:
    """Inside, the models of a module of transformers run our gated delta rule."""
    names = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
    before = {name: getattr(modeling, name) for name in names}
    modeling.__dict__.update(zip(names, (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule), strict=True))
    try:
        yield
    finally:
        modeling.__dict__.update(before)


def logits_of(model: nn.Module, ids: Tensor, prefill: int) -> Tensor:
    """The logits of every token: the first ones at once, the others one at a time from the cache."""
    with torch.no_grad():
        first = model(ids[:, :prefill], use_cache=True)
        logits, cache = [first.logits], first.past_key_values
        for t in range(prefill, ids.shape[1]):
            step = model(ids[:, t : t + 1], past_key_values=cache, use_cache=True)
            logits.append(step.logits)
    return torch.cat(logits, 1)


def gradients_of(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """The gradients of a step of training."""
    model.zero_grad()
    loss: Tensor = model(ids, labels=ids).loss
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


MARGIN = 2.0
"""How much of the error that the model's own path has, against the same model in float64, ours may have."""


@pytest.fixture
def modeling() -> ModuleType:
    return pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="needs transformers' Qwen3.5")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 64, (2, 100), generator=torch.Generator().manual_seed(1))


def test_logits_of_a_prefill_and_of_decoding_with_a_cache(modeling: ModuleType, ids: Tensor) -> None:
    model = small_model().eval()
    theirs = logits_of(model, ids, 90)
    calls = []
    with exchanged(modeling):
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            _count(modeling, name, calls)
        ours = logits_of(model, ids, 90)
        exact = logits_of(small_model().eval().double(), ids, 90)
    assert calls.count("torch_chunk_gated_delta_rule") == 2 * 3  # a prefill in float32, one in float64; three layers
    assert calls.count("torch_recurrent_gated_delta_rule") == 2 * 10 * 3
    assert distance(ours, exact) <= MARGIN * distance(theirs, exact)


def _count(modeling: Any, name: str, calls: list[str]) -> None:
    function = getattr(modeling, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return function(*arguments, **keywords)

    setattr(modeling, name, counted)


def test_gradients_of_a_step_of_training(modeling: ModuleType, ids: Tensor) -> None:
    model = small_model()
    theirs = gradients_of(model, ids)
    with exchanged(modeling):
        ours = gradients_of(model, ids)
        exact = gradients_of(small_model().double(), ids)
    assert ours.keys() == exact.keys() == theirs.keys()
    assert distance_of_all(ours, exact) <= MARGIN * distance_of_all(theirs, exact)


def distance_of_all(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all parameters: the root of the sum of squares of each one's norm-relative error.

    One parameter's error is a few roundings, larger or smaller by chance; any wrong one still stands out of the sum.
    """
    return math.hypot(*(distance(gradients[name], right) for name, right in exact.items()))
