"""Memory with canaries around a tensor, and between its elements where its strides leave room."""

import torch
from torch import Tensor

from adjoint.contract.inputs import poison
from adjoint.core.layout import overlaps_itself

CANARY = 7.25


class Guarded:
    """A tensor filled with poison, surrounded by canaries, with the shape and strides of another tensor.

    If the strides let elements share memory, the tensor is contiguous instead.
    """

    def __init__(self, like: Tensor, offset: int) -> None:
        strides = torch.empty(like.shape, device="meta").stride() if overlaps_itself(like) else like.stride()
        reach = sum((size - 1) * stride for size, stride in zip(like.shape, strides, strict=True))
        span = max(reach + 1, 1) if like.numel() else 0
        self._canary = CANARY if like.is_floating_point() else int(CANARY)
        self._memory = torch.full((span + 2 * offset,), self._canary, dtype=like.dtype, device=like.device)
        self._is_outside = torch.ones(self._memory.shape, dtype=torch.bool, device=like.device)
        self._is_outside.as_strided(like.shape, strides, offset).fill_(False)
        self.tensor = poison(self._memory.as_strided(like.shape, strides, offset))

    @staticmethod
    def copy(of: Tensor, offset: int) -> "Guarded":
        """A copy of a tensor."""
        guarded = Guarded(of, offset)
        guarded.tensor.copy_(of)
        return guarded

    def is_intact(self) -> bool:
        """Whether no canary was overwritten."""
        return bool((self._memory[self._is_outside] == self._canary).all())
