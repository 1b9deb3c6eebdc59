"""Rows of tokens, and tokens from their rows, in plain PyTorch on any device, with the bits of the kernels."""

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.moe.layout.eager import lie_below


def entries_of(inverse: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row of each entry, which of them are among the rows at all, and which count."""
    row = inverse.reshape(-1)
    among = (row >= 0) & (row < len(row))
    return torch.where(among, row, 0), among, among & (row < offsets[-1])


def scatter(source: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, out: Tensor) -> None:
    """out[inverse[t, j]] = source[t], or weights[t, j] times it; 0 past the last offset."""
    slots = inverse.shape[-1]
    row, among, counts = entries_of(inverse, offsets)
    tokens = source.reshape(source.shape[:-1].numel(), source.shape[-1])
    terms = tokens if weights is None else tokens.to(wide_dtype(source.dtype))
    terms = terms.repeat_interleave(slots, 0)
    if weights is not None:
        terms = terms.mul_(weights.reshape(-1, 1).to(terms.dtype)).to(out.dtype)
    # Entries that name no row are written to one row past the end. To leave them out, one must wait for their number.
    padded = out.new_zeros(len(row) + 1, out.shape[1])
    padded.index_copy_(0, torch.where(among, row, len(row)).long(), torch.where(counts[:, None], terms, 0))
    out.copy_(padded[:-1])


def sum_rows(rows: Tensor, weights: Tensor | None, inverse: Tensor, offsets: Tensor, out: Tensor) -> None:
    """out[t] = Σ over j of rows[inverse[t, j]], or of weights[t, j] times it, in the order of j."""
    tokens, slots, columns = inverse.shape[:-1].numel(), inverse.shape[-1], rows.shape[1]
    kind, y, row, counts = wide_dtype(rows.dtype), out.view(tokens, columns), inverse.reshape(-1), None
    if not lie_below(row, offsets[-1]):
        row, _, counts = entries_of(inverse, offsets)
        counts = counts.view(tokens, slots)
    if weights is not None:
        weights = weights.reshape(tokens, slots, 1).to(kind)
    total = y.zero_() if y.dtype == kind else y.new_zeros(y.shape, dtype=kind)
    for slot, of_slot in enumerate(row.view(tokens, slots).unbind(1)):
        term = rows.index_select(0, of_slot).to(kind)
        if weights is not None:
            term *= weights[:, slot]
        total += term if counts is None else term.masked_fill_(~counts[:, slot, None], 0)
    if total is not y:
        y.copy_(total)
