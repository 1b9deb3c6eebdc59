"""The losses over rows of logits in plain PyTorch, on any device, in the wide type; without waiting for a GPU."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import Fault, report
from adjoint.core.kernels import interpreting
from adjoint.core.op.operator import is_batched
from adjoint.core.problem import wide_dtype
from adjoint.ops.loss.arguments import Loss
from adjoint.ops.loss.plain import NOTHING, Plain, is_plain, plain_rows, plain_slopes, plain_targets, reduction_of

BLOCK_ELEMENTS = 2**24
"""Logits that are in memory at once, in the wide type, beside those of the caller."""


def row_blocks(rows: int, columns: int) -> list[slice]:
    """Rows in blocks of about BLOCK_ELEMENTS elements."""
    step = max(1, BLOCK_ELEMENTS // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


def part(tensor: Tensor, rows: slice) -> Tensor:
    """Some rows of a tensor; itself where that is all of them, which costs nothing."""
    return tensor if rows.stop - rows.start == len(tensor) else tensor[rows]


class Tokens(NamedTuple):
    """The class of each token, 0 where it does not count; and which tokens do, None where all of them do."""

    target: Tensor
    counted: Tensor | None

    def part(self, rows: slice) -> "Tokens":
        return Tokens(part(self.target, rows), None if self.counted is None else part(self.counted, rows))

    def keep(self, results: Tensor) -> Tensor:
        """Results of each token, 0 where it does not count."""
        return results if self.counted is None else torch.where(self.counted, results, 0.0)


def tokens_of(labels: Tensor, classes: int, loss: Loss, fault: Fault) -> Tokens:
    """The tokens of labels; one out of range counts for nothing, and is reported."""
    if labels.is_cpu and labels.numel() and not loss.shift:
        low, high = (x.item() for x in labels.aminmax())
        has_ignored = 0 <= loss.ignore_index < classes and bool((labels == loss.ignore_index).any())
        if low >= 0 and high < classes and not has_ignored:
            return Tokens(labels.reshape(-1).long(), None)
    labels = labels.long()  # torch would wrap an ignore_index that int32 does not have around to one of its labels
    used = labels != loss.ignore_index
    if loss.shift:
        used = used & (torch.arange(labels.shape[-1], device=labels.device) > 0)
    wrong = used & ((labels < 0) | (labels >= classes))
    report(fault, labels, wrong)
    counted = used & ~wrong
    index = torch.where(counted, labels, 0)
    if loss.shift:
        index, counted = (torch.cat((x[..., 1:], torch.zeros_like(x[..., :1])), -1) for x in (index, counted))
    return Tokens(index.reshape(-1), counted.reshape(-1))


def write_count(tokens: Tokens, count: Tensor) -> None:
    """The number of tokens that count, at least 1."""
    if tokens.counted is None:
        count.fill_(len(tokens.target))
    else:
        count.copy_(tokens.counted.sum().clamp_min(1))


def write_targets(tokens: Tokens, targets: Tensor) -> None:
    """The class of each token, −1 where it does not count."""
    targets.copy_(tokens.target if tokens.counted is None else torch.where(tokens.counted, tokens.target, -1))


def tokens_from(targets: Tensor) -> Tokens:
    """The tokens of what `write_targets` wrote."""
    counted = targets >= 0
    if targets.is_cpu and bool(counted.all()):
        return Tokens(targets.long(), None)
    return Tokens(targets.clamp_min(0).long(), counted)


def widened(x: Tensor, kind: torch.dtype, softcap: float, needs_slope: bool) -> tuple[Tensor, Tensor | None, bool]:
    """z of logits, dz/dx where there is a cap and it is needed, and whether z is in memory of its own."""
    z = x.to(kind)
    return *cap(z, softcap, needs_slope, overwrite=z is not x), z is not x or softcap > 0


def cap(x: Tensor, softcap: float, needs_slope: bool, overwrite: bool) -> tuple[Tensor, Tensor | None]:
    """z, and dz/dx where there is a cap and it is needed; z is written over x on request."""
    if not softcap:
        return x, None
    share = torch.div(x, softcap, out=x if overwrite else None).tanh_()
    slope = share.square().neg_().add_(1) if needs_slope else None
    return share.mul_(softcap), slope


_SMALLEST = {kind: torch.finfo(kind).smallest_normal for kind in (torch.float32, torch.float64)}
_ROOTS = {torch.float32: 1e18, torch.float64: 1e150}
"""Of the wide types: the smallest normal numbers, and numbers whose squares they have."""


class RowResults(NamedTuple):
    """The loss, the label's log-probability and L of each row, and p, all probabilities."""

    losses: Tensor
    log_probabilities: Tensor
    sizes: Tensor
    p: Tensor


