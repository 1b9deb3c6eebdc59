"""The gradient of combine's weights in plain PyTorch, on any device, with the bits of the kernels."""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.moe.token_rows.eager import entries_of


def dots(gradient: Tensor, rows: Tensor, inverse: Tensor, offsets: Tensor, width: int, out: Tensor) -> None:
    """out[t, j] = gradient[t] · rows[inverse[t, j]]. Columns `width` apart are added in order, and then neighbours."""
    slots, columns = inverse.shape[-1], rows.shape[1]
    row, _, counts = entries_of(inverse, offsets)
    flat, tokens = out.view(-1), gradient.reshape(gradient.shape[:-1].numel(), columns)
    entries = torch.arange(len(row), device=row.device)
    for some in entries.split(max(1, 2**22 // max(1, columns))):
        products = tokens.index_select(0, some // slots).to(wide_dtype(rows.dtype))
        products = products.mul_(rows.index_select(0, row[some]))
        products = torch.nn.functional.pad(products, (0, -columns % width)).view(len(some), -(-columns // width), width)
        total = products.new_zeros(len(some), width)
        for index in range(products.shape[1]):
            total += products[:, index]
        while total.shape[1] > 1:
            total = total[:, 0::2] + total[:, 1::2]
        flat[some] = total[:, 0].masked_fill_(~counts[some], 0).to(flat.dtype)
