"""`embedding` in plain PyTorch, on any device, with the bits of the kernels: see `adjoint.device.sums`."""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_groups
from adjoint.ops.embedding.table import is_counted


def are_in_range(ids: Tensor, rows: int) -> bool:
    """Whether all ids name a row; waits for the device."""
    if ids.numel() == 0:
        return True
    smallest, largest = ids.aminmax()
    return smallest.item() >= 0 and largest.item() < rows


def gather(ids: Tensor, weight: Tensor, out: Tensor, are_right: bool = False) -> None:
    """out = weight[ids], and 0 where an id is out of range; `are_right`: none is."""
    flat = out.view(ids.numel(), weight.shape[1])
    if weight.numel() == 0:
        flat.zero_()
        return
    if are_right:
        torch.index_select(weight, 0, ids.reshape(-1), out=flat)
        return
    valid = (ids >= 0) & (ids < weight.shape[0])
    torch.index_select(weight, 0, torch.where(valid, ids, 0).reshape(-1), out=flat)
    flat.masked_fill_(~valid.reshape(-1, 1), 0)


def gradient_rows(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients in the type sums run in."""
    flat = gradient.reshape(ids.numel(), gradient.shape[-1])
    counted = is_counted(ids, rows, padding).reshape(-1)
    if flat.numel() and flat.device.type == "cpu" and counted.all():
        present, group = ids.reshape(-1).unique(return_inverse=True)
        return present.long(), _sum_on_the_cpu(flat.to(wide_dtype(flat.dtype)), group, len(present), -1, tile)
    keys = torch.where(counted, ids.reshape(-1), rows)
    return sum_groups(lambda places: flat.index_select(0, places).to(wide_dtype(flat.dtype)), keys, rows, tile)


def _sum_on_the_cpu(terms: Tensor, keys: Tensor, groups: int, padding: int, tile: int) -> Tensor:
    """The sum of the terms of each group, 0 for none: as `sum_groups` has it, of terms that are as wide as their sums.

    torch adds the terms of a group one after the other, beginning with 0: that is the sum of one tile.
    """
    sums = torch.ops.aten.embedding_dense_backward(terms, keys, groups, padding, False)
    is_long = torch.bincount(keys, minlength=groups) > tile
    if 0 <= padding < groups:
        is_long[padding] = False
    if is_long.any():
        places = is_long[keys].nonzero()[:, 0]
        chosen, tiled = sum_groups(lambda some: terms.index_select(0, places[some]), keys[places], groups, tile)
        sums.index_copy_(0, chosen, tiled)
    return sums  # type: ignore[no-any-return]


def sparse(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int) -> tuple[Tensor, Tensor]:
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return present, sums.to(gradient.dtype)


def dense(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int, out: Tensor | None) -> Tensor:
    """The gradient of every row, into memory where it is given."""
    is_wide, on_cpu = gradient.dtype == wide_dtype(gradient.dtype), gradient.device.type == "cpu"
    if out is None and gradient.numel() and is_wide and on_cpu and are_in_range(ids, rows):
        flat = gradient.reshape(ids.numel(), gradient.shape[-1])
        return _sum_on_the_cpu(flat, ids.reshape(-1), rows, padding, tile)
    out = gradient.new_empty(rows, gradient.shape[-1]) if out is None else out
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return out.zero_().index_copy_(0, present, sums.to(out.dtype))


def into(gradient: Tensor, ids: Tensor, buffer: Tensor, padding: int, *, tile: int) -> None:
    present, sums = gradient_rows(gradient, ids, buffer.shape[0], padding, tile)
    both = torch.promote_types(sums.dtype, buffer.dtype)
    old = buffer.index_select(0, present).to(both)
    buffer.index_copy_(0, present, old.add_(sums).to(buffer.dtype))
