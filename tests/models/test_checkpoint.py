"""Checkpoint folders: what is saved is read, in every layout that checkpoints have, and what is wrong is named."""

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.models import HybridConfig, HybridLM, safetensors
from tests.models.small import CONFIGS, small_model
from tests.models.test_parity import their_class

families = pytest.mark.parametrize("name", CONFIGS)


def same(mine: HybridLM, other: HybridLM) -> bool:
    pairs = zip(mine.named_parameters(), other.named_parameters(), strict=True)
    return all(a == b and torch.equal(x, y) and x.dtype == y.dtype for (a, x), (b, y) in pairs)


def weights_of(model: HybridLM) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def write_folder(folder: Path, weights: dict[str, Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.write(folder / "model.safetensors", weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@families
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.float64), ids=str)
@pytest.mark.parametrize("limit", (2**30, 9000), ids=("one file", "shards"))
def test_a_round_trip_keeps_every_bit(name: str, dtype: torch.dtype, limit: int, tmp_path: Path) -> None:
    model = small_model(name, dtype)
    model.save_pretrained(tmp_path, max_shard_bytes=limit)
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (limit > 9000) and (tmp_path / "model.safetensors.index.json").exists() == (
        limit == 9000
    )
    opened = HybridLM.from_pretrained(tmp_path)
    assert same(opened, model) and opened.dtype == dtype
    assert opened.config == HybridConfig.from_dict(model.config.to_dict()) and opened.left_out == {}
    assert (opened.lm_head.weight is opened.model.embed_tokens.weight) == model.config.tie_word_embeddings
    ids = torch.arange(1, 20)[None]
    assert torch.equal(opened(ids).logits, model(ids).logits)


def test_saving_again_leaves_nothing_of_the_older_checkpoint(tmp_path: Path) -> None:
    small_model("qwen3_5").save_pretrained(tmp_path, max_shard_bytes=9000)
    model = small_model("qwen3_5_moe")
    model.save_pretrained(tmp_path)
    assert same(HybridLM.from_pretrained(tmp_path), model)
    model.save_pretrained(tmp_path, max_shard_bytes=9000)
    assert same(HybridLM.from_pretrained(tmp_path), model)
    assert not list(tmp_path.glob("*.unfinished"))
    shards = len(list(tmp_path.glob("*.safetensors")))
    model.save_pretrained(tmp_path, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) < shards, "other numbers of shards have other names"
    model.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]


def test_one_file_goes_before_an_index(tmp_path: Path) -> None:
    """As in transformers: so a folder that has both is the same model here and there."""
    model, other = small_model("qwen3_5"), small_model("qwen3_5")
    model.save_pretrained(tmp_path, max_shard_bytes=9000)
    with torch.no_grad():
        other.model.norm.weight.add_(1)
    safetensors.write(tmp_path / "model.safetensors", weights_of(other), {"format": "pt"})
    assert same(HybridLM.from_pretrained(tmp_path), other)
    theirs = their_class("qwen3_5").from_pretrained(tmp_path)
    assert torch.equal(theirs.model.norm.weight, other.model.norm.weight)


@pytest.mark.parametrize("prefix", ("model.language_model.", "language_model.model.", "model.", ""))
def test_prefixes_and_nested_configurations(prefix: str, tmp_path: Path) -> None:
    model = small_model("qwen3_5_moe")
    named = {
        name.replace("model.", prefix, 1) if name.startswith("model.") else name: tensor
        for name, tensor in weights_of(model).items()
    }
    config = {"model_type": "qwen3_5_moe", "text_config": model.config.to_dict(), "vision_config": {"depth": 1}}
    assert same(HybridLM.from_pretrained(write_folder(tmp_path, named, config)), model)


