"""Text as its bytes: a vocabulary of 256, and a tokenizer.json with which the package tokenizers does the same."""

import codecs
import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

VOCABULARY = 256


class ByteText:
    """UTF-8 text as one token for each byte; needs no package.

    >>> ByteText().encode("né")
    [110, 195, 169]
    >>> "".join(ByteText().decode([110, 195, 169]))
    'né'
    """

    def encode(self, prompt: str) -> list[int]:
        return list(prompt.encode("utf-8"))

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Pieces of text as soon as they are complete, because a character may take several bytes. Tokens past 255 are
        no bytes."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for token in tokens:
            yield decoder.decode(bytes([token])) if token < VOCABULARY else "\N{REPLACEMENT CHARACTER}"


@cache
def _letters() -> dict[str, int]:
    """The letter of each byte in a byte-level vocabulary: the byte itself if it is printable, else another letter."""
    prints = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters, others = {}, 0
    for byte in range(VOCABULARY):
        if byte in prints:
            letters[chr(byte)] = byte
        else:
            letters[chr(VOCABULARY + others)] = byte
            others += 1
    return letters


def byte_tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json: byte-level pieces that are never merged."""
    pieces = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    model: dict[str, Any] = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": _letters(), "merges": [],
    }  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": pieces, "post_processor": None, "decoder": pieces, "model": model,
    }  # fmt: skip


def is_byte_tokenizer(path: Path) -> bool:
    """Whether a tokenizer.json is that of bytes."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")) == byte_tokenizer())
    except (ValueError, OSError, RecursionError):
        return False


def write_byte_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, for `adjoint generate` and transformers."""
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer()) + "\n", encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
