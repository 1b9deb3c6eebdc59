"""`linear_cross_entropy` in plain PyTorch, on any device, in the wide type: block by block of rows."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.core.layout import begins_as_allocated
from adjoint.core.problem import wide_dtype
from adjoint.ops.loss.arguments import LABEL_OUT_OF_RANGE, Loss
from adjoint.ops.loss.eager import (
    cap,
    part,
    row_blocks,
    row_results,
    row_slopes,
    tokens_from,
    tokens_of,
    upstream_of_rows,
    write_count,
    write_loss,
    write_targets,
)
from adjoint.ops.loss.linear_cross_entropy.kept import (
    NEED_BIAS,
    NEED_HIDDEN,
    NEED_WEIGHT,
    divides_later,
    hidden_sums_dtype,
    needed_sums,
)
from adjoint.ops.loss.plain import NOTHING, Plain, is_plain, plain_rows, plain_slopes, plain_targets, reduction_of

if TYPE_CHECKING:
    from adjoint.core.plan import Plan

HAS_WIDE_PRODUCTS = hasattr(torch.ops.aten.addmm, "dtype_out")
"""Whether torch multiplies 16-bit matrices on a GPU and leaves the result in float32."""


def _logits(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(rows, weight, bias)


def _multiply(left: Tensor, right: Tensor, out: Tensor, add: bool = False) -> None:
    """out = left·right, or on top of what is there; copied where the caller's memory begins elsewhere than torch's."""
    if add:
        out.add_(torch.mm(left, right))
    elif out.dtype == left.dtype and begins_as_allocated(out):
        torch.mm(left, right, out=out)
    else:
        out.copy_(torch.mm(left, right))


def _add_products(
    slopes: Tensor, rows: Tensor, weight: Tensor, g: Tensor | float | None, is_first: bool, sums: tuple[Tensor, ...]
) -> None:
    """A block's dx·weight·g, and dxᵀ·rows·g and Σ dx·g on top of the blocks before; those that have elements."""
    of_hidden, of_weight, of_bias = sums
    if of_hidden.numel():
        if g is None:
            _multiply(slopes, weight, of_hidden)
        else:
            of_hidden.copy_(torch.mm(slopes, weight).mul_(g))
    if of_weight.numel():
        _multiply(slopes.T, rows if g is None else rows * g, of_weight, add=not is_first)
    if of_bias.numel():
        total = slopes.sum(0) if g is None else slopes.sum(0).mul_(g)
        of_bias.copy_(total) if is_first else of_bias.add_(total)