@pytest.mark.parametrize("name", ("qwen3_next", "qwen3_5_moe"))
def test_experts_one_by_one(name: str, tmp_path: Path) -> None:
    model, parts = small_model(name), {}
    for key, tensor in weights_of(model).items():
        prefix, _, matrix = key.rpartition(".")
        for expert, rows in enumerate(tensor) if prefix.endswith("experts") else ():
            halves = {"gate_proj": rows[: len(rows) // 2], "up_proj": rows[len(rows) // 2 :]}
            pieces = {"down_proj": rows} if matrix == "down_proj" else halves
            parts |= {f"{prefix}.{expert}.{piece}.weight": value.clone() for piece, value in pieces.items()}
        if not prefix.endswith("experts"):
            parts[key] = tensor
    folder = write_folder(tmp_path, parts, model.config.to_dict())
    assert same(HybridLM.from_pretrained(folder), model)
    del parts[f"model.layers.{3}.mlp.experts.2.up_proj.weight"]
    with pytest.raises(adjoint.ArgumentError, match=r"no tensor model\.layers\.3\.mlp\.experts\.2\.up_proj\.weight"):
        HybridLM.from_pretrained(write_folder(tmp_path, parts, model.config.to_dict()))


def test_vision_and_multi_token_prediction_are_left_out_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_model("qwen3_5")
    others = {"model.visual.blocks.0.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2), "mtp.norm": torch.ones(1)}
    folder = write_folder(tmp_path, weights_of(model) | others, model.config.to_dict())
    with caplog.at_level(logging.WARNING, "adjoint.models"):
        opened = HybridLM.from_pretrained(folder)
    assert same(opened, model)
    assert opened.left_out == {
        "vision": ("model.visual.blocks.0.weight",),
        "multi-token prediction": ("mtp.fc.weight", "mtp.norm"),
    }
    assert "1 tensors of vision are left out, model.visual.blocks.0.weight first" in caplog.text
    assert "2 tensors of multi-token prediction are left out, mtp.fc.weight first" in caplog.text


def test_stop_tokens_of_generation_config(tmp_path: Path) -> None:
    """A chat model ends its turn with a token that config.json does not have."""
    small_model("qwen3_5").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5], "top_k": 20}))
    model = HybridLM.from_pretrained(tmp_path)
    assert model.config.stop_tokens == (7, 5)
    model.save_pretrained(tmp_path / "again")
    assert HybridLM.from_pretrained(tmp_path / "again").config.stop_tokens == (7, 5)
    (tmp_path / "generation_config.json").write_text("{}")
    assert HybridLM.from_pretrained(tmp_path).config.stop_tokens == small_model("qwen3_5").config.stop_tokens
    for text, words in (("{", "cannot be read as JSON"), ('{"eos_token_id": "x"}', "eos_token_id must be a token id")):
        (tmp_path / "generation_config.json").write_text(text)
        with pytest.raises(adjoint.ArgumentError, match=f"generation_config.json.*{words}"):
            HybridLM.from_pretrained(tmp_path)


def test_a_head_beside_a_tied_embedding_is_the_embedding(tmp_path: Path) -> None:
    model = small_model("qwen3_5")
    head = {"lm_head.weight": model.lm_head.weight.detach().clone()}
    assert same(
        HybridLM.from_pretrained(write_folder(tmp_path, weights_of(model) | head, model.config.to_dict())), model
    )


