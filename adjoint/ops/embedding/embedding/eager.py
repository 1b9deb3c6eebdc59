"""`embedding` in plain PyTorch, on any device, with the bits of the kernels: see `adjoint.device.sums`."""

from functools import cache

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_groups
from adjoint.ops.embedding.table import is_counted


def gather(ids: Tensor, weight: Tensor, out: Tensor) -> bool:
    """out = weight[ids], and 0 where an id is out of range; on the CPU, whether none is. Elsewhere nobody waits to say.

    On the CPU torch itself looks whether ids are in range.
    """
    flat, places = out.view(ids.numel(), weight.shape[1]), ids.reshape(-1)
    if weight.numel() and ids.device.type == "cpu":
        try:
            torch.index_select(weight, 0, places, out=flat)
            return True
        except IndexError:
            pass
    valid = (places >= 0) & (places < weight.shape[0])
    if weight.numel():
        torch.index_select(weight, 0, torch.where(valid, places, 0), out=flat)
        flat.masked_fill_(~valid.reshape(-1, 1), 0)
    return ids.device.type == "cpu" and bool(valid.all())


def gradient_rows(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients in the type sums run in."""
    flat = gradient.reshape(ids.numel(), gradient.shape[-1])
    counted = is_counted(ids, rows, padding).reshape(-1)
    if flat.numel() and flat.device.type == "cpu" and counted.all():
        present, group = ids.reshape(-1).unique(return_inverse=True)
        sums = flat.new_empty(len(present), flat.shape[1], dtype=wide_dtype(flat.dtype))
        _sum_on_the_cpu(flat.to(sums.dtype), group, sums, tile)
        return present.long(), sums
    keys = torch.where(counted, ids.reshape(-1), rows)
    return sum_groups(lambda places: flat.index_select(0, places).to(wide_dtype(flat.dtype)), keys, rows, tile)


def _sum_on_the_cpu(terms: Tensor, keys: Tensor, out: Tensor, tile: int, padding: int = -1) -> None:
    """The sum of the terms of each group as `sum_groups` has it, rounded once, and 0 for none and for the padding.

    torch adds the terms of a group one after the other, beginning with 0: that is the sum of one tile.
    """
    groups, wide = len(out), wide_dtype(terms.dtype)
    if scatters_in_order(terms.dtype, terms.shape[1]) and out.is_contiguous():
        out.zero_().scatter_add_(0, keys[:, None].expand_as(terms), terms.contiguous())
    else:
        out.copy_(torch.ops.aten.embedding_dense_backward(terms.to(wide), keys, groups, -1, False))
    is_long = torch.bincount(keys, minlength=groups) > tile
    if padding >= 0:
        out[padding], is_long[padding] = 0, False
    if is_long.any():
        places = is_long[keys].nonzero()[:, 0]
        chosen, sums = sum_groups(lambda some: terms.index_select(0, places[some]).to(wide), keys[places], groups, tile)
        out.index_copy_(0, chosen, sums.to(out.dtype))


@cache
def scatters_in_order(dtype: torch.dtype, columns: int) -> bool:
    """Whether torch's `scatter_add_` of rows adds one after the other, beginning with 0, and rounds the sum once.

    It does in builds that sort the rows first, which takes at least 16 columns. So it is tried.
    """
    if columns < 16:
        return False
    rows = torch.linspace(-1, 3, 97 * columns, dtype=torch.float64).sin_().mul_(64).view(97, columns).to(dtype)
    rows[0] = -0.0
    keys = torch.arange(97).mul_(5).remainder_(7)
    keys[0] = 7
    expected = torch.zeros(8, columns, dtype=wide_dtype(dtype))
    for key, row in zip(keys.tolist(), rows, strict=True):
        expected[key] += row
    sums = torch.zeros(8, columns, dtype=dtype).scatter_add_(0, keys[:, None].expand_as(rows), rows)
    return torch.equal(sums, expected.to(dtype)) and not bool(sums[7].signbit().any())


def sparse(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int) -> tuple[Tensor, Tensor]:
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return present, sums.to(gradient.dtype)


def dense(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int, out: Tensor | None) -> Tensor:
    """The gradient of every row, into memory where it is given."""
    out = gradient.new_empty(rows, gradient.shape[-1]) if out is None else out
    if gradient.numel() and gradient.device.type == "cpu" and _are_in_range(ids, rows):
        _sum_on_the_cpu(gradient.reshape(ids.numel(), -1), ids.reshape(-1).long(), out, tile, padding)
        return out
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return out.zero_().index_copy_(0, present, sums.to(out.dtype))


def _are_in_range(ids: Tensor, rows: int) -> bool:
    smallest, largest = ids.aminmax()
    return smallest.item() >= 0 and largest.item() < rows


def into(gradient: Tensor, ids: Tensor, buffer: Tensor, padding: int, *, tile: int) -> None:
    present, sums = gradient_rows(gradient, ids, buffer.shape[0], padding, tile)
    both = torch.promote_types(sums.dtype, buffer.dtype)
    old = buffer.index_select(0, present).to(both)
    buffer.index_copy_(0, present, old.add_(sums).to(buffer.dtype))