def forward_plain(arguments: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """What `forward` writes, of a plain loss in torch's own calls; None of another, and where a label is wrong."""
    loss = Loss(*arguments[4:-2])
    if not is_plain(arguments[2], arguments[1].shape[0], loss):
        return None
    if not torch.is_autocast_enabled("cpu"):
        return _forward_plain(arguments, loss)
    with torch.autocast("cpu", enabled=False):
        return _forward_plain(arguments, loss)


def _forward_plain(arguments: tuple[Any, ...], loss: Loss) -> tuple[Tensor, ...] | None:
    hidden, weight, labels, bias, *_, frozen, keep = arguments
    element = hidden.dtype
    kind, target = wide_dtype(element), plain_targets(labels, loss)
    rows = hidden if hidden.dim() == 2 else hidden.reshape(labels.numel(), weight.shape[1])
    if element != kind:
        rows, weight, bias = rows.to(kind), weight.to(kind), None if bias is None else bias.to(kind)
    logits = _logits(rows, weight, bias)
    logarithms = torch.log_softmax(logits, 1, out=logits if loss.is_total else None)  # as in `row_results`
    plain = Plain.of(logarithms, target, loss)
    if plain is None:
        return None
    no_logs, no_sizes, of_hidden, of_weight, of_bias = NOTHING[kind]
    if element == torch.bfloat16:
        of_hidden = NOTHING[element][0]
    if not loss.is_total:
        targets, sizes = plain_rows(logits, logarithms, target, plain, loss.ignore_index)
        return plain.value_like(labels), no_logs, targets, sizes, plain.kept_count, of_hidden, of_weight, of_bias
    needed = needed_sums(loss, frozen, keep, bias is not None)
    slopes = logarithms  # not read, unless they are
    if needed:
        own = loss._replace(reduction="sum") if divides_later(element, loss) else loss
        of_loss = loss.ignore_index, reduction_of(own), plain.is_whole
        slopes = plain_slopes(logarithms, target, plain.number, *of_loss)
    if needed & NEED_HIDDEN:
        of_hidden = torch.mm(slopes, weight).to(hidden_sums_dtype(element))
        of_hidden = of_hidden if hidden.dim() == 2 else of_hidden.view(hidden.shape)
    if needed & NEED_WEIGHT:
        of_weight = torch.mm(slopes.T, rows)
    if needed & NEED_BIAS:
        of_bias = slopes.sum(0)
    no_targets = NOTHING[torch.int32][0]
    return plain.value, no_logs, no_targets, no_sizes, plain.kept_count, of_hidden, of_weight, of_bias


def forward(plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """The loss, log-probabilities where they are asked for, what a backward reads, and gradients that are kept."""
    with torch.autocast(arguments[0].device.type, enabled=False):
        _forward(arguments, outputs)


def _forward(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    hidden, weight, labels, bias, *numbers, _frozen, _keep = arguments
    loss = Loss(*numbers)
    out, log_probabilities, targets, sizes, count, hidden_sums, weight_sums, bias_sums = outputs
    (classes, columns), kind = weight.shape, count.dtype
    tokens = tokens_of(labels, classes, loss, LABEL_OUT_OF_RANGE["linear_cross_entropy"])
    write_count(tokens, count)
    if targets.numel():
        write_targets(tokens, targets)
    rows = hidden.reshape(labels.numel(), columns)
    kept = hidden_sums.numel() + weight_sums.numel() + bias_sums.numel()
    # float16 is divided by the number of labels later: see `divides_later`.
    g: Tensor | float | None = None
    if kept and loss.reduction == "mean" and hidden.dtype != torch.float16:
        g = 1 / max(1, len(rows)) if tokens.counted is None else count.reciprocal()
    by_row = hidden_sums.view(rows.shape) if hidden_sums.numel() else hidden_sums
    wide, wide_bias = weight.to(kind), None if bias is None else bias.to(kind)
    losses = [count.new_empty(0)]
    for block in row_blocks(len(rows), classes):
        of_block, own = part(rows, block).to(kind), tokens.part(block)
        z, slope = cap(_logits(of_block, wide, wide_bias), loss.softcap, kept > 0, overwrite=True)
        results = row_results(z, own, loss, into=z)
        losses.append(own.keep(results.losses))
        if sizes.numel():
            sizes[block] = own.keep(results.sizes)
        if loss.log_probabilities:
            log_probabilities.view(-1)[block] = own.keep(results.log_probabilities)
        if kept:
            slopes = row_slopes(results.p, slope, own, results.sizes, None, None, loss)
            sums = part(by_row, block) if by_row.numel() else by_row, weight_sums, bias_sums
            _add_products(slopes, of_block, wide, g, block.start == 0, sums)
            del slopes
        del z, slope, results  # before the next block takes memory
    if len(rows) == 0:
        weight_sums.zero_()
        bias_sums.zero_()
    write_loss(losses[1] if len(losses) == 2 else torch.cat(losses), count, loss, out)


def scaling(plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """Kept gradients times the upstream one, rounded."""
    dloss, _dlog, hidden_sums, weight_sums, bias_sums, count, *numbers, _frozen, dtype, _need = arguments
    factor = dloss / count[0] if dtype == "float16" and Loss(*numbers).reduction == "mean" else dloss
    for sums, gradient in zip((hidden_sums, weight_sums, bias_sums), outputs, strict=True):
        if gradient.numel():
            if gradient.dtype == sums.dtype == factor.dtype:
                torch.mul(sums, factor, out=gradient)
            else:
                gradient.copy_(sums.to(factor.dtype) * factor)


def again(plan: "Plan", arguments: tuple[Any, ...], outputs: tuple[Tensor, ...], _: Tensor | None) -> None:
    """All gradients, from logits that are computed once more."""
    with torch.autocast(arguments[2].device.type, enabled=False):
        _again(arguments, outputs)


def _again(arguments: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    dloss, dlog_probabilities, hidden, weight, bias, targets, sizes, count, *numbers, _frozen, _need = arguments
    loss, kind, columns = Loss(*numbers), wide_dtype(hidden.dtype), weight.shape[1]
    g, h = upstream_of_rows(dloss, dlog_probabilities, count, len(targets), loss)
    dhidden, dweight, dbias = outputs
    rows, tokens = hidden.reshape(len(targets), columns), tokens_from(targets)
    by_row = dhidden.view(rows.shape) if dhidden.numel() else dhidden
    sums = tuple(x if x.dtype == kind else x.new_empty(x.shape, dtype=kind) for x in (dweight, dbias))
    wide, wide_bias = weight.to(kind), None if bias is None else bias.to(kind)
    for block in row_blocks(len(rows), weight.shape[0]):
        of_block, size, own = part(rows, block).to(kind), part(sizes, block), None if h is None else part(h, block)
        z, slope = cap(_logits(of_block, wide, wide_bias), loss.softcap, True, overwrite=True)
        p = torch.softmax(z, -1, out=z)
        slopes = row_slopes(p, slope, tokens.part(block), size, part(g, block), own, loss)
        into = part(by_row, block) if by_row.numel() else by_row, *sums
        _add_products(slopes, of_block, wide, None, block.start == 0, into)
        del z, p, slope, slopes  # before the next block takes memory
    for gradient, total in zip((dweight, dbias), sums, strict=True):
        if len(rows) == 0:
            gradient.zero_()
        elif gradient is not total:
            gradient.copy_(total)
