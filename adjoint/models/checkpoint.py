"""Checkpoint folders of Hugging Face: config.json, and safetensors files with or without an index."""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from adjoint.core.arguments import FLOATING, require_size
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.problem import short
from adjoint.models import safetensors
from adjoint.models.config import HybridConfig, read_json
from adjoint.models.safetensors import Entry

if TYPE_CHECKING:
    from adjoint.models.hybrid import HybridLM

_log = logging.getLogger("adjoint.models")

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")

_LEFT_OUT = {
    "vision": re.compile(r"(model\.)?visual\..*"),
    "multi-token prediction": re.compile(r"(model\.)?mtp\..*"),
}
"""Parts of a checkpoint that a text model does not have."""

_OF_ONE_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<matrix>gate|up|down)_proj\.weight")


class Part(NamedTuple):
    """A tensor of a file, and the part of a parameter that it fills: all of it, or an expert's rows."""

    entry: Entry
    expert: int | None = None
    half: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        if self.expert is None:
            return parameter
        matrix = parameter[self.expert]
        return matrix if self.half is None else matrix.unflatten(0, (2, -1))[self.half]


def load(
    kind: "type[HybridLM]",
    folder: Path,
    device: torch.device | str | int | None,
    dtype: torch.dtype | None,
) -> "HybridLM":
    """See `HybridLM.from_pretrained`: everything is checked by the files' headers before a tensor is read."""
    config = HybridConfig.from_folder(folder)
    dtype = _stated_dtype(folder) if dtype is None else dtype
    if dtype not in FLOATING:
        kinds = ", ".join(map(short, FLOATING))
        raise ArgumentError(f"HybridLM.from_pretrained: dtype must be one of {kinds} of torch, got {dtype!r}")
    entries = list(_entries(folder))
    if config.tie_word_embeddings and _has_another_head(entries):
        _log.warning("%s: lm_head.weight is not the embedding, though the configuration ties them: it is kept", folder)
        config = replace(config, tie_word_embeddings=False)
    try:
        model = kind(config, device="meta", dtype=dtype)
    except ArgumentError as error:
        raise ArgumentError(f"{folder / 'config.json'}: {error}") from None
    parts, left_out = _assign(model, folder, entries)
    device = _present("cpu" if device is None else device)
    for name, tensors in parts.items():
        module, _, own = name.rpartition(".")
        holder = model.get_submodule(module)
        meta = holder.get_parameter(own)
        parameter = torch.empty(meta.shape, dtype=dtype, device=device)
        if device.type != "meta":
            for part in tensors:
                part.entry.copy_to(part.of(parameter))
        setattr(holder, own, nn.Parameter(parameter, requires_grad=meta.requires_grad))
    model.tie_weights()
    for reason, names in left_out.items():
        _log.warning("%s: %d tensors of %s are left out, %s first", folder, len(names), reason, names[0])
    model.left_out = {reason: tuple(names) for reason, names in left_out.items()}
    return model


