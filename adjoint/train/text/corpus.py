"""The text of a run: whole files, of which some are held out, and their hash."""

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from adjoint.core.errors import ArgumentError

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SHOWN = 3
"""How many of the files that are left out are named."""


@dataclass(frozen=True)
class Document:
    """A file, with its name in the corpus and its bytes."""

    name: str
    content: bytes


@dataclass(frozen=True)
class Corpus:
    """Documents to train on, and held-out documents.

    Attributes:
        origin: words that say where the text is from.
        hash: SHA-256 of all names and contents.
        is_cut: whether the text is a single file, of which the end is held out.
        left_out: the names of files in folders that are neither empty nor UTF-8 text.
    """

    origin: str
    hash: str
    training: tuple[Document, ...]
    heldout: tuple[Document, ...]
    is_cut: bool = False
    left_out: tuple[str, ...] = ()

    def describe(self) -> str:
        """Sentences that say what is trained on, what is held out, and what is left out."""
        files, size = len(self.heldout), count_bytes(self.heldout)
        where = "its last" if self.is_cut else f"{files} whole file{_s(files)} of"
        heldout = f"{where} {size:,} byte{_s(size)} held out"
        training = count_bytes(self.training)
        text = f"{self.origin}: {training:,} byte{_s(training)} to train on, {heldout}; corpus {self.hash[:16]}"
        if self.left_out:
            count, names = len(self.left_out), ", ".join(self.left_out[:_SHOWN])
            more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
            text += f"\n{count} file{_s(count)} left out, not UTF-8 text: {names}{more}"
        return text


def _s(count: int) -> str:
    return "s" * (count != 1)


def read_corpus(paths: Sequence[str], suffixes: Sequence[str], heldout_bytes: int) -> Corpus:
    """Reads the documents of files and folders, or of the source of Python's standard library.

    A file to which several paths lead is one document. If it were two, one could be held out and the other trained on.

    Raises:
        ArgumentError: a path is missing or cannot be read, a file is empty or not text, or a folder has no text.
    """
    for suffix in suffixes:
        if not suffix.startswith("."):
            raise ArgumentError(f"train: a suffix begins with a dot, such as .py, got {suffix!r}")
    if "" in paths:
        raise ArgumentError("train: data must name files or folders, got an empty text")
    if paths:
        files: dict[Path, Document] = {}
        for path in paths:
            for file, document in _documents(Path(path), suffixes):
                files.setdefault(file.resolve(), document)
        documents = [document for document in files.values() if document.content]
        left_out = tuple(document.name for document in files.values() if not document.content)
        origin = ", ".join(paths)
    else:
        documents, left_out = list(_standard_library()), ()
        origin = f"the source of Python {platform.python_version()}'s standard library"
    corpus = _split(origin, sorted(documents, key=lambda document: document.name), heldout_bytes)
    return replace(corpus, left_out=left_out)


def _standard_library() -> Iterator[Document]:
    """The Python files of the standard library, without tests, which are repetitive, and without installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if _NOT_SOURCE.isdisjoint(name.parts) and (content := path.read_bytes()):
            yield Document(name.as_posix(), content)


def _documents(path: Path, suffixes: Sequence[str]) -> Iterator[tuple[Path, Document]]:
    """The documents of a path, one at least. In a folder, a file that is not text is a document without content."""
    if os.path.isdir(path):
        if not os.access(path, os.R_OK | os.X_OK):  # otherwise its files would be missed in silence
            raise ArgumentError(f"train: cannot read the folder {path}: Permission denied")
        files = sorted(file for file in path.rglob("*") if file.is_file())
        documents = [
            (file, Document(file.relative_to(path).as_posix(), content if is_text(content) else b""))
            for file in files
            if not any(part.startswith(".") for part in file.relative_to(path).parts)
            and (not suffixes or file.suffix in suffixes)
            and (content := _read(file))
        ]
        if not any(document.content for _, document in documents):
            kind = f" of {', '.join(suffixes)}" if suffixes else ""
            raise ArgumentError(
                f"train: the folder {path} has no text{kind} among its {len(files)} file{_s(len(files))}"
            )
        yield from documents
        return
    content = _read(path)
    if not content:
        raise ArgumentError(f"train: the file {path} is empty; give text to train on")
    if not is_text(content):
        raise ArgumentError(f"train: the file {path} is not UTF-8 text: it is binary, or in another encoding")
    yield path, Document(path.name, content)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"train: cannot read {path}: {error.strerror}") from None


def is_text(content: bytes) -> bool:
    """Whether bytes are UTF-8 without a zero byte.

    >>> is_text("é".encode()), is_text(bytes([0xFF])), is_text(bytes(1))
    (True, False, False)
    """
    if b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split(origin: str, documents: Sequence[Document], heldout_bytes: int) -> Corpus:
    """Holds out whole files, in the order of the hashes of their names.

    So further files in the corpus do not change the order of the others. Files longer than a quarter of `heldout_bytes`
    come after all others, the shortest first, because a few long files would say little about the rest. A corpus of one
    file is cut in two at the end of a line.
    """
    total = hashlib.sha256()
    for document in documents:
        total.update(hashlib.sha256(document.name.encode()).digest() + hashlib.sha256(document.content).digest())
    if len(documents) == 1:
        training, heldout = _cut(documents[0], heldout_bytes)
        return Corpus(origin, total.hexdigest(), (training,), (heldout,), is_cut=True)
    order = sorted(documents, key=lambda document: hashlib.sha256(document.name.encode()).digest())
    short = [document for document in order if len(document.content) <= heldout_bytes // 4]
    long = [document for document in order if len(document.content) > heldout_bytes // 4]
    candidates = short + sorted(long, key=lambda document: len(document.content)) if short else order
    heldout_documents: list[Document] = []
    size = 0
    for document in candidates[: len(documents) // 2]:
        if size >= heldout_bytes:
            break
        heldout_documents.append(document)
        size += len(document.content)
    chosen = {id(document) for document in heldout_documents}
    rest = tuple(document for document in documents if id(document) not in chosen)
    return Corpus(origin, total.hexdigest(), rest, tuple(heldout_documents))


def _cut(document: Document, heldout_bytes: int) -> tuple[Document, Document]:
    content, size = document.content, len(document.content)
    at = size - min(heldout_bytes, max(1, size // 10))
    at = content.find(b"\n", at, size - 1) + 1 or at
    if not 0 < at < size:
        raise ArgumentError(
            f"train: {document.name} has {size} byte{_s(size)}, too few to train on and to hold some out"
        )
    return Document(document.name, content[:at]), Document(f"{document.name} (its end)", content[at:])


def count_bytes(documents: Iterable[Document]) -> int:
    return sum(len(document.content) for document in documents)
