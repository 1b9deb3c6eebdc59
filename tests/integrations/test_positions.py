"""Packed sequences and padding in patched models: what position_ids, masks and caches say together."""

# ruff: noqa: F811  (fixtures are imported, and arguments have their names)

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.integrations.transformers import patch
from tests.integrations.test_patch import _version, families, ids, patched, their_model  # noqa: F401
from tests.models import oracle
from tests.models.small import CONFIGS, LOGITS, distance, small_model

PACKED = torch.cat((torch.arange(13), torch.arange(27)))[None]

PACKINGS = ("cu_seq_lens", "position_ids")


@families
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_sequences_do_not_see_each_other(name: str, packing: str, ids: Tensor) -> None:
    """Transformers' own path cannot: its fallback knows no packing."""
    sequences = [ids[0, :13], ids[0, 13:14], ids[0, 14:40]]
    bounds = torch.tensor([0, 13, 14, 40], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 26, "max_length_k": 26}
    positions = torch.cat([torch.arange(len(row)) for row in sequences])[None]
    inputs: dict[str, Any] = {"input_ids": ids[:1], "position_ids": positions}
    model = patched(name)
    output = model(**inputs, **(lengths if packing == "cu_seq_lens" else {}), use_cache=False)
    weights = {key: p.detach().double() for key, p in small_model(name).named_parameters()}
    right = torch.cat([oracle.logits_of(row, weights, CONFIGS[name])[0] for row in sequences])
    assert distance(output.logits[0], right) <= LOGITS
    with pytest.raises(adjoint.Unsupported, match="use_cache=False"):
        model(**inputs, **(lengths if packing == "cu_seq_lens" else {}), use_cache=True)


@families
@pytest.mark.parametrize("packing", PACKINGS)
def test_no_sequence_has_a_label_in_the_next(name: str, packing: str, ids: Tensor) -> None:
    """The loss of a training step: the mean over what each sequence predicts of itself."""
    model = their_model(name).train()
    model.config.output_router_logits = False
    row, inputs = ids[:1], {"position_ids": PACKED, "use_cache": False}
    if packing == "cu_seq_lens":
        inputs["cu_seq_lens_q"] = torch.tensor([0, 13, 40], dtype=torch.int32)
    alone = [model(part, labels=part).loss * (part.shape[1] - 1) for part in row.split((13, 27), 1)]
    patch(model, loss=True, verbose=False)
    assert distance(model(row, labels=row, **inputs).loss, sum(alone) / 38) <= 2 * LOGITS


@families
def test_positions_are_read_wherever_they_stand(name: str, ids: Tensor) -> None:
    """By name or by place; several rows that are packed are an error, as layers that recur take one."""
    model = patched(name).model
    positions = torch.cat((torch.arange(13), torch.arange(27)))[None]
    with torch.no_grad():
        named = model(input_ids=ids[:1], position_ids=positions).last_hidden_state
        assert torch.equal(model(ids[:1], None, positions).last_hidden_state, named)
        assert distance(named[:, 13:], model(ids[:1, 13:]).last_hidden_state) <= LOGITS
        with pytest.raises(adjoint.Unsupported, match="lay the rows one after the other"):
            model(ids, position_ids=positions.expand(2, -1))


@pytest.mark.parametrize("name", ("qwen3_5", "qwen3_5_moe"))
def test_positions_of_a_picture_are_no_bounds(name: str, ids: Tensor) -> None:
    """Three rows, in which a picture's tokens share a time; with the text's positions before them, four."""
    row, model = ids[:1], their_model(name).eval()
    time = torch.cat((torch.arange(10), torch.full((20,), 10), torch.arange(15, 25)))
    height, width = time.clone(), time.clone()
    height[10:30], width[10:30] = 10 + torch.arange(20) // 5, 10 + torch.arange(20) % 5
    three = torch.stack((time, height, width))[:, None]
    four = torch.cat((torch.arange(40)[None, None], three))
    with torch.no_grad():
        theirs = model(input_ids=row, position_ids=three, use_cache=False).logits
        patch(model, verbose=False)
        assert distance(model(input_ids=row, position_ids=three, use_cache=False).logits, theirs) <= 2 * LOGITS
        assert distance(model(input_ids=row, position_ids=four, use_cache=False).logits, theirs) <= 2 * LOGITS


