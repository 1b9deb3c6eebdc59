"""Plain torch in the place of `adjoint.rotary` and `adjoint.sigmoid_gate`, until they are here."""

import torch
from torch import Tensor


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1]
    if cos.dim() == 2:
        cos, sin = cos[None], sin[None]
    cos, sin = cos[:, :, None], sin[:, :, None]

    def rotated(x: Tensor) -> Tensor:
        first, second, rest = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype), x[..., 2 * half :]
        return torch.cat(((first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype), rest), -1)

    return rotated(q), rotated(k)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return x * gate.sigmoid()
