"""How a plan divides its one piece of scratch memory into regions."""

from typing import Any

import torch
from torch import Tensor

from adjoint.core.layout import Rows

_ALIGNMENT = 256


class Memory(dict[str, Any]):
    """The regions of one workspace as kernels take them, by name: addresses on a GPU, else tensors.

    It keeps a reference to the workspace, because nobody else may get this memory before the last kernel is launched.
    """

    __slots__ = ("regions", "workspace")

    def __init__(self, regions: "Regions", workspace: Tensor | None) -> None:
        super().__init__({} if workspace is None else regions.pointers(workspace))
        self.regions, self.workspace = regions, workspace

    def tensor(self, name: str) -> Tensor:
        """One region as a tensor."""
        assert self.workspace is not None
        return self.regions.tensor(self.workspace, name)

    def part(self, name: str, first: int) -> Any:
        """One region as a kernel takes it, from the element `first` on."""
        start = self[name]
        return start[first:] if isinstance(start, Tensor) else start + first * self.regions.itemsize(name)

    def contiguous(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor, or its contiguous copy where the plan makes one: see `Setup.copies`."""
        if not self or f"copy_of_{name}" not in self:
            return tensor
        return self.tensor(f"copy_of_{name}").view(tensor.shape).copy_(tensor)

    def rows(self, name: str, tensor: Tensor) -> Rows:
        """The tensor, or its copy, as rows."""
        return Rows.of(self.contiguous(name, tensor))


class Regions:
    """Named regions of a workspace, each of a number of elements of a dtype. Every region is aligned.

    >>> regions = Regions(keys=(torch.int32, 10), sums=(torch.float32, 3))
    >>> regions.bytes
    768
    """

    def __init__(self, **regions: tuple[torch.dtype, int]) -> None:
        self._regions: dict[str, tuple[torch.dtype, int]] = {}
        self._offsets: dict[str, int] = {}
        self._end = 0
        self.add(**regions)

    def add(self, **regions: tuple[torch.dtype, int]) -> None:
        """Adds regions behind the others. A region without elements takes no memory."""
        for name, (dtype, count) in regions.items():
            if name in self._regions:
                raise ValueError(f"the workspace has a region {name} already")
            if count:
                self._regions[name], self._offsets[name] = (dtype, count), self._end
                self._end += -(-dtype.itemsize * count // _ALIGNMENT) * _ALIGNMENT

    def __contains__(self, name: str) -> bool:
        return name in self._regions

    def itemsize(self, name: str) -> int:
        """The bytes of an element of a region."""
        return self._regions[name][0].itemsize

    @property
    def bytes(self) -> int:
        """The size of a workspace that holds all regions, wherever it begins."""
        return self._end + _ALIGNMENT if self._end else 0

    def tensor(self, workspace: Tensor, name: str) -> Tensor:
        """One region as a tensor."""
        memory = workspace.view(-1).view(torch.uint8)
        dtype, count = self._regions[name]
        first = -memory.data_ptr() % _ALIGNMENT + self._offsets[name]
        return memory[first : first + dtype.itemsize * count].view(dtype)

    def tensors(self, workspace: Tensor) -> dict[str, Tensor]:
        """All regions as tensors."""
        return {name: self.tensor(workspace, name) for name in self._regions}

    def divide(self, workspace: Tensor | None, device: torch.device) -> Memory:
        """The regions of a workspace, together with the workspace. Where it is None, one is allocated."""
        if not self._end:
            return _NOTHING
        return Memory(self, self.allocate(device) if workspace is None else workspace)

    def allocate(self, device: torch.device) -> Tensor:
        """A workspace that holds all regions."""
        return torch.empty(self.bytes, dtype=torch.uint8, device=device)

    def pointers(self, workspace: Tensor) -> dict[str, Any]:
        """The regions as a kernel takes them: on a GPU addresses, which cost the host nothing, elsewhere tensors."""
        if not workspace.is_cuda:
            return dict(self.tensors(workspace))
        base = -(-workspace.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        return {name: base + offset for name, offset in self._offsets.items()}


_NOTHING = Memory(Regions(), None)
"""The memory of every plan that needs none."""
