"""Gradients that the forward computes and keeps for the backward, which multiplies them by the upstream gradient."""

import torch

from adjoint.core.problem import wide_dtype
from adjoint.ops.loss.arguments import Loss

NEED_HIDDEN, NEED_WEIGHT, NEED_BIAS = 1, 2, 4
"""Bits of gradients."""


def needed_sums(loss: Loss, frozen: int, keep: bool, has_bias: bool) -> int:
    """The gradients that the forward computes."""
    every = NEED_HIDDEN | NEED_WEIGHT | (NEED_BIAS if has_bias else 0)
    return every & ~frozen if keep and loss.is_total else 0


def hidden_sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the gradient of hidden is kept in until the upstream gradient is known."""
    return dtype if dtype == torch.bfloat16 else wide_dtype(dtype)


def divides_later(dtype: torch.dtype, loss: Loss) -> bool:
    """Whether kept gradients are yet to be divided by the number of labels: float16 would lose them to underflow."""
    return dtype == torch.float16 and loss.reduction == "mean"
