"""Checkpoints of a run. Each is written completely or not at all: by one process as safetensors, by several as shards.

A checkpoint is first written into a folder of another name, and every file is flushed to the disk. Only then does the
folder get its name, so every folder with the name of a checkpoint is complete. Older checkpoints are removed after
that. The last file, manifest.json, has the size and the checksum of all others, which show whether a checkpoint is
damaged.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from adjoint.core.errors import ArgumentError
from adjoint.models import safetensors
from adjoint.models.config import HybridConfig
from adjoint.train.step.ranks import Ranks
from adjoint.train.stops import CannotSave
from adjoint.train.text.language import Language

_WHOLE = re.compile(r"step-(\d{8})")
_UNFINISHED = ".unfinished-"
_WEIGHTS, _OPTIMIZER, _RANDOM, _SHARDS = "model.safetensors", "optimizer.safetensors", "random.safetensors", "shards"


@dataclass
class State:
    """All that a run needs to go on.

    Attributes:
        step: the number of steps done, which is also the position in the data.
        weights: the weights in float32, by the names of the model's parameters.
        optimizer: the tensors of the optimizer's state, by name.
        facts: numbers and texts, such as the tokens so far and the facts on which the bits depend.
    """

    step: int
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    facts: dict[str, Any]


class Checkpoints:
    """The checkpoints of a run's folder.

    Args:
        folder: the folder of the run.
        keep: the number of checkpoints to keep.
        ranks: the processes that write them together.
    """

    def __init__(self, folder: Path, keep: int, ranks: Ranks) -> None:
        self.folder, self._keep, self._ranks = folder / "checkpoints", keep, ranks

    def steps(self) -> list[int]:
        """The steps of the checkpoints in the folder.

        Raises:
            ArgumentError: the folder cannot be read.
        """
        try:
            names = os.listdir(self.folder)  # unlike glob, it raises for a folder that it may not read
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ArgumentError(f"train: cannot read {self.folder}: {error.strerror}") from None
        return sorted(int(match[1]) for name in names if (match := _WHOLE.fullmatch(name)))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # ------------------------------------------------------------------------------------------ writing

    def save(self, state: State, config: HybridConfig, language: Language) -> Path:
        """Writes a checkpoint, and then removes the oldest ones, so that `keep` are left.

        Raises:
            CannotSave: the disk is full or cannot be written to. All older checkpoints are still there.
        """
        target = self.path(state.step)
        unfinished = self.folder / f"{_UNFINISHED}{target.name}"
        try:
            if self._ranks.is_first:
                self._remove_unfinished()
                unfinished.mkdir(parents=True)
            self._ranks.wait()
            self._write(unfinished, state, config, language)
            if self._ranks.is_first:
                if target.exists():
                    target.rename(self.folder / f"{_UNFINISHED}old-{target.name}")
                unfinished.rename(target)
                _flush_folder(self.folder)
                self._remove_old()
        except OSError as error:
            if self._ranks.is_first:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CannotSave(
                f"train: step {state.step} could not be saved in {self.folder}: {error.strerror or error}; "
                f"{self._last()}"
            ) from error
        self._ranks.wait()
        return target

    def _write(self, folder: Path, state: State, config: HybridConfig, language: Language) -> None:
        if self._ranks.mesh is None:
            safetensors.write(folder / _WEIGHTS, state.weights, {"format": "pt"})
            safetensors.write(folder / _OPTIMIZER, state.optimizer)
        else:
            _write_shards(folder / _SHARDS, state)
        own = [path for path in folder.rglob("*") if path.is_file()]
        if self._ranks.mesh is not None:
            own = [path for path in own if path.name.startswith(f"__{self._ranks.rank}_")]
        for path in own:
            _flush(path)
        sums = [(path.relative_to(folder).as_posix(), _describe(path)) for path in own]
        files = dict(item for part in self._ranks.gather(sums) for item in part)
        if not self._ranks.is_first:
            return
        safetensors.write(folder / _RANDOM, _random_states())
        write_json(folder / "config.json", config.to_dict() | {"dtype": "float32"})
        write_json(folder / "state.json", {"step": state.step, **state.facts})
        language.write(folder)
        for path in folder.rglob("*"):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and name not in files:
                _flush(path)
                files[name] = _describe(path)
        write_json(folder / "manifest.json", dict(sorted(files.items())))
        _flush(folder / "manifest.json")
        for part in (folder / _SHARDS, folder):
            if part.exists():
                _flush_folder(part)

    def _last(self) -> str:
        steps = self.steps()
        if not steps:
            return "there is no earlier checkpoint, and --resume begins the run again"
        return f"the checkpoint of step {steps[-1]} is whole, and --resume goes on from it"

    def _remove_unfinished(self) -> None:
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(path, ignore_errors=True)

    def _remove_old(self) -> None:
        """Removes old checkpoints. Each loses its name before its files, so a part of one never has the name."""
        for step in self.steps()[: -self._keep]:
            self.path(step).rename(self.folder / f"{_UNFINISHED}old-{step}")
        self._remove_unfinished()

    # ------------------------------------------------------------------------------------------ reading

    def newest(self) -> "tuple[int, dict[str, Any], list[str]]":
        """The newest whole checkpoint: its step and facts, and sentences about newer ones that are damaged.

        Raises:
            ArgumentError: there is no whole checkpoint.
        """
        damaged = []
        for step in reversed(self.steps()):
            if fault := find_damage(self.path(step)):
                damaged.append(f"{self.path(step)} is damaged and not used: {fault}")
                continue
            return step, json.loads((self.path(step) / "state.json").read_text(encoding="utf-8")), damaged
        reasons = f": {'; '.join(damaged)}" if damaged else ""
        raise ArgumentError(f"train: there is no whole checkpoint in {self.folder} to resume from{reasons}")

    def load(self, step: int, state: State, config: HybridConfig) -> None:
        """Copies a checkpoint into the tensors of a state.

        Raises:
            ArgumentError: the checkpoint is of a model of other sizes.
        """
        folder = self.path(step)
        before, now = (
            HybridConfig.from_folder(folder).to_dict(),
            config.to_dict(),
        )  # a family may not have all of these fields
        if before != now:
            name = next(name for name in {**now, **before} if before.get(name) != now.get(name))
            raise ArgumentError(
                f"train: {folder} is a checkpoint of another architecture: its {name} is {before.get(name)}, and that "
                f"of this run's options is {now.get(name)}"
            )
        if (folder / _SHARDS).exists():
            _read_shards(folder / _SHARDS, state, self._ranks)
        else:
            _read(folder / _WEIGHTS, state.weights)
            _read(folder / _OPTIMIZER, state.optimizer)
        randoms = {}
        for name, entry in safetensors.read_header(folder / _RANDOM).items():
            randoms[name] = torch.empty(entry.shape, dtype=torch.uint8)
            entry.copy_to(randoms[name])
        torch.set_rng_state(randoms["cpu"])
        if "cuda" in randoms and self._ranks.device.type == "cuda":
            torch.cuda.set_rng_state(randoms["cuda"], self._ranks.device)


def _random_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


@torch.no_grad()
def _read(path: Path, tensors: Mapping[str, Tensor]) -> None:
    entries = safetensors.read_header(path)
    for name, tensor in tensors.items():
        if name not in entries or entries[name].shape != tuple(tensor.shape):
            raise ArgumentError(f"train: {path} has no tensor {name} of shape {tuple(tensor.shape)}")
        if isinstance(tensor, DTensor):
            whole = torch.empty(tensor.shape, dtype=tensor.dtype)
            entries[name].copy_to(whole)
            tensor.copy_(distribute_tensor(whole.to(tensor.device), tensor.device_mesh, tensor.placements))
        else:
            entries[name].copy_to(tensor)


def _shards_of(state: State) -> dict[str, Any]:
    return {"model": dict(state.weights), "optimizer": dict(state.optimizer)}


def _write_shards(folder: Path, state: State) -> None:
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save(_shards_of(state), checkpoint_id=folder)
    except CheckpointException as error:
        failures = _failures(error)
        raise next((x for x in failures if isinstance(x, OSError)), OSError(_in_words(failures))) from error


def _failures(error: Any) -> list[BaseException]:
    return [failure[0] if isinstance(failure, tuple) else failure for failure in error.failures.values()]


def _in_words(failures: list[BaseException]) -> str:
    """The failures in words. If a disk is full, torch raises an error about a position in a file."""
    lines = [line for failure in failures for line in str(failure).strip().splitlines()[:1]]
    return f"a shard was not written, as when the disk is full ({'; '.join(dict.fromkeys(lines))})"


@torch.no_grad()
def _read_shards(folder: Path, state: State, ranks: Ranks) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load(_shards_of(state), checkpoint_id=folder, no_dist=ranks.mesh is None)


def find_damage(folder: Path) -> str:
    """What is wrong with a checkpoint's files; empty if nothing is."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if not isinstance(files, dict) or "state.json" not in files:
            return "manifest.json is not as it was written"
        for name, expected in files.items():
            if _describe(folder / name) != expected:
                return f"{name} is not as it was written"
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def model_in(folder: Path) -> Path | None:
    """The folder from which another run may start: the final model of a run, or its newest checkpoint with a model."""
    checkpoints = sorted(folder.glob("checkpoints/step-*"), reverse=True)
    return next((path for path in (folder / "model", *checkpoints) if (path / _WEIGHTS).exists()), None)


def _describe(path: Path) -> dict[str, int]:
    """The size of a file, and the CRC-32 of its content."""
    checksum = size = 0
    with open(path, "rb") as file:
        while part := file.read(2**24):
            checksum, size = zlib.crc32(part, checksum), size + len(part)
    return {"bytes": size, "crc32": checksum}


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text to a file, which is replaced completely or stays as it was."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
