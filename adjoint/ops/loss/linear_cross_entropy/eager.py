"""`linear_cross_entropy` in plain PyTorch, on any device, in the wide type: block by block of rows."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adjoint.core.problem import wide_dtype
from adjoint.ops.loss.arguments import LABEL_OUT_OF_RANGE, Loss
from adjoint.ops.loss.eager import cap, reduce, row_blocks, row_losses, row_slopes, upstream_of_rows, write_targets

if TYPE_CHECKING:
    from adjoint.core.plan import Plan

HAS_WIDE_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether torch multiplies 16-bit matrices on a GPU and leaves the result in float32."""


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows @ weight.T if bias is None else torch.addmm(bias, rows, weight.T)


def _add_products(
    slopes: Tensor, rows: Tensor, weight: Tensor, g: Tensor | float, is_first: bool, sums: tuple[Tensor, ...]
) -> None:
    """A block's dx·weight·g, and dxᵀ·rows·g and Σ dx·g on top of the blocks before; those that have elements."""
    of_hidden, of_weight, of_bias = sums
    if of_hidden.numel():
        of_hidden.copy_((slopes @ weight).mul_(g))
    if of_weight.numel():
        if is_first and of_weight.data_ptr() % 64 == 0:
            torch.mm(slopes.T, rows * g, out=of_weight)
        else:  # where memory begins decides what a library does with it, and so the bits
            product = torch.mm(slopes.T, rows * g)
            of_weight.copy_(product if is_first else of_weight + product)
    if of_bias.numel():
        total = slopes.sum(0).mul_(g)
        of_bias.copy_(total if is_first else of_bias + total)


def forward(plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """The loss, log-probabilities where they are asked for, what a backward reads, and gradients that are kept."""
    hidden, weight, labels, bias, *numbers, _frozen, _keep = arguments
    loss = Loss(*numbers)
    out, log_probabilities, targets, sizes, count, hidden_sums, weight_sums, bias_sums = outputs
    classes, kind = weight.shape[0], sizes.dtype
    write_targets(labels, classes, loss, LABEL_OUT_OF_RANGE["linear_cross_entropy"], targets, count)
    rows = hidden.reshape(-1, weight.shape[1])
    losses = out.view(-1) if loss.reduction == "none" else sizes.new_empty(len(rows))
    kept = hidden_sums.numel() + weight_sums.numel() + bias_sums.numel()
    # float16 is divided by the number of labels later: see `plans.divides_later`.
    g = 1 / count if loss.reduction == "mean" and hidden.dtype != torch.float16 else 1.0
    by_row = hidden_sums.view(-1, weight.shape[1]) if hidden_sums.numel() else hidden_sums
    with torch.autocast(hidden.device.type, enabled=False):
        wide, wide_bias = weight.to(kind), None if bias is None else bias.to(kind)
        for block in row_blocks(len(rows), classes):
            of_block = rows[block].to(kind)
            z, slope = cap(_logits(of_block, wide, wide_bias), loss.softcap)
            chosen = log_probabilities.view(-1)[block] if log_probabilities.numel() else log_probabilities
            size, every = row_losses(z, targets[block], loss, (losses[block], chosen, sizes[block]))
            if kept:
                slopes = row_slopes(every.exp_(), slope, targets[block], size, 1.0, None, loss)
                sums = by_row[block] if by_row.numel() else by_row, weight_sums, bias_sums
                _add_products(slopes, of_block, wide, g, block.start == 0, sums)
    if len(rows) == 0:
        weight_sums.zero_()
        bias_sums.zero_()
    reduce(losses, count, loss, out)


def scaling(plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """Kept gradients times the upstream one, rounded."""
    dloss, _dlog, hidden_sums, weight_sums, bias_sums, count, *numbers, _frozen, dtype, _need = arguments
    loss = Loss(*numbers)
    factor = dloss / count[0] if loss.reduction == "mean" and dtype == "float16" else dloss
    for sums, gradient in zip((hidden_sums, weight_sums, bias_sums), outputs, strict=True):
        if gradient.numel():
            if gradient.dtype == sums.dtype == factor.dtype:
                torch.mul(sums, factor, out=gradient)
            else:
                gradient.copy_(sums.to(factor.dtype) * factor)


def again(plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """All gradients, from logits that are computed once more."""
    dloss, dlog_probabilities, hidden, weight, bias, targets, sizes, count, *numbers, _frozen, _need = arguments
    loss, kind = Loss(*numbers), wide_dtype(hidden.dtype)
    g, h = upstream_of_rows(dloss, dlog_probabilities, count, len(targets), loss)
    dhidden, dweight, dbias = outputs
    rows = hidden.reshape(-1, weight.shape[1])
    by_row = dhidden.view(-1, weight.shape[1]) if dhidden.numel() else dhidden
    sums = tuple(x if x.dtype == kind else x.new_empty(x.shape, dtype=kind) for x in (dweight, dbias))
    with torch.autocast(hidden.device.type, enabled=False):
        wide, wide_bias = weight.to(kind), None if bias is None else bias.to(kind)
        for block in row_blocks(len(rows), weight.shape[0]):
            of_block, size = rows[block].to(kind), sizes[block]
            z, slope = cap(_logits(of_block, wide, wide_bias), loss.softcap)
            of_labels = None if h is None else h[block]
            slopes = row_slopes(torch.exp(z - size[:, None]), slope, targets[block], size, g[block], of_labels, loss)
            into = by_row[block] if by_row.numel() else by_row, *sums
            _add_products(slopes, of_block, wide, 1.0, block.start == 0, into)
    for gradient, total in zip((dweight, dbias), sums, strict=True):
        if len(rows) == 0:
            gradient.zero_()
        elif gradient is not total:
            gradient.copy_(total)
