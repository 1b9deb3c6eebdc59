"""`embedding` in plain PyTorch, on any device, with the bits of the kernels: see `adjoint.device.sums`."""

from functools import cache

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.device.sums import sum_groups
from adjoint.ops.embedding.table import is_counted


def gather(ids: Tensor, weight: Tensor, out: Tensor | None) -> tuple[Tensor, bool]:
    """weight[ids], with 0 for ids out of range, in `out` unless it is None; and whether all ids are in range.

    On the CPU torch itself checks the ids. On other devices the second result is always False, because nobody waits for
    it.
    """
    on_cpu = ids.is_cpu
    if on_cpu and out is None and ids.dim() == 1 and weight.numel():
        try:
            return weight.index_select(0, ids), True
        except IndexError:
            pass
    if out is None:
        out = weight.new_empty((*ids.shape, weight.shape[1]))
    flat, places = out.view(ids.numel(), weight.shape[1]), ids.reshape(-1)
    if on_cpu and weight.numel():
        try:
            torch.index_select(weight, 0, places, out=flat)
            return out, True
        except IndexError:
            pass
    valid = (places >= 0) & (places < weight.shape[0])
    if weight.numel():
        torch.index_select(weight, 0, torch.where(valid, places, 0), out=flat)
        flat.masked_fill_(~valid.reshape(-1, 1), 0)
    return out, on_cpu and bool(valid.all())


def gradient_rows(gradient: Tensor, ids: Tensor, rows: int, padding: int, tile: int) -> tuple[Tensor, Tensor]:
    """The rows that occur, ascending, and their gradients in the type of the sums."""
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
    """Writes the sum of each group's terms, as `sum_groups` computes it, rounded once. Empty groups and the padding get
    0."""
    _add_in_order(terms, keys, out)
    if padding >= 0:
        out[padding] = 0
    if keys.numel() <= tile:
        return
    counts = torch.bincount(keys, minlength=len(out))
    if padding >= 0:
        counts[padding] = 0
    if counts.max() > tile:
        places = (counts > tile)[keys].nonzero()[:, 0]
        chosen, sums = _sum_tiles(terms.index_select(0, places).to(wide_dtype(terms.dtype)), keys[places], tile)
        out.index_copy_(0, chosen, sums.to(out.dtype))


def _add_in_order(terms: Tensor, keys: Tensor, out: Tensor) -> None:
    """Adds the terms of each group one after the other, beginning with 0, and rounds the sum once."""
    if scatters_in_order(terms.dtype, terms.shape[1]) and out.is_contiguous():
        out.zero_().scatter_add_(0, keys.unsqueeze(1).expand_as(terms), terms.contiguous())
    else:
        wide = terms.to(wide_dtype(terms.dtype))
        out.copy_(torch.ops.aten.embedding_dense_backward(wide, keys, len(out), -1, False))


def _sum_tiles(terms: Tensor, keys: Tensor, tile: int) -> tuple[Tensor, Tensor]:
    """The keys, ascending, with the sum of the terms of each. Terms are added in tiles, then the sums of tiles are."""
    keys, order = keys.sort(stable=True)
    terms = terms.index_select(0, order)
    while True:
        present, group, lengths = keys.unique_consecutive(return_inverse=True, return_counts=True)
        tiles = (lengths + (tile - 1)).div(tile, rounding_mode="floor")
        rank = torch.arange(len(keys), device=keys.device) - (lengths.cumsum(0) - lengths)[group]
        tile_of_term = (tiles.cumsum(0) - tiles)[group] + rank.div(tile, rounding_mode="floor")
        keys = present.repeat_interleave(tiles)
        sums = terms.new_empty(len(keys), terms.shape[1])
        _add_in_order(terms, tile_of_term, sums)
        if len(keys) == len(present):
            return present, sums
        terms = sums


@cache
def scatters_in_order(dtype: torch.dtype, columns: int) -> bool:
    """Whether torch's `scatter_add_` adds rows one after the other, beginning with 0, and rounds the sum once.

    It does so in builds that sort the rows first, which they do for at least 16 columns. So this is found by trying.
    """
    if columns < 16:
        return False
    rows = torch.linspace(-1, 3, 97 * columns, dtype=torch.float64, device="cpu").sin_().mul_(64)
    rows = rows.view(97, columns).to(dtype)
    rows[0] = -0.0
    keys = torch.arange(97, device="cpu").mul_(5).remainder_(7)
    keys[0] = 7
    expected = rows.new_zeros(8, columns, dtype=wide_dtype(dtype))
    for key, row in zip(keys.tolist(), rows, strict=True):
        expected[key] += row
    sums = rows.new_zeros(8, columns).scatter_add_(0, keys[:, None].expand_as(rows), rows)
    return torch.equal(sums, expected.to(dtype)) and not bool(sums[7].signbit().any())


def sparse(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int) -> tuple[Tensor, Tensor]:
    present, sums = gradient_rows(gradient, ids, rows, padding, tile)
    return present, sums.to(gradient.dtype)


def dense(gradient: Tensor, ids: Tensor, rows: int, padding: int, *, tile: int, out: Tensor | None) -> Tensor:
    """The gradient of every row, in `out` unless it is None."""
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
