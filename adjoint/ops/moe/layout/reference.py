"""The layout as defined: Python's sort of (expert, entry), never optimised."""

import torch
from torch import Tensor


def layout(indices: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """offsets, permutation and inverse, for entries in order of (expert, token, slot). Those of no expert are last."""
    keys = [expert if 0 <= expert < num_experts else num_experts for expert in indices.reshape(-1).tolist()]
    permutation = sorted(range(len(keys)), key=lambda entry: (keys[entry], entry))
    inverse = [0] * len(keys)
    for row, entry in enumerate(permutation):
        inverse[entry] = row
    offsets = [sum(key < bound for key in keys) for bound in range(num_experts + 1)]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=indices.device)

    return numbers(offsets), numbers(permutation), numbers(inverse).view(indices.shape)
