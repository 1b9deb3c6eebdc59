"""The operations of a convolution, two for each product, as torch counts those of `conv1d`."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from adjoint.ops.conv.arguments import NEED_STATE, NEED_WEIGHT, NEED_X


def convolution(x: Tensor, weight: Tensor, *rest: Any) -> int:
    """A product for each tap of each number of y."""
    return 2 * x.numel() * weight.shape[1]


def convolution_backward(part_count: int) -> Callable[..., int]:
    """The same number for dx, that of the tokens before a sequence included, and for dweight. z, which is computed
    again, counts in the forward alone; a part of y without a gradient counts nothing."""

    def flops(*arguments: Any) -> int:
        upstream, weight, need = arguments[:part_count], arguments[part_count + 2], arguments[-1]
        products = bool(need & (NEED_X | NEED_STATE)) + bool(need & NEED_WEIGHT)
        return 2 * products * sum(dy.numel() for dy in upstream if dy is not None) * int(weight.shape[1])

    return flops