@families
@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_of_the_only_row(name: str, side: str, ids: Tensor) -> None:
    """Its positions stand still in the padding, which is not taken for another sequence."""
    model, mask = patched(name).eval(), torch.ones(1, 40, dtype=torch.int64)
    mask[0, slice(0, 11) if side == "left" else slice(29, 40)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(input_ids=ids[:1], attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=ids[:1, mask[0] == 1], use_cache=False).logits
    assert distance(padded[:, mask[0] == 1], alone) <= 2 * LOGITS


@families
@pytest.mark.parametrize("side", ("left", "right"))
def test_padding_changes_nothing(name: str, side: str, ids: Tensor) -> None:
    model = patched(name).eval()
    mask = torch.ones_like(ids)
    mask[1, slice(0, 11) if side == "left" else slice(29, 40)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[
            1, mask[1] == 1
        ]
        alone = model(input_ids=ids[1:, mask[1] == 1], use_cache=False).logits[0]
    assert distance(padded, alone) <= 2 * LOGITS


@pytest.mark.parametrize("options", ({"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [1, 2]}))
def test_packed_sequences_of_a_model_whose_embedding_adapters_hold(options: dict[str, Any], ids: Tensor) -> None:
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
def test_a_mask_with_a_hole_packs_nothing(name: str, ids: Tensor) -> None:
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
def test_a_padded_row_fills_a_cache(side: str, ids: Tensor) -> None:
    model, mask = patched("qwen3_5").eval(), torch.ones(1, 40, dtype=torch.int64)
    mask[0, slice(0, 11) if side == "left" else slice(29, 40)] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(input_ids=ids[:1], attention_mask=mask, position_ids=positions, use_cache=True)
    assert output.past_key_values is not None and output.past_key_values.get_seq_length() == 40


@families
def test_packed_rows_are_refused_with_an_empty_cache_and_with_a_mask_that_hides_nothing(
    name: str,
    ids: Tensor,
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


@families
@pytest.mark.parametrize("implementation", ("eager", "sdpa"))
@pytest.mark.parametrize("positions", (None, PACKED))
def test_dropout_in_attention_of_packed_sequences(
    name: str, implementation: str, positions: Tensor | None, ids: Tensor
) -> None:
    """Transformers' attention, which has dropout, learns the bounds however they are told."""
    model = patched(name).train()
    model.config._attn_implementation = implementation
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 1e-12
    bounds = torch.tensor([0, 13, 40], dtype=torch.int32)
    with torch.no_grad():
        told = model(input_ids=ids[:1], cu_seq_lens_q=bounds, position_ids=positions, use_cache=False).logits
        alone = model(input_ids=ids[:1, 13:], use_cache=False).logits
    assert distance(told[:, 13:], alone) <= 2 * LOGITS, "rotary positions that go on have the same differences"


def test_dropout_in_attention_that_knows_no_bounds_is_an_error(ids: Tensor) -> None:
    model = patched("qwen3_5").train()
    model.config._attn_implementation = "flex_attention"
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1
    with pytest.raises(adjoint.Unsupported, match=r"need eager, sdpa or flash attention.*flex_attention"):
        model(input_ids=ids[:1], cu_seq_lens_q=torch.tensor([0, 13, 40], dtype=torch.int32), use_cache=False)


@families
@pytest.mark.parametrize("packing", PACKINGS)
def test_weights_of_attention_of_packed_sequences(name: str, packing: str, ids: Tensor) -> None:
    model = patched(name).eval()
    model.config._attn_implementation = "eager"
    told = {"cu_seq_lens_q": torch.tensor([0, 13, 40], dtype=torch.int32)} if packing == "cu_seq_lens" else {}
    with torch.no_grad():
        output = model(input_ids=ids[:1], position_ids=PACKED, use_cache=False, output_attentions=True, **told)
        plain = model(input_ids=ids[:1], position_ids=PACKED, use_cache=False, **told)
        parts = [model(input_ids=part, use_cache=False, output_attentions=True) for part in ids[:1].split((13, 27), 1)]
    (weights,) = output.attentions
    for own, part in zip((slice(0, 13), slice(13, 40)), parts, strict=True):
        assert distance(weights[..., own, own], part.attentions[0]) <= 2 * LOGITS
    assert not weights[..., 13:, :13].any() and not weights[..., :13, 13:].any(), "packed sequences see each other"
    assert distance(output.logits, plain.logits) <= 2 * LOGITS


@families
def test_bounds_make_no_cache_that_nobody_asked_for(name: str, ids: Tensor) -> None:
    """Configurations ask for a cache by default; a call that does is an error."""
    model, bounds = patched(name).eval(), torch.tensor([0, 13, 40], dtype=torch.int32)
    assert model.config.use_cache
    with torch.no_grad():
        for packed in ({"cu_seq_lens_q": bounds, "position_ids": PACKED}, {"position_ids": PACKED}):
            output = model(input_ids=ids[:1], **packed)
            assert output.past_key_values is None
            assert distance(output.logits[:, 13:], model(input_ids=ids[:1, 13:], use_cache=False).logits) <= 2 * LOGITS
        with pytest.raises(adjoint.Unsupported, match="pass use_cache=False"):
            model(input_ids=ids[:1], cu_seq_lens_q=bounds, use_cache=True)


@families
def test_a_mask_that_hides_tokens_beside_bounds_is_an_error(name: str, ids: Tensor) -> None:
    """Attention between bounds would see them."""
    model, bounds = patched(name).eval(), torch.tensor([0, 13, 40], dtype=torch.int32)
    model.config.output_router_logits = False  # the auxiliary loss takes masks of rows alone
    mask = torch.ones(1, 40, dtype=torch.int64)
    with torch.no_grad():
        right = model(input_ids=ids[:1], cu_seq_lens_q=bounds, use_cache=False).logits
        assert torch.equal(model(ids[:1], mask, cu_seq_lens_q=bounds, use_cache=False).logits, right)
        mask[0, :5] = 0
        for hides in (mask, torch.ones(1, 1, 40, 40, dtype=torch.bool)):
            with pytest.raises(adjoint.Unsupported, match="has no effect beside cu_seq_lens_q"):
                model(ids[:1], hides, cu_seq_lens_q=bounds, use_cache=False)


@families
def test_other_losses_are_as_before(name: str, ids: Tensor) -> None:
    """`loss=True` takes the place of transformers' own loss alone, with its own ignore_index."""
    theirs, ours = their_model(name).train(), their_model(name).train()
    patch(ours, loss=True, verbose=False)
    labels = ids.clone()
    labels[:, 20:] = 0
    for options in ({"ignore_index": 0}, {"ignore_index": -100}):
        right = theirs(input_ids=ids, labels=labels, use_cache=False, **options).loss
        assert distance(ours(input_ids=ids, labels=labels, use_cache=False, **options).loss, right) <= 2 * LOGITS
    for model in (theirs, ours):
        model.loss_function = lambda *_, **__: torch.tensor(42.0)
    losses = [model(input_ids=ids, labels=labels, use_cache=False).loss for model in (ours, theirs)]
    assert distance(*losses) <= 2 * LOGITS
