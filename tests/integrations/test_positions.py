"""Packed sequences and padding in patched models: what position_ids, masks and caches say together."""

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.integrations.transformers import patch
from tests.integrations.test_patch import _version, families, ids, patched, their_model  # noqa: F401  (fixtures, too)
from tests.models.small import LOGITS, distance

PACKED = torch.cat((torch.arange(13), torch.arange(27)))[None]


@pytest.mark.parametrize("options", ({"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [1, 2]}))
def test_packed_sequences_of_a_model_whose_embedding_adapters_hold(options: dict[str, Any], ids: Tensor) -> None:  # noqa: F811
    """The embedding stays as it is, and the report says so; bounds are read all the same."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], **options)
    model = peft.get_peft_model(their_model("qwen3_5"), settings).eval()
    report = patch(model, verbose=False)
    with torch.no_grad():
        packed = model(input_ids=ids[:1], position_ids=PACKED, use_cache=False).logits
        assert distance(packed[:, 13:], model(input_ids=ids[:1, 13:], use_cache=False).logits) <= 2 * LOGITS
    assert any("embedding is of another class" in row.reason for row in report.replacements)


@families
def test_a_mask_with_a_hole_packs_nothing(name: str, ids: Tensor) -> None:  # noqa: F811
    """One row with it is what the same row is beside another; in training, too."""
    model = patched(name).eval()
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[0, 4:6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        both = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[:1]
        alone = model(input_ids=ids[:1], attention_mask=mask[:1], position_ids=positions[:1], use_cache=False).logits
        assert distance(alone[mask[:1] == 1], both[mask[:1] == 1]) <= 2 * LOGITS


@pytest.mark.parametrize("side", ("left", "right"))
def test_a_padded_row_fills_a_cache(side: str, ids: Tensor) -> None:  # noqa: F811
    model, mask = patched("qwen3_5").eval(), torch.ones(1, 40, dtype=torch.int64)
    mask[0, slice(0, 11) if side == "left" else slice(29, 40)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(input_ids=ids[:1], attention_mask=mask, position_ids=positions, use_cache=True)
    assert output.past_key_values is not None and output.past_key_values.get_seq_length() == 40


@families
def test_packed_rows_are_refused_with_an_empty_cache_and_with_a_mask_that_hides_nothing(
    name: str,
    ids: Tensor,  # noqa: F811
) -> None:
    from transformers import DynamicCache

    model = patched(name).eval()
    with torch.no_grad():
        with pytest.raises(adjoint.Unsupported, match="use_cache=False"):
            model(input_ids=ids[:1], position_ids=PACKED, past_key_values=DynamicCache(config=model.config))
        with pytest.raises(adjoint.Unsupported, match="lay the rows one after the other"):
            model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=PACKED.expand(2, -1),
                use_cache=False,
            )
        masked = model(input_ids=ids[:1], attention_mask=torch.ones(1, 40), position_ids=PACKED, use_cache=False)
        alone = model(input_ids=ids[:1, 13:], use_cache=False)
    assert distance(masked.logits[:, 13:], alone.logits) <= 2 * LOGITS


def test_dropout_in_attention_needs_positions_of_packed_sequences(ids: Tensor) -> None:  # noqa: F811
    """Transformers' attention, which has dropout, knows no bounds but these."""
    model = patched("qwen3_5").train()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 1e-12
    bounds = torch.tensor([0, 13, 40], dtype=torch.int32)
    with torch.no_grad():
        with pytest.raises(adjoint.Unsupported, match="position_ids that begin again"):
            model(input_ids=ids[:1], cu_seq_lens_q=bounds, use_cache=False)
        told = model(input_ids=ids[:1], cu_seq_lens_q=bounds, position_ids=PACKED, use_cache=False).logits
        alone = model(input_ids=ids[:1, 13:], use_cache=False).logits
    assert distance(told[:, 13:], alone) <= 2 * LOGITS


@families
def test_other_losses_are_as_before(name: str, ids: Tensor) -> None:  # noqa: F811
    """`loss=True` takes the place of transformers' own loss alone, with its own ignore_index."""
    theirs, ours = their_model(name).train(), their_model(name).train()
    patch(ours, loss=True, verbose=False)
    labels = ids.clone()
    labels[:, 20:] = 0
    for options in ({"ignore_index": 0}, {"ignore_index": -100}):
        right = theirs(input_ids=ids, labels=labels, use_cache=False, **options).loss
        assert distance(ours(input_ids=ids, labels=labels, use_cache=False, **options).loss, right) <= 2 * LOGITS
    ours.loss_function = lambda *_, **__: torch.tensor(42.0)
    assert abs(ours(input_ids=ids, labels=labels, use_cache=False).loss.item() - 42) < 2  # with the routers'
