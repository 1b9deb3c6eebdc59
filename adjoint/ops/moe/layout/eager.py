"""The layout of a dispatch in plain PyTorch, on any device."""

import torch
from torch import Tensor

from adjoint.core.errors import Fault, report
from adjoint.ops.moe.layout import Layout


def lie_below(values: Tensor, bound: Tensor | int) -> bool:
    """Whether all integers are at least 0 and below a bound. False on a GPU, because the answer would wait for it."""
    if not values.is_cpu or values.numel() == 0:
        return False
    low, high = values.aminmax()
    return bool(low >= 0) and bool(high < bound)


def write(indices: Tensor, num_experts: int, layout: Layout, fault: Fault | None) -> None:
    """Fills a layout. An expert out of range is reported as `fault`, unless that is None."""
    keys = indices
    if not lie_below(indices, num_experts):
        out_of_range = (indices < 0) | (indices >= num_experts)
        if fault is not None:
            report(fault, indices, out_of_range)
        keys = torch.where(out_of_range, num_experts, indices)
    keys, permutation = keys.reshape(-1).sort(stable=True)
    layout.permutation.copy_(permutation)
    rows = torch.arange(len(keys), dtype=torch.int32, device=keys.device)
    layout.inverse.view(-1).index_copy_(0, permutation, rows)
    experts = torch.arange(num_experts + 1, dtype=keys.dtype, device=keys.device)
    layout.offsets.copy_(torch.searchsorted(keys, experts))