def row_results(z: Tensor, tokens: Tokens, loss: Loss, into: Tensor | None = None) -> RowResults:
    """The results of all rows of logits, also of those that do not count. p is written to `into`, which may be z.

    An exponential is computed once: a row's L is that of any of its classes, z − log p. On the CPU it is the label's
    class, unless p is below the smallest normal number there; otherwise it is the likeliest class.
    """
    index = tokens.target.unsqueeze(1)
    of_label = z.gather(1, index).squeeze(1)
    mean = z.mean(-1) if loss.label_smoothing else None
    top = z.amax(-1) if into is z or not z.is_cpu else None
    p = torch.softmax(z, -1, out=into)
    p_label = p.gather(1, index).squeeze(1)
    if z.is_cpu and z.shape[0] and p_label.min().item() >= _SMALLEST[z.dtype]:
        chosen = p_label.log_()
        size = of_label - chosen
    else:
        top, p_top = z.amax(-1) if top is None else top, p.amax(-1).log_()
        size, chosen = top - p_top, of_label - top + p_top
    losses = -chosen
    if mean is not None:
        losses = (1 - loss.label_smoothing) * losses + loss.label_smoothing * (size - mean)
    if loss.z_loss:
        # The square of a large L may overflow where its product with z_loss does not.
        square = torch.where(size.abs() < _ROOTS[z.dtype], loss.z_loss * size.square(), loss.z_loss * size * size)
        losses = losses + square
    return RowResults(losses, chosen, size, p)


def row_slopes(
    p: Tensor, slope: Tensor | None, tokens: Tokens, size: Tensor, g: Tensor | None, h: Tensor | None, loss: Loss
) -> Tensor:
    """dx of rows, written over p, for g of the loss, 1 where it is None, and h of the label's log-probability."""
    of_p = g
    if loss.z_loss:
        more = 1 + 2 * loss.z_loss * size
        of_p = more if g is None else g * more
    of_label = torch.full_like(size, loss.label_smoothing - 1) if g is None else g * (loss.label_smoothing - 1)
    if h is not None:
        of_p, of_label = (1 if of_p is None else of_p) - h, of_label + h
    if of_p is not None:
        p.mul_(of_p.unsqueeze(1))
    p.scatter_add_(1, tokens.target.unsqueeze(1), of_label.unsqueeze(1))
    if loss.label_smoothing:
        share = loss.label_smoothing / p.shape[1]
        p.sub_(share if g is None else (share * g).unsqueeze(1))
    if slope is not None:
        p.mul_(slope)
    if tokens.counted is None:
        return p
    if p.is_cpu:
        return p.index_fill_(0, tokens.counted.logical_not().nonzero().view(-1), 0.0)
    return p.masked_fill_(~tokens.counted[:, None], 0.0)


def write_loss(losses: Tensor, count: Tensor, loss: Loss, out: Tensor) -> None:
    """The loss of all tokens from that of each."""
    if loss.reduction == "none":
        out.copy_(losses.view(out.shape))
    elif loss.reduction == "mean":
        torch.div(losses.sum(), count[0], out=out)
    else:
        torch.sum(losses, 0, out=out)


