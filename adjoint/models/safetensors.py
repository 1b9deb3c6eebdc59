"""Files of the safetensors format: the length of a header in eight bytes, the header in JSON, and the tensors' bytes.

The header is read first and checked against the file, so that a file cut short is noticed before anything is loaded.
Tensors are read and written one at a time, each through a mapping of its own bytes.
"""

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from adjoint.core.errors import ArgumentError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

_LONGEST_HEADER = 100 * 2**20
"""Bytes; the format allows no more."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its dtype and shape, and where its bytes begin and end."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def is_fp8(self) -> bool:
        return self.dtype.startswith("F8_")

    @property
    def is_floating(self) -> bool:
        """Whether its numbers are of a floating type that this module reads."""
        return self.dtype in _DTYPES and _DTYPES[self.dtype].is_floating_point

    def copy_to(self, target: Tensor) -> None:
        """Copies the tensor into another of its shape, on any device and of any dtype."""
        if self.begin != self.end:
            target.copy_(self.read())

    def read(self) -> Tensor:
        """The tensor as it lies in the file, whose pages are read when they are used."""
        if self.begin == self.end:
            return torch.empty(self.shape, dtype=_DTYPES[self.dtype])
        first = self.begin // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with open(self.path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), self.end - first, access=mmap.ACCESS_COPY, offset=first)
        data = torch.frombuffer(mapping, dtype=torch.uint8, offset=self.begin - first, count=self.end - self.begin)
        dtype = _DTYPES[self.dtype]
        if self.begin % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(self.shape)


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a file.

    Raises:
        ArgumentError: there is no such file, it is cut short, or its header is wrong; file and tensor are named.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8 or length > _LONGEST_HEADER:
                raise ArgumentError(
                    f"{path} is truncated or no safetensors file: it has {size} bytes, and its first eight announce a "
                    f"header of {length}"
                )
            header = json.loads(file.read(length).decode("utf-8"))
    except FileNotFoundError:
        link = f"{path} is a link to {os.readlink(path)}, which is not there" if path.is_symlink() else ""
        raise ArgumentError(link or f"there is no file {path}") from None
    except RecursionError:
        raise ArgumentError(f"{path} is no safetensors file: its header is nested too deep") from None
    except (ValueError, OSError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{path} is no safetensors file: its header cannot be read: {error}") from None
    if not isinstance(header, dict):
        raise ArgumentError(f"{path} is no safetensors file: its header must be a JSON object")
    header.pop("__metadata__", None)
    entries = {name: _entry(path, name, fields, 8 + length, size) for name, fields in header.items()}
    _check_places(path, entries.values(), 8 + length, size)
    return entries


def _check_places(path: Path, entries: Iterable[Entry], start: int, size: int) -> None:
    """Tensors follow each other from the first byte after the header to the last of the file."""
    end, before = start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != end:
            how = "overlap" if entry.begin < end else "have a gap between them"
            raise ArgumentError(f"{path} is no right safetensors file: {before} and tensor {entry.name} {how}")
        end, before = entry.end, f"tensor {entry.name}"
    if end != size:
        raise ArgumentError(f"{path} is no right safetensors file: it has {size - end} bytes behind {before}, the last")


def _entry(path: Path, name: str, fields: object, start: int, size: int) -> Entry:
    """One line of the header, checked; `start` is where tensors' bytes begin, `size` that of the file."""
    try:
        kind, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]  # type: ignore[index]
        right = isinstance(kind, str) and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        right = right and begin <= end
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        raise ArgumentError(f"{path}: tensor {name} has no right dtype, shape and data_offsets in the header")
    if start + end > size:
        raise ArgumentError(
            f"{path} is truncated: tensor {name} ends at byte {start + end}, and the file has {size} bytes"
        )
    if kind in _DTYPES and math.prod(shape) * _DTYPES[kind].itemsize != end - begin:
        raise ArgumentError(f"{path}: tensor {name}, {kind} of shape {shape}, cannot have {end - begin} bytes")
    return Entry(path, name, kind, shape, start + begin, start + end)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A file with these tensors. It replaces an older one of the name when it is whole, not before."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        end = position + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [position, end],
        }  # fmt: skip
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with open(unfinished, "wb+") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.flush()
            _reserve(file.fileno(), start + position)
            _write_tensors(file.fileno(), tensors.values(), start)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _reserve(descriptor: int, size: int) -> None:
    """Makes a file of so many bytes. Without room on the disk this raises, where a mapping would end the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.ftruncate(descriptor, size)


def _write_tensors(descriptor: int, tensors: Iterable[Tensor], position: int) -> None:
    for tensor in tensors:
        end = position + tensor.numel() * tensor.element_size()
        if end > position:
            first = position // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
            mapping = mmap.mmap(descriptor, end - first, offset=first)
            data = torch.frombuffer(mapping, dtype=torch.uint8, offset=position - first, count=end - position)
            data.copy_(tensor.detach().contiguous().flatten().view(torch.uint8))
            mapping.flush()
        position = end


def split(tensors: Mapping[str, Tensor], limit: int) -> list[dict[str, Tensor]]:
    """Tensors in their order, in groups of at most so many bytes; one that is larger is a group of its own."""
    groups: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and groups[-1]:
            groups.append({})
            room = limit
        groups[-1][name] = tensor
        room -= size
    return groups
