"""How a plan divides the one piece of scratch memory it is given."""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 256


class Regions:
    """Named regions of a workspace, each a number of elements of a dtype, every one aligned.

    >>> regions = Regions(keys=(torch.int32, 10), sums=(torch.float32, 3))
    >>> regions.bytes
    768
    """

    def __init__(self, **regions: tuple[torch.dtype, int]) -> None:
        self._regions = {name: region for name, region in regions.items() if region[1]}

    @cached_property
    def _offsets(self) -> dict[str, int]:
        offsets, end = {}, 0
        for name, (dtype, count) in self._regions.items():
            offsets[name] = end
            end += -(-dtype.itemsize * count // _ALIGNMENT) * _ALIGNMENT
        return offsets

    @cached_property
    def bytes(self) -> int:
        """The size of a workspace that holds all regions, wherever it begins."""
        if not self._regions:
            return 0
        last = next(reversed(self._regions))
        dtype, count = self._regions[last]
        return self._offsets[last] + -(-dtype.itemsize * count // _ALIGNMENT) * _ALIGNMENT + _ALIGNMENT

    def allocate(self, device: torch.device) -> Tensor:
        return torch.empty(self.bytes, dtype=torch.uint8, device=device)

    def tensor(self, workspace: Tensor, name: str) -> Tensor:
        """One region as a tensor."""
        memory = workspace.view(-1).view(torch.uint8)
        dtype, count = self._regions[name]
        first = -memory.data_ptr() % _ALIGNMENT + self._offsets[name]
        return memory[first : first + dtype.itemsize * count].view(dtype)

    def tensors(self, workspace: Tensor) -> dict[str, Tensor]:
        """All regions as tensors."""
        return {name: self.tensor(workspace, name) for name in self._regions}

    def pointers(self, workspace: Tensor) -> dict[str, Any]:
        """The regions as a kernel takes them: addresses on a GPU, which cost the host nothing, else tensors."""
        if not workspace.is_cuda:
            return dict(self.tensors(workspace))
        base = -(-workspace.data_ptr() // _ALIGNMENT) * _ALIGNMENT
        return {name: base + offset for name, offset in self._offsets.items()}