def upstream_of_rows(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, count: Tensor, tokens: int, loss: Loss
) -> tuple[Tensor, Tensor | None]:
    """g of the loss and h of the log-probability of each row."""
    if dloss is None:
        g = count.new_zeros(tokens)
    else:
        g = dloss / count if loss.reduction == "mean" else dloss
        g = g.reshape(-1).expand(tokens)
    return g, None if dlog_probabilities is None else dlog_probabilities.reshape(-1)


def reciprocal_of(count: Tensor, tokens: int, loss: Loss) -> Tensor | None:
    """What each row's part of one loss is multiplied by, for an upstream gradient of 1; None for 1."""
    return count.reciprocal().expand(tokens) if loss.reduction == "mean" else None


# ---------------------------------------------------------------------------------- logits that exist


def forward_plain(arguments: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """What `forward` writes, of a plain loss in torch's own calls; None of another, and where a label is wrong."""
    logits, labels, *options, with_slopes, keep = arguments
    loss = Loss(*options)
    if not is_plain(labels, logits.shape[-1], loss):
        return None
    target = plain_targets(labels, loss)
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    if rows.dtype.itemsize == 2:
        rows = rows.float()
    logarithms = torch.log_softmax(rows, 1)
    plain = Plain.of(logarithms, target, loss)
    if plain is None:
        return None
    value, (no_logs, no_sizes, no_count, no_slopes, _) = plain.value_like(labels), NOTHING[rows.dtype]
    if with_slopes:
        slopes = no_slopes
        if keep:
            slopes = plain_slopes(
                logarithms, target, plain.number, loss.ignore_index, reduction_of(loss), plain.is_whole
            )
            slopes = slopes if logits.dim() == 2 else slopes.view(logits.shape)
        return value, no_logs, NOTHING[torch.int32][0], no_sizes, no_count, slopes
    targets, sizes = plain_rows(rows, logarithms, target, plain, loss.ignore_index)
    return value, no_logs, targets, sizes, plain.kept_count, no_slopes


def _backward_plain(logits: Tensor, targets: Tensor, count: Tensor, loss: Loss) -> Tensor:
    """The same, of a backward: dx for an upstream gradient of 1."""
    rows, counted = logits.reshape(-1, logits.shape[-1]).to(count.dtype), count.item()
    is_whole = 1 != counted == len(targets)  # a count of 1 may be that of no label
    logarithms = torch.log_softmax(rows, 1)
    return plain_slopes(logarithms, targets.long(), count, -1, reduction_of(loss), is_whole)


def forward(logits: Tensor, labels: Tensor, loss: Loss, fault: Fault, outputs: tuple[Tensor, ...]) -> None:
    """Into the loss, log-probabilities where they are asked for, and what there is memory for: targets, L, slopes."""
    out, log_probabilities, targets, sizes, count, slopes = outputs
    classes = logits.shape[-1]
    tokens = tokens_of(labels, classes, loss, fault)
    count = count if count.numel() else count.new_empty(1)
    write_count(tokens, count)
    if targets.numel():
        write_targets(tokens, targets)
    rows, into = logits.reshape(-1, classes), slopes.view(-1, classes)
    losses = [count.new_empty(0)]
    g = reciprocal_of(count, len(rows), loss)
    for block in row_blocks(*rows.shape):
        of_block, x = tokens.part(block), part(rows, block)
        memory = part(into, block) if slopes.numel() else None
        if memory is not None and memory.dtype != x.dtype:
            x = memory.copy_(x)
        z, slope, is_own = widened(x, count.dtype, loss.softcap, memory is not None)
        results = row_results(z, of_block, loss, z if memory is None and is_own else memory)
        losses.append(of_block.keep(results.losses))
        if sizes.numel():
            part(sizes, block).copy_(of_block.keep(results.sizes))
        if slopes.numel():
            row_slopes(results.p, slope, of_block, results.sizes, None if g is None else part(g, block), None, loss)
        if loss.log_probabilities:
            log_probabilities.view(-1)[block] = of_block.keep(results.log_probabilities)
        del x, z, slope, results  # before the next block takes memory
    write_loss(losses[1] if len(losses) == 2 else torch.cat(losses), count, loss, out)


def keeps_slopes(logits: Any, loss: Loss) -> bool:
    """Whether the forward keeps dx for upstream gradients of 1 in place of the logits, in the wide type: on the CPU,
    where the logits are few, and a token's loss alone has an upstream gradient."""
    return (
        not torch.compiler.is_compiling()
        and not loss.log_probabilities
        and isinstance(logits, Tensor)
        and logits.is_cpu
        and logits.numel() <= BLOCK_ELEMENTS
        and not interpreting()
    )


def times_upstream(slopes: Tensor, dloss: Tensor, out: Tensor) -> None:
    """dx for upstream gradients of 1 times those of the loss, one or one for each row; rounded to the type of out.

    What is 0 stays 0: a token that does not count has no gradient, whatever that of its loss.
    """
    upstream = dloss.unsqueeze(-1) if dloss.dim() else dloss
    total = (dloss.sum() if dloss.dim() else dloss).item() if dloss.is_cpu else math.nan
    if not dloss.dim() and total == 1:
        if out is not slopes:
            out.copy_(slopes)
    elif math.isfinite(total) or (dloss.is_cpu and bool(dloss.isfinite().all())):  # a sum may overflow
        torch.mul(slopes, upstream, out=out)
    else:
        out.copy_(torch.where(slopes == 0, 0.0, slopes * upstream))


def is_handed_on(dloss: Tensor) -> bool:
    """Whether gradients that were kept for an upstream gradient of 1 are those that are asked for.

    On the CPU alone, where asking costs nothing. A graph that is kept for another backward keeps what it has: what the
    caller does with his gradients must not change it.
    """
    if type(dloss) is not Tensor or not dloss.is_cpu or dloss.dim() or is_batched(dloss) or dloss.item() != 1:
        return False
    return not torch._C._autograd._get_current_graph_task_keep_graph()


def backward(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, logits: Tensor, targets: Tensor, sizes: Tensor,
    count: Tensor, loss: Loss, dlogits: Tensor,
) -> None:  # fmt: skip
    """Into dlogits, which may be the logits themselves.

    Without log-probabilities, gradients have the bits of slopes that a forward keeps times the upstream gradients.
    """
    classes, kind = logits.shape[-1], wide_dtype(logits.dtype)
    of_loss = dloss if dlog_probabilities is None else None  # where it is all there is
    if of_loss is not None and is_plain(targets, classes, loss):
        slopes = _backward_plain(logits, targets, count, loss).view(logits.shape)
        times_upstream(slopes, of_loss, dlogits)
        return
    if of_loss is not None:
        g, h = reciprocal_of(count, len(targets), loss), None
        of_loss = of_loss.reshape(-1) if of_loss.dim() else of_loss
    else:
        g, h = upstream_of_rows(dloss, dlog_probabilities, count, len(targets), loss)
    tokens, rows = tokens_from(targets), logits.reshape(-1, classes)
    into = dlogits.view(-1, classes) if dlogits.is_contiguous() else rows.new_empty(rows.shape)
    for block in row_blocks(*rows.shape):
        z, slope, _ = widened(part(rows, block), kind, loss.softcap, True)
        target = part(into, block)
        p = torch.softmax(z, -1, out=target if into.dtype == kind else z)
        of_loss_rows, of_label = (None if x is None else part(x, block) for x in (g, h))
        row_slopes(p, slope, tokens.part(block), part(sizes, block), of_loss_rows, of_label, loss)
        if of_loss is not None:
            times_upstream(p, part(of_loss, block) if of_loss.dim() else of_loss, target)
        elif into.dtype != kind:
            target.copy_(p)
        del z, slope, p
    if not dlogits.is_contiguous():
        dlogits.copy_(into.view(dlogits.shape))
