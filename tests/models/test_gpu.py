"""Models on a GPU: the kernels in their places, beside the oracle in float64 on the CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.core.kernels import compilations
from adjoint.models import HybridLM, pack
from tests.models import oracle
from tests.models.small import CONFIGS, distance, sequences, small_model
from tests.stated import stated

LOGITS, GRADIENTS, GRADIENTS_OF_PATCHED = (
    stated("models", f"| {what} on a GPU, float32 |")
    for what in ("logits", "gradients", "gradients of a patched model")
)

pytestmark = pytest.mark.gpu

families = pytest.mark.parametrize("name", CONFIGS)

SIZES: dict[str, Any] = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64, "hidden_size": 64}
"""Heads that torch's attention for sequences of different lengths takes."""

MARGIN = 2.0
"""How much of the error that plain torch has in bfloat16, against float64, ours may have."""


def exact_results(model: HybridLM, ids: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    weights = {key: p.detach().cpu().to(dtype, copy=True).requires_grad_() for key, p in model.named_parameters()}
    loss, logits = oracle.loss_of(ids, ids, weights, model.config)
    loss.backward()
    return logits, {key: weight.grad for key, weight in weights.items() if weight.grad is not None}


def results(model: HybridLM, ids: list[Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    row, cu_seqlens = pack(ids, "cuda")
    output = model(row, cu_seqlens=cu_seqlens, labels=row, output_logits=True)
    assert output.loss is not None and output.logits is not None
    output.loss.backward()
    return output.logits[0].cpu(), {key: p.grad.cpu() for key, p in model.named_parameters() if p.grad is not None}


@families
def test_float32_is_within_the_bounds_of_the_cpu(name: str) -> None:
    model, ids = small_model(name, **SIZES).cuda(), sequences()
    logits, gradients = results(model, ids)
    right, exact = exact_results(model, ids, torch.float64)
    assert distance(logits, right) <= LOGITS
    assert gradients.keys() == exact.keys()
    for key, gradient in exact.items():
        assert distance(gradients[key], gradient) <= GRADIENTS, key


@families
def test_bfloat16_is_as_near_to_float64_as_plain_torch(name: str) -> None:
    model, ids = small_model(name, torch.bfloat16, initializer_range=0.1, **SIZES).cuda(), sequences()
    logits, gradients = results(model, ids)
    right, exact = exact_results(model, ids, torch.float64)
    plain, _ = exact_results(model, ids, torch.bfloat16)
    assert distance(logits, right) <= MARGIN * distance(plain, right)
    assert gradients.keys() == exact.keys() and all(gradient.isfinite().all() for gradient in gradients.values())


@families
def test_cached_steps_are_those_of_the_whole_forward(name: str) -> None:
    """In float32: packed prompts, then a token at a time, and nothing is compiled after the first of them."""
    model = small_model(name, **SIZES).cuda().eval()
    texts = [row.tolist() for row in sequences((30, 26))]
    with torch.no_grad():
        whole = [model(torch.tensor([text], device="cuda")).logits[0] for text in texts]
        cache = model.new_cache(2)
        ids, cu_seqlens = pack([texts[0][:20], texts[1][:9]], "cuda")
        model(ids, cu_seqlens=cu_seqlens, cache=cache)
        decoder, compiled = model.decoder(cache), 0
        for t in range(6):
            logits = decoder([texts[0][20 + t], texts[1][9 + t]])
            assert distance(logits, torch.stack((whole[0][20 + t], whole[1][9 + t]))) <= LOGITS
            compiled = compilations() if t == 0 else compiled
    assert compilations() == compiled and decoder.captures == 1


@families
def test_a_patched_model(name: str) -> None:
    test_patch: Any = pytest.importorskip("tests.integrations.test_patch")
    pytest.importorskip("transformers")
    ids = torch.randint(1, 61, (2, 40), generator=torch.Generator().manual_seed(1))
    ours, gradients = test_patch.results(test_patch.patched(name).cuda(), input_ids=ids.cuda())
    theirs, expected = test_patch.results(test_patch.their_model(name), input_ids=ids)
    assert distance(ours.cpu(), theirs) <= LOGITS
    for key, gradient in expected.items():
        assert distance(gradients[key].cpu(), gradient) <= stated(
            "models", "| gradients of a patched model on a GPU, float32 |"
        ), key
