"""The tensor arguments of an op under test.

Floating inputs are differentiable, unless the subject names them as constant: see `Subject.differentiable` and
`Subject.leaves`. Integer and boolean inputs have no gradient and keep their dtype everywhere. An optional input that is
absent is None, and stays None.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Inputs = tuple[Any, ...]
"""Tensors, or None for an optional tensor that is absent."""


def each(change: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Applies a function to each input that is not None."""
    return tuple(None if tensor is None else change(tensor) for tensor in inputs)


def is_differentiable(tensor: Tensor | None) -> bool:
    return tensor is not None and tensor.is_floating_point()


def differentiable(inputs: Inputs) -> tuple[Tensor, ...]:
    """The inputs that have a gradient, in order."""
    return tuple(filter(is_differentiable, inputs))


def widened(inputs: Inputs) -> Inputs:
    """The inputs of a reference: floating ones in float64."""
    return each(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, inputs)


def leaves(inputs: Inputs) -> Inputs:
    """The inputs as leaves of a new graph, where floating ones require a gradient."""
    return each(lambda tensor: tensor.detach().requires_grad_(tensor.is_floating_point()), inputs)


def as_tuple(value: Any) -> tuple[Any, ...]:
    """A function's result as a tuple, if it is not one already."""
    return value if isinstance(value, tuple) else (value,)


def poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with NaN, or with the smallest value of a type without NaN, and returns it.

    This shows elements that are never written, or that are read before they are written.
    """
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)
