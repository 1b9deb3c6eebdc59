"""The value that memory is filled with so that what is left unwritten, or read too early, is noticed."""

import torch
from torch import Tensor


def poison(tensor: Tensor) -> Tensor:
    """Fills a tensor with NaN, or with the smallest value of a type that has none; returns it."""
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    return tensor.fill_(False if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).min)
