"""Prompts and output of the command: text by the tokenizer of a checkpoint folder, or token ids as they are."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.models.byte_text import ByteText, is_byte_tokenizer


class TokenIds:
    """Token ids, separated by spaces or commas."""

    def encode(self, prompt: str) -> list[int]:
        """
        >>> TokenIds().encode("3, 1 4")
        [3, 1, 4]
        """
        try:
            return [int(word) for word in prompt.replace(",", " ").split()]
        except ValueError:
            raise ArgumentError(f"generate: with --tokens the prompt must be token ids, got {prompt!r}") from None

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        for token in tokens:
            yield f"{token} "


class Text:
    """Text, by the tokenizer.json of a folder and the package tokenizers.

    Raises:
        ArgumentError: the folder has no tokenizer.json, or one that cannot be read.
        Unsupported: the package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise ArgumentError(f"generate: there is no tokenizer at {path}; give token ids, with --tokens")
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise Unsupported(
                "generate: text needs the package tokenizers: pip install tokenizers; or give token ids, with --tokens"
            ) from None
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises nothing more special
            raise ArgumentError(f"generate: {path} is no tokenizer: {error}") from None

    def encode(self, prompt: str) -> list[int]:
        try:
            return list(self._tokenizer.encode(prompt).ids)
        except Exception as error:
            raise ArgumentError(f"generate: the tokenizer does not take {prompt[:40]!r}: {error}") from None

    def decode(self, tokens: Iterable[int]) -> Iterator[str]:
        """Pieces of text as they are complete: a character may take several tokens."""
        ids: list[int] = []
        shown = ""
        for token in tokens:
            ids.append(token)
            text = self._tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                yield text[len(shown) :]
                shown = text


def text_of(folder: Path) -> ByteText | Text:
    """Text by the tokenizer of a folder; that of bytes needs no package."""
    return ByteText() if is_byte_tokenizer(folder / "tokenizer.json") else Text(folder)
