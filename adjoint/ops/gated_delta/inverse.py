"""The inverse of a chunk's matrix in plain PyTorch; for the whole op and for the stage `solve`."""

import torch
from torch import Tensor

_SUBSTITUTED = 16
"""Rows of a diagonal block that is inverted row by row; larger ones are put together from these."""


def inverse(A: Tensor) -> Tensor:
    """(I + A)⁻¹ of strictly lower triangular matrices [..., C, C], C a power of two.

    Diagonal blocks by substitution, then pairs of blocks into one of twice the size:
    the inverse of [[X, 0], [Z, Y]] is [[X⁻¹, 0], [−Y⁻¹ Z X⁻¹, Y⁻¹]].
    """
    size = A.shape[-1]
    A = A.reshape(-1, size, size)
    width = min(size, _SUBSTITUTED)
    T = torch.zeros_like(A)
    T.diagonal(dim1=1, dim2=2).fill_(1)
    diagonal = torch.cat([A[:, b : b + width, b : b + width] for b in range(0, size, width)])
    block = torch.cat([T[:, b : b + width, b : b + width] for b in range(0, size, width)])
    for i in range(1, width):
        block[:, i, :i] = torch.bmm(diagonal[:, i : i + 1, :i], block[:, :i, :i]).neg_()[:, 0]
    for number, part in enumerate(block.split(len(A)) if len(A) else ()):
        begin = number * width
        T[:, begin : begin + width, begin : begin + width] = part
    while width < size:
        for begin in range(0, size, 2 * width):
            upper, lower = slice(begin, begin + width), slice(begin + width, begin + 2 * width)
            joined = torch.bmm(torch.bmm(T[:, lower, lower], A[:, lower, upper]), T[:, upper, upper])
            T[:, lower, upper] = joined.neg_()
        width *= 2
    return T
