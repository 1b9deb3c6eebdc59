"""The checks of what the layers of a model share: tokens, and the number of sequences of a cache."""

from typing import Any

import torch
from torch import Tensor, nn

from adjoint.core.arguments import FLOATING, require_floating, require_integer
from adjoint.core.errors import ArgumentError
from adjoint.core.problem import short


def require_tokens(layer: str, x: Any, hidden_size: int, weight: Any, axes: int | None = None) -> None:
    """Requires tokens of the hidden size, in the dtype of a weight that multiplies them.

    Args:
        layer: the name of the layer.
        x: the tokens.
        hidden_size: the number of columns of a token.
        weight: the weight. Of a quantised projection it is a method, or holds integers; then it says nothing.
        axes: how many axes x must have; by default any number.
    """
    require_floating(layer, "x", x)
    if axes is not None and x.dim() != axes:
        raise ArgumentError(f"{layer}: x must have the axes [batch, time, hidden], got shape {tuple(x.shape)}")
    if x.dim() == 0 or x.shape[-1] != hidden_size:
        raise ArgumentError(f"{layer}: x must have {hidden_size} columns, the hidden size, got shape {tuple(x.shape)}")
    if not isinstance(weight, Tensor) or weight.dtype not in FLOATING or x.dtype == weight.dtype:
        return
    if torch.float64 in (x.dtype, weight.dtype) or not torch.is_autocast_enabled(x.device.type):
        raise ArgumentError(
            f"{layer}: x must have the dtype of the layer's parameters, {short(weight.dtype)}, "
            f"got {short(x.dtype)}; convert one of them"
        )


def weight_of(projection: nn.Module) -> Tensor | None:
    """The weight of a plain projection. Another class may convert its inputs as it likes."""
    return projection.weight if type(projection) is nn.Linear else None


def require_count(layer: str, name: str, value: Any) -> int:
    """Requires an integer from 0 on: a number of sequences, or of tokens."""
    if (count := require_integer(layer, name, value)) < 0:
        raise ArgumentError(f"{layer}: {name} must be at least 0, got {value}")
    return count
