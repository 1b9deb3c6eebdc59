"""Text as tokens: bytes, or those of a Hugging Face tokenizer."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.models.byte_text import VOCABULARY, ByteText, is_byte_tokenizer, write_byte_tokenizer


class Language(Protocol):
    """Converts text to tokens and tokens to text."""

    vocabulary: int

    def tokens(self, content: bytes) -> Tensor: ...
    def text(self, tokens: Iterable[int]) -> str: ...
    def write(self, folder: Path) -> None: ...


class Bytes:
    """The language in which each byte is a token."""

    vocabulary = VOCABULARY

    def tokens(self, content: bytes) -> Tensor:
        if not content:  # torch makes no tensor from an empty buffer
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8)

    def text(self, tokens: Iterable[int]) -> str:
        return "".join(ByteText().decode(tokens))

    def write(self, folder: Path) -> None:
        write_byte_tokenizer(folder)


class Pieces:
    """The tokens of a tokenizer.json, which the package tokenizers reads.

    Raises:
        ArgumentError: there is no such file, or it is not a tokenizer.
        Unsupported: the package is not installed.
    """

    def __init__(self, path: Path) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Unsupported("train: a tokenizer needs the package tokenizers: pip install tokenizers") from None
        self._path = path
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:
            raise ArgumentError(f"train: {path} is no tokenizer.json: {error}") from None
        self.vocabulary = int(self._tokenizer.get_vocab_size())

    def tokens(self, content: bytes) -> Tensor:
        ids = self._tokenizer.encode(content.decode("utf-8"), add_special_tokens=False).ids
        return torch.tensor(ids, dtype=torch.int32)

    def text(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def write(self, folder: Path) -> None:
        shutil.copyfile(self._path, folder / "tokenizer.json")  # the original may have another name
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            if (source := self._path.with_name(name)).exists():
                shutil.copyfile(source, folder / name)
        if not (folder / "tokenizer_config.json").exists():
            config = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (folder / "tokenizer_config.json").write_text(json.dumps(config) + "\n", encoding="utf-8")


def read_language(tokenizer: str, start: str) -> Language:
    """The named tokenizer, or else that of the folder from which a run starts, or else bytes.

    Raises:
        ArgumentError: the named tokenizer or the folder does not exist.
    """
    if not tokenizer and not start:
        return Bytes()
    if start and not Path(start).is_dir():
        raise ArgumentError(f"train: there is no folder {start} to start from; --from takes one with a config.json")
    path = Path(tokenizer or start)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.exists():
        hint = "" if tokenizer else "; name one with --tokenizer"
        raise ArgumentError(f"train: there is no tokenizer at {path}{hint}")
    return Bytes() if is_byte_tokenizer(path) else Pieces(path)