def test_a_head_of_its_own_is_kept_whatever_the_configuration_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers: a checkpoint that has both, with different values, was trained with both."""
    model = small_model("qwen3_5", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    tied = model.config.to_dict() | {"tie_word_embeddings": True}
    again = HybridLM.from_pretrained(write_folder(tmp_path, weights_of(model), tied))
    assert same(again, model) and not again.config.tie_word_embeddings and "lm_head.weight" in caplog.text


def test_dtypes_and_devices(tmp_path: Path) -> None:
    model = small_model("qwen3_5")
    model.save_pretrained(tmp_path)
    half = HybridLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(half.lm_head.weight, model.lm_head.weight.bfloat16())
    assert all(p.dtype == torch.bfloat16 and p.requires_grad for p in half.parameters())
    meta = HybridLM.from_pretrained(tmp_path, device="meta")
    assert all(p.device.type == "meta" for p in meta.parameters())
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "float16"}))
    assert HybridLM.from_pretrained(tmp_path).dtype == torch.float16
    with pytest.raises(adjoint.ArgumentError, match="dtype must be one of float64"):
        HybridLM.from_pretrained(tmp_path, dtype=torch.int8)
    with pytest.raises(adjoint.ArgumentError, match="meta device"):
        meta.save_pretrained(tmp_path)


def test_only_one_tensor_is_mapped_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read is copied into the parameter and let go: the checkpoint is never held beside the model."""
    model = small_model("qwen3_5_moe")
    model.save_pretrained(tmp_path)
    mapped: list[int] = []
    plain = safetensors.mmap.mmap

    def mapping(descriptor: int, length: int, *arguments: Any, **keywords: Any) -> Any:
        mapped.append(length)
        return plain(descriptor, length, *arguments, **keywords)

    monkeypatch.setattr(safetensors.mmap, "mmap", mapping)
    HybridLM.from_pretrained(tmp_path)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert len(mapped) == len(list(model.parameters()))
    assert max(mapped) <= largest + safetensors.mmap.ALLOCATIONGRANULARITY


# --------------------------------------------------------------------------------------- what is wrong


def folder_of(model: HybridLM, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _cut_in_the_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:50])


