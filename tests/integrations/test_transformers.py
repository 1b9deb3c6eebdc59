"""A small Qwen3.5 of transformers with our gated delta rule in it, beside the model's own path and float64."""

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor


def _example() -> Any:
    path = Path(__file__).parents[2] / "examples" / "qwen3_5.py"
    spec = importlib.util.spec_from_file_location("qwen3_5_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()

MARGIN = 2.0
"""How much of the error that the model's own path has, against the same model in float64, ours may have."""


@pytest.fixture
def modeling() -> ModuleType:
    return pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5", reason="needs transformers' Qwen3.5")


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 64, (2, 100), generator=torch.Generator().manual_seed(1))


def test_logits_of_a_prefill_and_of_decoding_with_a_cache(modeling: ModuleType, ids: Tensor) -> None:
    model = example.small_model().eval()
    theirs = example.logits_of(model, ids, 90)
    calls = []
    with example.exchanged(modeling):
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            _count(modeling, name, calls)
        ours = example.logits_of(model, ids, 90)
        exact = example.logits_of(example.small_model().eval().double(), ids, 90)
    assert calls.count("torch_chunk_gated_delta_rule") == 2 * 3  # a prefill in float32, one in float64; three layers
    assert calls.count("torch_recurrent_gated_delta_rule") == 2 * 10 * 3
    assert example.distance(ours, exact) <= MARGIN * example.distance(theirs, exact)


def _count(modeling: Any, name: str, calls: list[str]) -> None:
    function = getattr(modeling, name)

    def counted(*arguments: Any, **keywords: Any) -> Any:
        calls.append(name)
        return function(*arguments, **keywords)

    setattr(modeling, name, counted)


def test_gradients_of_a_step_of_training(modeling: ModuleType, ids: Tensor) -> None:
    model = example.small_model()
    theirs = example.gradients_of(model, ids)
    with example.exchanged(modeling):
        ours = example.gradients_of(model, ids)
        exact = example.gradients_of(example.small_model().double(), ids)
    assert ours.keys() == exact.keys() == theirs.keys()
    assert distance_of_all(ours, exact) <= MARGIN * distance_of_all(theirs, exact)


def distance_of_all(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """Of all parameters: the root of the sum of squares of each one's norm-relative error.

    One parameter's error is a few roundings, larger or smaller by chance; any wrong one still stands out of the sum.
    """
    return math.hypot(*(example.distance(gradients[name], right) for name, right in exact.items()))
