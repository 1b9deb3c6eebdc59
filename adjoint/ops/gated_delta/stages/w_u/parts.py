"""How a product with T is computed, and which gradients a backward computes: shared by plans and kernels."""

import torch

NEED_K, NEED_V, NEED_BETA, NEED_DECAY, NEED_T = (1 << bit for bit in range(5))
"""Bits of the gradients a backward computes."""

TF32 = 1
"""The mode of a product in which every float32 is the sum of two TF32 numbers."""

PARTS = 2
"""bfloat16 numbers whose sum stands for a number of T in float32, beside keys and values in bfloat16, whose own
rounding is 2⁸ times coarser. Part of the bits."""


def parts_of(element: torch.dtype, T: torch.dtype) -> int:
    """How a product with T is computed, as `times` in the kernels counts."""
    if T == element != torch.float32:
        return 0
    return PARTS if element == torch.bfloat16 else TF32