def _empty(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _no_json(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", 4) + b"{{{{" + b"0" * 10)


def _wrong_size(folder: Path) -> None:
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [3, 3], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 4)


def _other_dtype(folder: Path) -> None:
    header = json.dumps({"lm_head.weight": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 4)


def _no_offsets(folder: Path) -> None:
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [1]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 4)


def _header(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 8)


def _dtype(kind: object) -> bytes:
    return json.dumps({"lm_head.weight": {"dtype": kind, "shape": [1], "data_offsets": [0, 4]}}).encode()


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _bad_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


SHARD = "model-00001-of-00001.safetensors"


def _index(folder: Path, text: str) -> None:
    """An index beside the weights, which have the name of a shard."""
    (folder / "model.safetensors").rename(folder / SHARD)
    (folder / "model.safetensors.index.json").write_text(text)


def _weight_map(folder: Path, where: object) -> None:
    _index(folder, json.dumps({"weight_map": where}))


def _another_shard(folder: Path, tensors: dict[str, Tensor]) -> None:
    """A second shard, of which the index names one tensor."""
    other = "model-00002-of-00002.safetensors"
    safetensors.write(folder / other, tensors)
    where = dict.fromkeys(safetensors.read_header(folder / "model.safetensors"), SHARD)
    _weight_map(folder, where | {next(iter(tensors)): other})


def _exchanged(folder: Path, changes: dict[str, Tensor | None]) -> None:
    weights = weights_of(small_model("qwen3_5_moe")) | changes  # type: ignore[operator]
    safetensors.write(folder / "model.safetensors", {name: x for name, x in weights.items() if x is not None})


def _other_config(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _changed_header(folder: Path, change: Callable[[dict[str, Any]], str]) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = change(json.loads(data[8 : 8 + length])).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def _displaced(header: dict[str, Any]) -> dict[str, Any]:
    """A norm at the place of another."""
    place = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    return header["model.norm.weight"] | {"data_offsets": place}  # type: ignore[no-any-return]


def _overlapping(header: dict[str, Any]) -> str:
    return json.dumps(header | {"model.norm.weight": _displaced(header)})


def _named_twice(header: dict[str, Any]) -> str:
    """JSON takes the last of two; what the first names is then nobody's."""
    return json.dumps(header)[:-1] + f', "model.norm.weight": {json.dumps(_displaced(header))}}}'


def _more_bytes(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + bytes(100))


def _broken_link(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.unlink()
    path.symlink_to(folder / "blobs")


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "cut": (_cut, adjoint.ArgumentError, r"model\.safetensors is truncated: tensor \S+ ends at byte"),
    "cut in the header": (_cut_in_the_header, adjoint.ArgumentError, r"model\.safetensors is truncated"),
    "empty": (_empty, adjoint.ArgumentError, r"model\.safetensors is truncated"),
    "no json": (_no_json, adjoint.ArgumentError, r"model\.safetensors is no safetensors file"),
    "wrong size": (_wrong_size, adjoint.ArgumentError, r"tensor lm_head\.weight, F32 of shape \(3, 3\)"),
    "no offsets": (_no_offsets, adjoint.ArgumentError, r"tensor lm_head\.weight has no right"),
    "list of dtypes": (lambda f: _header(f, _dtype(["F32"])), adjoint.ArgumentError, r"lm_head\.weight has no right"),
    "no dtype there": (
        lambda f: _header(f, _dtype(None)),
        adjoint.ArgumentError,
        r"lm_head\.weight has no right",
    ),
    "overlapping": (
        lambda f: _changed_header(f, _overlapping),
        adjoint.ArgumentError,
        r"and tensor model\.\S+ overlap",
    ),
    "named twice": (
        lambda f: _changed_header(f, _named_twice),
        adjoint.ArgumentError,
        r"and tensor model\.\S+ overlap",
    ),
    "more bytes": (
        _more_bytes,
        adjoint.ArgumentError,
        r"model\.safetensors is no right .*: it has 100 bytes behind tensor",
    ),
    "broken link": (
        _broken_link,
        adjoint.ArgumentError,
        r"model\.safetensors is a link to .*blobs, which is not there",
    ),
    "angles of their own": (
        lambda f: _other_config(f, {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}),
        adjoint.Unsupported,
        r"rope_parameters must be those of all layers, got some of their own for full_attention",
    ),
    "nested": (lambda f: _header(f, b"[" * 10**5), adjoint.ArgumentError, r"no safetensors file: its header is nested"),
    "text for a text model": (
        lambda f: _other_config(f, {"text_config": "x", "vocab_size": 60}),
        adjoint.ArgumentError,
        r"must have shape \(60, 24\)",
    ),
    "no weights": (_no_weights, adjoint.ArgumentError, r"neither model\.safetensors nor .*pytorch_model\.bin"),
    "no config": (_no_config, adjoint.ArgumentError, r"there is no file .*config\.json"),
    "bad config": (_bad_config, adjoint.ArgumentError, r"config\.json cannot be read"),
    "bad index": (lambda f: _index(f, "{}"), adjoint.ArgumentError, r"index\.json has no weight_map"),
    "index of no object": (lambda f: _index(f, "[]"), adjoint.ArgumentError, r"index\.json must hold a JSON object"),
    "nested index": (lambda f: _index(f, "[" * 10**5), adjoint.ArgumentError, r"index\.json cannot be read as JSON"),
    "index to no name": (
        lambda f: _weight_map(f, {"model.norm.weight": 5}),
        adjoint.ArgumentError,
        r"index\.json has no weight_map",
    ),
    "missing shard": (
        lambda f: _weight_map(f, {"model.norm.weight": "model-00001-of-00002.safetensors"}),
        adjoint.ArgumentError,
        r"no file .*model-00001-of-00002\.safetensors",
    ),
    "tensor not in shard": (
        lambda f: _weight_map(f, {"somewhere.else": SHARD}),
        adjoint.ArgumentError,
        r"00001\.safetensors has no tensor somewhere\.else",
    ),
    "twice over shards": (
        lambda f: _another_shard(f, {"mtp.norm.weight": torch.ones(2), "model.norm.weight": torch.ones(24)}),
        adjoint.ArgumentError,
        r"model\.norm\.weight more than once: .* of model-00001-\S+, model\.norm\.weight of model-00002-",
    ),
    "unknown in a shard": (
        lambda f: _another_shard(f, {"mtp.norm.weight": torch.ones(2), "model.other": torch.ones(24)}),
        adjoint.ArgumentError,
        r"00002\.safetensors: tensor model\.other is none of",
    ),
    "nested config": (
        lambda f: (f / "config.json").write_text("[" * 10**5),
        adjoint.ArgumentError,
        r"config\.json cannot be read as JSON",
    ),
    "fp8 all over": (
        lambda f: _other_config(f, {"dtype": "float8_e4m3fn"}),
        adjoint.ArgumentError,
        r"dtype must be one of float64, float32, bfloat16, float16 of torch, got torch\.float8_e4m3fn",
    ),
    "a size that no layer takes": (
        lambda f: _other_config(f, {"linear_conv_kernel_dim": 9}),
        adjoint.ArgumentError,
        r"config\.json: GatedDeltaNet: conv_width must be from 1 to 8, got 9",
    ),
    "padding past the vocabulary": (
        lambda f: _other_config(f, {"pad_token_id": 1000}),
        adjoint.ArgumentError,
        r"config\.json: Embedding: padding_idx must be within the 61 rows",
    ),
    "missing tensor": (
        lambda f: _exchanged(f, {"model.layers.0.linear_attn.A_log": None}),
        adjoint.ArgumentError,
        r"has no tensor model\.layers\.0\.linear_attn\.A_log",
    ),
    "missing head": (lambda f: _exchanged(f, {"lm_head.weight": None}), adjoint.ArgumentError, r"lm_head\.weight"),
    "unknown tensor": (
        lambda f: _exchanged(f, {"model.layers.0.self_attn.q_proj.weight": torch.ones(2)}),
        adjoint.ArgumentError,
        r"model\.safetensors: tensor model\.layers\.0\.self_attn\.q_proj\.weight is none of",
    ),
    "another shape": (
        lambda f: _exchanged(f, {"model.norm.weight": torch.ones(5)}),
        adjoint.ArgumentError,
        r"tensor model\.norm\.weight must have shape \(24,\), of model\.norm\.weight, got \(5,\)",
    ),
    "twice": (
        lambda f: _exchanged(f, {"model.language_model.norm.weight": torch.ones(24)}),
        adjoint.ArgumentError,
        r"model\.norm\.weight more than once",
    ),
    "an expert too many": (
        lambda f: _exchanged(f, {"model.layers.0.mlp.experts.6.up_proj.weight": torch.ones(10, 24)}),
        adjoint.ArgumentError,
        r"of expert 6, and there are 6",
    ),
    "fp8": (
        lambda f: _exchanged(f, {"model.norm.weight": torch.ones(24).to(torch.float8_e4m3fn)}),
        adjoint.Unsupported,
        r"tensor model\.norm\.weight \(F8_E4M3\) is of FP8",
    ),
    "fp8 scales": (
        lambda f: _exchanged(f, {"model.norm.weight_scale_inv": torch.ones(1)}),
        adjoint.Unsupported,
        r"model\.norm\.weight_scale_inv .* is of FP8",
    ),
    "whole numbers": (
        lambda f: _exchanged(f, {"model.norm.weight": torch.ones(24, dtype=torch.int64)}),
        adjoint.ArgumentError,
        r"model\.safetensors: tensor model\.norm\.weight must hold floating numbers, got I64",
    ),
    "another dtype": (
        _other_dtype,
        adjoint.ArgumentError,
        r"tensor lm_head\.weight must hold floating numbers, got F4",
    ),
    "quantized": (
        lambda f: _other_config(f, {"quantization_config": {"quant_method": "fp8"}}),
        adjoint.Unsupported,
        r"config\.json: .*fp8",
    ),
    "another family": (
        lambda f: _other_config(f, {"model_type": "llama"}),
        adjoint.Unsupported,
        r"config\.json.*llama",
    ),
    "another size": (
        lambda f: _other_config(f, {"vocab_size": 60}),
        adjoint.ArgumentError,
        r"must have shape \(60, 24\), of .*, got \(61, 24\)",
    ),
    "no dtype": (lambda f: _other_config(f, {"dtype": "float7"}), adjoint.ArgumentError, r"no dtype 'float7'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, tmp_path: Path) -> None:
    spoil, error, words = WRONG[case]
    spoil(folder_of(small_model("qwen3_5_moe"), tmp_path))
    with pytest.raises(error, match=words):
        HybridLM.from_pretrained(tmp_path)


def test_where_nothing_can_be_saved_is_named(tmp_path: Path) -> None:
    model, path = small_model("qwen3_5"), tmp_path / "file"
    path.write_text("")
    with pytest.raises(adjoint.ArgumentError, match="file is a file; a checkpoint is a folder"):
        model.save_pretrained(path)
    with pytest.raises(adjoint.ArgumentError, match="max_shard_bytes must be an integer, got '5GB'"):
        model.save_pretrained(tmp_path / "folder", max_shard_bytes="5GB")  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------- the file format


def test_odd_tensors_and_offsets(tmp_path: Path) -> None:
    """Empty ones, scalars, views, and bytes that begin at no multiple of the element's size."""
    tensors = {
        "flag": torch.tensor(True),
        "odd": torch.arange(3, dtype=torch.uint8),
        "none": torch.empty(0, 4),
        "view": torch.arange(12.0).view(3, 4).T[1:],
        "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    }
    path = tmp_path / "odd.safetensors"
    safetensors.write(path, tensors, {"format": "pt"})
    entries = safetensors.read_header(path)
    assert list(entries) == list(tensors)
    for name, tensor in tensors.items():
        target = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        entries[name].copy_to(target)
        assert torch.equal(target, tensor), name
    theirs = pytest.importorskip("safetensors.torch")
    for name, tensor in theirs.load_file(path).items():
        assert torch.equal(tensor, tensors[name])
    theirs.save_file({name: x.contiguous() for name, x in tensors.items()}, path)
    assert {name: entry.shape for name, entry in safetensors.read_header(path).items()} == {
        name: tuple(x.shape) for name, x in tensors.items()
    }


def test_a_write_that_fails_leaves_the_older_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.write(path, {"x": torch.ones(3)})
    before = path.read_bytes()
    with pytest.raises(NotImplementedError):
        safetensors.write(path, {"x": torch.ones(3, device="meta")})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_folders_and_devices_that_are_none_are_named(tmp_path: Path) -> None:
    model = small_model("qwen3_5")
    model.save_pretrained(tmp_path)
    with pytest.raises(adjoint.ArgumentError, match="from_pretrained: folder must be a path, got NoneType"):
        HybridLM.from_pretrained(None)  # type: ignore[arg-type]
    with pytest.raises(adjoint.ArgumentError, match="save_pretrained: folder must be a path, got int"):
        model.save_pretrained(5)  # type: ignore[arg-type]
    with pytest.raises(adjoint.ArgumentError, match=r"nor a folder Qwen/Qwen3\.5-4B; .* nothing is downloaded"):
        HybridLM.from_pretrained("Qwen/Qwen3.5-4B")
    with pytest.raises(adjoint.ArgumentError, match="is no folder"):
        HybridLM.from_pretrained("x" * 5000)
    with pytest.raises(adjoint.ArgumentError, match="device 'cdu' is not there"):
        HybridLM.from_pretrained(tmp_path, device="cdu")
    with pytest.raises(adjoint.ArgumentError, match="meta device"):
        HybridLM(model.config, device="meta").generate([[1]], 2)
    with pytest.raises(adjoint.ArgumentError, match="cannot be made"):
        model.save_pretrained("/proc/there/is/none")


def test_the_folder_of_a_run_names_its_model(tmp_path: Path) -> None:
    small_model("qwen3_5").save_pretrained(tmp_path / "model")
    with pytest.raises(
        adjoint.ArgumentError, match=rf"no file {tmp_path}/config\.json; there is one in {tmp_path}/model"
    ):
        HybridLM.from_pretrained(tmp_path)


def test_labels_are_refused_before_a_cache_is_overwritten() -> None:
    model = small_model("qwen3_5")
    cache, ids = model.new_cache(1), torch.tensor([[1, 2, 3]])
    with torch.no_grad(), pytest.raises(adjoint.ArgumentError, match="labels must be -100 or from 0 to"):
        model(ids, labels=ids + 1000, cache=cache)
    assert cache.lengths == (0,)
