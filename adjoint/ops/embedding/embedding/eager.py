"""`embedding` in plain PyTorch, on any device, with the bits of the kernels: see `adjoint.device.sums`."""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_groups
from adjoint.ops.embedding.table import is_counted


def gather(ids: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = weight[ids], and 0 where an id is out of range."""
    valid = (ids >= 0) & (ids < weight.shape[0])
    flat = out.view(ids.numel(), weight.shape[1])
    if weight.numel() == 0:
        flat.zero_()
        return
    torch.index_select(weight, 0, torch.where(valid, ids, 0).reshape(-1), out=flat)
    flat.masked_fill_(~valid.reshape(-1, 1), 0)


def gradient_rows(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients in the type sums run in."""
    flat = gradient.reshape(ids.numel(), gradient.shape[-1])
    keys = torch.where(is_counted(ids, rows, padding), ids, rows)
    return sum_groups(lambda places: flat.index_select(0, places).to(wide_dtype(flat.dtype)), keys, rows, tile)


def sparse(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int) -> tuple[Tensor, Tensor]:
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return present, sums.to(gradient.dtype)


def dense(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int, out: Tensor) -> None:
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    out.zero_().index_copy_(0, present, sums.to(out.dtype))


def into(gradient: Tensor, ids: Tensor, buffer: Tensor, padding: int, *, tile: int) -> None:
    present, sums = gradient_rows(gradient, ids, buffer.shape[0], padding, tile)
    both = torch.promote_types(sums.dtype, buffer.dtype)
    old = buffer.index_select(0, present).to(both)
    buffer.index_copy_(0, present, old.add_(sums).to(buffer.dtype))
