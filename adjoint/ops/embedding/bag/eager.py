"""`embedding_bag` in plain PyTorch, with the bits of the kernels."""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import report
from adjoint.core.problem import wide_dtype
from adjoint.device.sums import Terms, sum_groups, sum_segments
from adjoint.ops.embedding.table import BAG_ID_OUT_OF_RANGE, OFFSETS_OUT_OF_ORDER


class Bags(NamedTuple):
    """The places of each bag's entries, and which of them count."""

    ids: Tensor
    starts: Tensor
    ends: Tensor
    bag_of: Tensor
    counts: Tensor

    @property
    def used(self) -> Tensor:
        """How many entries of each bag count."""
        return torch.bincount(self.bag_of[self.counts], minlength=len(self.starts)).to(torch.int32)


def find_bags(
    ids: Tensor, offsets: Tensor | None, rows: int, padding: int, include_last_offset: bool, raises: bool
) -> Bags:
    """Reads ids and offsets. Values out of range are reported if `raises`, and never used."""
    flat, device = ids.reshape(-1), ids.device
    place = torch.arange(len(flat), device=device)
    if offsets is None:
        number, width = ids.shape
        starts = torch.arange(number, device=device) * width
        ends = starts + width
        bag_of = place // max(1, width)
        inside = torch.ones_like(place, dtype=torch.bool)
    else:
        last = offsets if include_last_offset else torch.cat((offsets, offsets.new_full((1,), len(flat))))
        if raises and len(offsets):
            wrong = torch.cat((last[:1] != 0, (last[1:] < last[:-1]) | (last[1:] > len(flat))))
            report(OFFSETS_OUT_OF_ORDER, last, wrong)
        bounds = last.long().clamp(0, len(flat)).cummax(0).values
        starts, ends = bounds[:-1], bounds[1:]
        number = len(starts)
        bag_of = torch.searchsorted(bounds[: len(offsets)], place, right=True) - 1
        inside = (bag_of >= 0) & (bag_of < number)
        bag_of = bag_of.clamp(0, max(0, number - 1))
    valid = (flat >= 0) & (flat < rows)
    if raises:
        report(BAG_ID_OUT_OF_RANGE, flat, inside & ~valid)
    return Bags(flat, starts, ends, bag_of, inside & valid & (flat != padding))


def forward(
    bags: Bags, weight: Tensor, per_sample_weights: Tensor | None, mode: str, tile: int, out: Tensor, extra: Tensor
) -> None:
    """Writes the sum, mean or maximum of each bag's rows to `out`.

    `extra` gets the entries that have the maximum, or the number of entries that count.
    """
    if out.numel() == 0:
        if mode == "mean":
            extra.copy_(bags.used)
        return
    if weight.shape[0] == 0 or len(bags.ids) == 0:
        out.zero_()
        extra.fill_(-1 if mode == "max" else 0)
        return
    wide, rows = wide_dtype(weight.dtype), torch.where(bags.counts, bags.ids, 0)
    factors = None if per_sample_weights is None else per_sample_weights.reshape(-1).to(wide)

    def terms(places: Tensor) -> Tensor:
        values = weight.index_select(0, rows[places]).to(wide)
        if factors is not None:
            values *= factors[places][:, None]
        return values.masked_fill_(~bags.counts[places][:, None], 0)

    if mode == "max":
        _maximum(bags, terms, out, extra)
        return
    filled = (bags.ends - bags.starts).nonzero()[:, 0]
    begins = torch.cat((bags.starts[filled], bags.ends[filled][-1:]))
    sums = torch.zeros(out.shape, dtype=wide, device=out.device)
    if len(filled):
        sums.index_copy_(0, filled, sum_segments(terms, begins, tile))
    if mode == "mean":
        extra.copy_(bags.used)
        sums /= extra.clamp_min(1).to(wide)[:, None]
    out.copy_(sums)


def _maximum(bags: Bags, terms: Terms, out: Tensor, winners: Tensor) -> None:
    """The largest entry of each bag and column, and the first of equal ones. NaN is larger than all numbers."""
    places = bags.counts.nonzero()[:, 0]
    values = terms(places)
    bag = bags.bag_of[places][:, None].expand_as(values)
    shape = (len(bags.starts), values.shape[1])
    nan = values.isnan()
    number = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = number.new_full(shape, -torch.inf).scatter_reduce_(0, bag, number, "amax")
    has_nan = torch.zeros(shape, dtype=torch.int8, device=out.device).scatter_reduce_(
        0, bag, nan.to(torch.int8), "amax"
    )
    among = torch.where(has_nan.gather(0, bag).bool(), nan, number == best.gather(0, bag))
    nobody = len(bags.ids)
    first = torch.full(shape, nobody, device=out.device)
    first.scatter_reduce_(0, bag, torch.where(among, places[:, None], nobody), "amin")
    winners.copy_(torch.where(first == nobody, -1, first))
    row = torch.empty(nobody + 1, dtype=torch.int64, device=out.device).fill_(len(places))
    row[places] = torch.arange(len(places), device=out.device)
    padded = torch.cat((values, values.new_zeros(1, shape[1])))
    out.copy_(padded.gather(0, row[first]))


def backward(
    bags: Bags, gradient: Tensor, per_sample_weights: Tensor | None, extra: Tensor, mode: str, tile: int, out: Tensor
) -> None:
    """The gradient of the table."""
    wide, rows = wide_dtype(gradient.dtype), out.shape[0]
    factors = None
    if mode == "mean":
        factors = (1 / extra.clamp_min(1).to(wide))[bags.bag_of] if len(extra) else None
    elif per_sample_weights is not None:
        factors = per_sample_weights.reshape(-1).to(wide)

    def terms(places: Tensor) -> Tensor:
        bag = bags.bag_of[places]
        term = gradient.index_select(0, bag).to(wide)
        if factors is not None:
            term *= factors[places][:, None]
        if mode == "max":
            term.masked_fill_(extra.index_select(0, bag) != places[:, None], 0)
        return term

    out.zero_()
    if out.numel():
        present, sums = sum_groups(terms, torch.where(bags.counts, bags.ids, rows), rows, tile)
        out.index_copy_(0, present, sums.to(out.dtype))


def weights_backward(bags: Bags, gradient: Tensor, weight: Tensor, block: int, out: Tensor) -> None:
    """gradient[bag of n] · weight[ids[n]]: blocks of columns are added one after the other, and the rest by halves."""
    flat = out.view(-1)
    flat.zero_()
    places = bags.counts.nonzero()[:, 0]
    columns = weight.shape[1]
    if len(places) == 0 or columns == 0:
        return
    step = max(1, 2**22 // columns)
    for some in places.split(step):
        rows = gradient.index_select(0, bags.bag_of[some]).to(wide_dtype(weight.dtype))
        products = rows.mul_(weight.index_select(0, bags.ids[some]))
        products = torch.nn.functional.pad(products, (0, -columns % block)).view(len(some), -1, block)
        total = products.new_zeros(len(some), block)
        for index in range(products.shape[1]):
            total += products[:, index]
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        flat[some] = total[:, 0].to(flat.dtype)
