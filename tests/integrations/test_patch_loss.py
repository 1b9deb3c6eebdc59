"""`patch(model, loss=True)`: models with pictures, last matrices that have to be called, and what the report says."""

# ruff: noqa: F811  (fixtures are imported, and arguments have their names)

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint.integrations.transformers import patch, unpatch
from tests.integrations.test_patch import FOLDERS, _version, families, ids, results, their_model  # noqa: F401
from tests.integrations.test_positions import PACKED
from tests.models.small import GRADIENTS, LOGITS, distance

PICTURE, BEGIN, END = 3, 5, 6
"""Ids of a picture's tokens, and of those around them."""

VISION = {
    "depth": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "intermediate_size": 40,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 24,
    "num_position_embeddings": 16,
}

with_pictures = pytest.mark.parametrize("name", ("qwen3_5", "qwen3_5_moe"))


def model_of_pictures(name: str) -> Any:
    """A small model of pictures and text, whose text model is the small one of its family."""
    text = their_model(name)
    modeling: Any = import_module(f"transformers.models.{FOLDERS[name]}.modeling_{FOLDERS[name]}")
    kind = getattr(modeling, type(text).__name__.replace("ForCausalLM", "ForConditionalGeneration"))
    sizes = text.config.to_dict()
    sizes["rope_parameters"] = sizes["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    torch.manual_seed(0)
    model = kind(
        kind.config_class(
            text_config=sizes, vision_config=VISION, image_token_id=PICTURE, video_token_id=4,
            vision_start_token_id=BEGIN, vision_end_token_id=END,
        )
    )  # fmt: skip
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    if hasattr(text.config, "num_experts"):
        model.set_experts_implementation("eager")
    return model


def batch(ids: Tensor, pictures: bool) -> dict[str, Any]:
    """Rows of text, with a picture of four tokens in each or without."""
    row = ids.clamp(min=7)
    if not pictures:
        return {"input_ids": row}
    row[:, 4], row[:, 5:9], row[:, 9] = BEGIN, PICTURE, END
    pixels = torch.randn(2 * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(2))
    grid = torch.tensor([[1, 4, 4]]).expand(2, -1)
    return {
        "input_ids": row,
        "pixel_values": pixels,
        "image_grid_thw": grid,
        "mm_token_type_ids": (row == PICTURE).int(),
    }


@with_pictures
@pytest.mark.parametrize("pictures", (False, True), ids=("text", "pictures"))
def test_a_model_of_pictures_has_the_loss_without_logits(name: str, pictures: bool, ids: Tensor) -> None:
    theirs, ours = model_of_pictures(name).train(), model_of_pictures(name).train()
    report = patch(ours, loss=True, verbose=False)
    assert all(not line.reason for line in report.replacements)
    assert [line.module for line in report.replacements if line.operations == "linear_cross_entropy"] == [
        type(ours).__name__
    ]
    inputs = batch(ids, pictures)
    expected, output = (model(labels=ids, use_cache=False, **inputs) for model in (theirs, ours))
    assert type(output) is type(expected) and output.logits is None
    assert ("rope_deltas" in output) == pictures
    assert distance(output.loss, expected.loss) <= 2 * LOGITS
    expected.loss.backward()
    output.loss.backward()
    for (key, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None), key
        if mine.grad is not None and float(other.grad.norm()) > 0:
            assert distance(mine.grad, other.grad) <= 2 * GRADIENTS, key
    ours.eval(), theirs.eval()
    with torch.no_grad():
        again, right = (model(use_cache=False, **inputs).logits for model in (ours, theirs))
    assert distance(again, right) <= 2 * LOGITS, "an evaluation has logits"


@with_pictures
def test_the_loss_of_packed_texts_of_a_model_of_pictures(name: str, ids: Tensor) -> None:
    model = model_of_pictures(name).train()
    model.config.text_config.output_router_logits = False
    row = batch(ids[:1], False)["input_ids"]
    alone = [
        model(input_ids=part, labels=part, use_cache=False).loss * (part.shape[1] - 1)
        for part in row.split((13, 27), 1)
    ]
    patch(model, loss=True, verbose=False)
    packed = model(input_ids=row, labels=row, position_ids=PACKED, use_cache=False).loss
    assert distance(packed, sum(alone) / 38) <= 2 * LOGITS


def test_positions_of_packed_pictures_do_not_reach_their_tower(ids: Tensor) -> None:
    """Bounds of texts are no bounds of pictures, which the tower has of its own."""
    model = model_of_pictures("qwen3_5").train()
    patch(model, loss=True, verbose=False)
    inputs = batch(ids, True)
    inputs = {key: value[:16] if key == "pixel_values" else value[:1] for key, value in inputs.items()}
    output = model(labels=ids[:1], position_ids=PACKED[None].expand(4, -1, -1), use_cache=False, **inputs)
    assert output.logits is None and bool(output.loss.isfinite())


def loss_line(report: Any) -> Any:
    (line,) = [line for line in report.replacements if "ForCausalLM" in line.module]
    return line


@families
def test_the_report_names_a_last_matrix_that_has_to_be_called(name: str, ids: Tensor) -> None:
    """Training then returns logits, as before."""
    called: list[str] = []
    for change, words in (
        (lambda model: model.lm_head.register_forward_hook(lambda *_: called.append("lm_head")), "has hooks"),
        (
            lambda model: setattr(model, "lm_head", nn.Sequential(model.lm_head)),
            "of the class torch.nn.modules.container.Sequential",
        ),
        (lambda model: setattr(model.lm_head, "forward", model.lm_head.forward), "a forward of its own"),
        (lambda model: setattr(model, "loss_function", lambda *_, **__: torch.tensor(1.0)), "loss_function is another"),
    ):
        model = their_model(name).train()
        change(model)
        line = loss_line(patch(model, loss=True, verbose=False))
        assert words in line.reason
        assert model(input_ids=ids, labels=ids, use_cache=False).logits is not None
        unpatch(model)
    assert called == ["lm_head"]


@pytest.mark.parametrize("options", ({"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}))
def test_the_report_names_adapters_of_the_last_matrix(options: dict[str, Any], ids: Tensor) -> None:
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        their_model("qwen3_5_moe"), peft.LoraConfig(**{"r": 2, "target_modules": ["q_proj"]} | options)
    )
    assert "and has to be called" in loss_line(patch(wrapped, loss=True, verbose=False)).reason
    assert wrapped.train()(input_ids=ids, labels=ids, use_cache=False).logits is not None


@families
@pytest.mark.parametrize("patch_first", (True, False))
def test_a_model_on_several_devices_has_the_loss_without_logits(name: str, patch_first: bool, ids: Tensor) -> None:
    """Hooks of accelerate at the last matrix move and load, and are no reason for logits."""
    accelerate = pytest.importorskip("accelerate")
    model = their_model(name).train()
    expected = results(their_model(name).train(), input_ids=ids)[1]
    if patch_first:
        patch(model, loss=True, verbose=False)
    parts = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"]
    parts += [f"model.layers.{layer}" for layer in range(len(model.model.layers))]
    model = accelerate.dispatch_model(model, dict.fromkeys(parts, "cpu"), force_hooks=True, main_device="cpu")
    if not patch_first:
        assert not loss_line(patch(model, loss=True, verbose=False)).reason
    output = model(input_ids=ids, labels=ids, use_cache=False)
    assert output.logits is None
    output.loss.backward()
    for key, parameter in model.named_parameters():
        assert distance(parameter.grad, expected[key]) <= 2 * GRADIENTS, key
