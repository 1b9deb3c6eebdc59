"""Which of `state_indices` are wrong."""

import torch
from torch import Tensor


def out_of_range(indices: Tensor, states: int) -> Tensor:
    """Which indices are neither of a state nor −1."""
    return (indices < -1) | (indices >= states)


def repeated(indices: Tensor) -> Tensor:
    """Which indices, skipped rows aside, have occurred before."""
    ordered, order = indices.sort(stable=True)
    again = torch.zeros_like(indices, dtype=torch.bool)
    again[order[1:]] = (ordered[1:] == ordered[:-1]) & (ordered[1:] >= 0)
    return again