def _present(device: torch.device | str | int) -> torch.device:
    """A device that tensors can lie on here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ArgumentError(f"HybridLM.from_pretrained: device {device!r} is not there: {reason}") from None


def _stated_dtype(folder: Path) -> torch.dtype:
    """The dtype that config.json names, of the text model first."""
    config = read_json(folder / "config.json")
    text = config.get("text_config")
    text = text if isinstance(text, dict) else {}
    for name in (part.get(key) for part in (text, config) for key in ("dtype", "torch_dtype")):
        if name is not None:
            dtype = getattr(torch, str(name).removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ArgumentError(f"{folder / 'config.json'}: there is no dtype {name!r}")
            return dtype
    return torch.float32


def _entries(folder: Path) -> Iterator[Entry]:
    """All tensors of a folder: those of the only file where there is one, as in transformers, or of all files that the
    index names."""
    index = folder / INDEX
    if os.path.lexists(folder / WEIGHTS):
        yield from safetensors.read_header(folder / WEIGHTS).values()
        return
    try:
        where = read_json(index).get("weight_map")
    except FileNotFoundError:
        others = sorted(path.name for path in folder.glob("*") if path.suffix in (".bin", ".pt", ".safetensors"))
        there = f"; it has {', '.join(others[:4])}, which are not read" if others else ""
        raise ArgumentError(f"HybridLM.from_pretrained: {folder} has neither {WEIGHTS} nor {INDEX}{there}") from None
    if not isinstance(where, dict) or not all(isinstance(file, str) and file for file in where.values()):
        raise ArgumentError(f"{index} has no weight_map of tensors to files")
    headers = {file: safetensors.read_header(folder / file) for file in sorted(set(where.values()))}
    for name, file in where.items():
        if name not in headers[file]:
            raise ArgumentError(f"{folder / file} has no tensor {name}, which {INDEX} says it has")
    for entries in headers.values():
        yield from entries.values()


def _has_another_head(entries: Iterable[Entry]) -> bool:
    """Whether there is a last matrix with other values than those of the embedding."""
    named = {_text_name(entry.name): entry for entry in entries}
    head, table = named.get("lm_head.weight"), named.get("model.embed_tokens.weight")
    if head is None or table is None or head.shape != table.shape or not (head.is_floating and table.is_floating):
        return False
    return not torch.equal(*(entry.read() for entry in (head, table)))


def _assign(
    model: "HybridLM", folder: Path, entries: Iterable[Entry]
) -> tuple[dict[str, list[Part]], dict[str, list[str]]]:
    """Which tensors fill which parameter, and which are left out, and why.

    Raises:
        ArgumentError: a tensor is missing, unknown, there twice, of another shape, or of whole numbers.
        Unsupported: a tensor is FP8.
    """
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    left_out: dict[str, list[str]] = {}
    for entry in entries:
        name = _text_name(entry.name)
        reason = next((reason for reason, pattern in _LEFT_OUT.items() if pattern.fullmatch(name)), None)
        if reason is not None:
            left_out.setdefault(reason, []).append(entry.name)
            continue
        if entry.is_fp8 or name.endswith(("weight_scale_inv", "weight_scale")):
            raise Unsupported(
                f"{entry.path}: tensor {entry.name} ({entry.dtype}) is of FP8 weights, which are not supported; use "
                f"the model in 16 bits"
            )
        if not entry.is_floating:
            raise ArgumentError(f"{entry.path}: tensor {entry.name} must hold floating numbers, got {entry.dtype}")
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        part = Part(entry)
        if match := _OF_ONE_EXPERT.fullmatch(name):
            matrix = match["matrix"]
            half = {"gate": 0, "up": 1}.get(matrix)
            name = f"{match['experts']}.{'down_proj' if half is None else 'gate_up_proj'}"
            part = Part(entry, int(match["expert"]), half)
        if name not in shapes:
            raise ArgumentError(
                f"{entry.path}: tensor {entry.name} is none of a {model.config.model_type} model of this configuration"
            )
        _check_shape(part, name, shapes[name])
        parts[name].append(part)
    for name, tensors in parts.items():
        _check_whole(folder, name, tensors, shapes[name])
    return parts, left_out


def _text_name(name: str) -> str:
    """The name of a parameter of the text model, without the prefix of a model that has several parts."""
    name = re.sub(r"^(model\.)?language_model\.(model\.)?", "model.", name)
    if name.startswith("model.lm_head."):
        return name.removeprefix("model.")
    first = name.split(".", 1)[0]
    return f"model.{name}" if first in ("embed_tokens", "layers", "norm") else name


def _check_shape(part: Part, name: str, shape: torch.Size) -> None:
    entry = part.entry
    if part.expert is not None and part.expert >= shape[0]:
        raise ArgumentError(f"{entry.path}: tensor {entry.name} is of expert {part.expert}, and there are {shape[0]}")
    expected = tuple(part.of(torch.empty(shape, device="meta")).shape)
    if entry.shape != expected:
        raise ArgumentError(
            f"{entry.path}: tensor {entry.name} must have shape {expected}, of {name}, got {entry.shape}"
        )


def _check_whole(folder: Path, name: str, parts: list[Part], shape: torch.Size) -> None:
    """All of a parameter is there, and nothing of it twice."""
    places = [(part.expert, part.half) for part in parts]
    if len(set(places)) != len(places) or ((None, None) in places and len(places) > 1):
        names = ", ".join(f"{part.entry.name} of {part.entry.path.name}" for part in parts[:4])
        raise ArgumentError(f"{folder} has {name} more than once: {names}")
    if (None, None) in places:
        return
    if not places:
        raise ArgumentError(f"{folder} has no tensor {name}, of shape {tuple(shape)}")
    halves = (0, 1) if name.endswith("gate_up_proj") else (None,)
    for expert in range(shape[0]):
        for half in halves:
            if (expert, half) not in places:
                matrix = {0: "gate", 1: "up", None: "down"}[half]
                prefix = name.rpartition(".")[0]
                raise ArgumentError(f"{folder} has no tensor {prefix}.{expert}.{matrix}_proj.weight")


def save(model: "HybridLM", folder: Path, max_shard_bytes: int) -> None:
    """See `HybridLM.save_pretrained`."""
    require_size("HybridLM.save_pretrained", "max_shard_bytes", max_shard_bytes)
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(f"HybridLM.save_pretrained: {folder} is a file; a checkpoint is a folder")
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}  # a tied one is there once
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            raise ArgumentError(f"HybridLM.save_pretrained: parameter {name} is on the meta device and has no values")
        if hasattr(tensor, "full_tensor"):
            raise ArgumentError(
                f"HybridLM.save_pretrained: parameter {name} is sharded over processes; gather all of "
                f"them with full_tensor() into a model of one process"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"HybridLM.save_pretrained: {folder} cannot be made: {error.strerror}") from None
    config = model.config.to_dict() | {"dtype": str(model.dtype).removeprefix("torch.")}
    groups = safetensors.split(tensors, max_shard_bytes)
    names = [WEIGHTS]
    if len(groups) > 1:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    for name, group in zip(names, groups, strict=True):
        safetensors.write(folder / name, group, {"format": "pt"})
    (folder / INDEX).unlink(missing_ok=True)
    for path in folder.iterdir():
        if _SHARD.fullmatch(path.name) and path.name not in names:
            path.unlink()
    if len(groups) > 1:
        where = {tensor: name for name, group in zip(names, groups, strict=True) for tensor in group}
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        (folder / WEIGHTS).unlink(missing_ok=True)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
