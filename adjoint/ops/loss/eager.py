"""The losses over rows of logits in plain PyTorch, on any device, in the wide type; without waiting for a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.errors import Fault, report
from adjoint.core.problem import wide_dtype
from adjoint.ops.loss.arguments import Loss

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
        low, high = labels.aminmax()
        has_ignored = 0 <= loss.ignore_index < classes and bool((labels == loss.ignore_index).any())
        if low >= 0 and high < classes and not has_ignored:
            return Tokens(labels.reshape(-1).long(), None)
    used = labels != loss.ignore_index
    if loss.shift:
        used = used & (torch.arange(labels.shape[-1], device=labels.device) > 0)
    wrong = used & ((labels < 0) | (labels >= classes))
    report(fault, labels, wrong)
    counted = used & ~wrong
    index = torch.where(counted, labels, 0).long()
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


def cap(x: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """z, and dz/dx where there is a cap."""
    if not softcap:
        return x, None
    share = torch.tanh(x / softcap)
    return softcap * share, 1 - share.square()


class RowResults(NamedTuple):
    """The loss, the label's log-probability and L of each row, and the logarithms of all probabilities."""

    losses: Tensor
    log_probabilities: Tensor
    sizes: Tensor
    logarithms: Tensor


def row_results(z: Tensor, tokens: Tokens, loss: Loss, overwrite: bool = False) -> RowResults:
    """Of rows of logits, whether they count or not; `overwrite` allows the logits to be lost.

    On the CPU, where fresh memory costs as much as the arithmetic, logarithms are then written over the logits: a row's
    largest element and its sum are known before the first is written.
    """
    index = tokens.target[:, None]
    of_label = z.gather(1, index)[:, 0]
    if overwrite and z.is_cpu:
        logarithms = torch.ops.aten._log_softmax.out(z, 1, False, out=z)
    else:
        logarithms = torch.log_softmax(z, -1)
    chosen = logarithms.gather(1, index)[:, 0]
    size = of_label - chosen
    losses = -chosen
    if loss.label_smoothing:
        losses = (1 - loss.label_smoothing) * losses - loss.label_smoothing * logarithms.mean(-1)
    if loss.z_loss:
        losses = losses + loss.z_loss * size.square()
    return RowResults(losses, chosen, size, logarithms)


def unit_slopes(results: RowResults, slope: Tensor | None, tokens: Tokens, loss: Loss) -> Tensor:
    """dx of rows for an upstream gradient of 1, written over the logarithms."""
    return row_slopes(results.logarithms.exp_(), slope, tokens, results.sizes, None, None, loss)


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
        p.mul_(of_p[:, None])
    p.scatter_add_(1, tokens.target[:, None], of_label[:, None])
    if loss.label_smoothing:
        share = loss.label_smoothing / p.shape[1]
        p.sub_(share if g is None else (share * g)[:, None])
    if slope is not None:
        p.mul_(slope)
    return p if tokens.counted is None else p.masked_fill_(~tokens.counted[:, None], 0.0)


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


# ---------------------------------------------------------------------------------- logits that exist


_NONE, _MEAN, _SUM = 0, 1, 2
"""Reductions, as torch numbers them."""


def reduction_of(loss: Loss) -> int:
    return _MEAN if loss.reduction == "mean" else _SUM


def is_plain(labels: Tensor, classes: int, loss: Loss) -> bool:
    """Whether the loss is torch's own, one number of few logits on the CPU, and takes torch's few calls."""
    is_small = labels.is_cpu and 0 < labels.numel() * classes <= BLOCK_ELEMENTS
    return is_small and loss.is_total and not (loss.label_smoothing or loss.z_loss or loss.softcap)


def plain_targets(labels: Tensor, loss: Loss) -> Tensor:
    """The class of each token of a plain loss, ignore_index where it does not count, in one row."""
    target = labels.long()
    if loss.shift:
        none = target.new_full((*target.shape[:-1], 1), loss.ignore_index)
        target = torch.cat((target[..., 1:], none), -1)
    return target if target.dim() == 1 else target.reshape(-1)


UNITS = {kind: torch.ones((), dtype=kind) for kind in (torch.float32, torch.float64)}
"""Upstream gradients of 1."""


class Plain(NamedTuple):
    """A plain loss: its value, the number of labels as a tensor and as a number, and whether every token counts."""

    value: Tensor
    number: Tensor
    counted: int
    is_whole: bool

    @staticmethod
    def of(logarithms: Tensor, target: Tensor, loss: Loss) -> "Plain | None":
        """From the logarithms of all probabilities; None where a label is out of range."""
        reduction, ignored = reduction_of(loss), loss.ignore_index
        try:
            value, number = torch.ops.aten.nll_loss_forward.default(logarithms, target, None, reduction, ignored)
        except IndexError:
            return None
        counted = int(number.item())
        return Plain(value if counted else torch.zeros_like(value), number, counted, counted == target.shape[0])

    @property
    def kept_count(self) -> Tensor:
        """The number of labels, at least 1, as it is kept."""
        return self.number.view(1) if self.counted else self.number.new_ones(1)


def plain_slopes(logarithms: Tensor, target: Tensor, number: Tensor, ignore_index: int, reduction: int) -> Tensor:
    """dx of a plain loss for an upstream gradient of 1, NaN where a token does not count and has logits of NaN."""
    unit = UNITS[logarithms.dtype]
    chosen = torch.ops.aten.nll_loss_backward.default(unit, logarithms, target, None, reduction, ignore_index, number)
    return torch.ops.aten._log_softmax_backward_data.default(chosen, logarithms, 1, logarithms.dtype)  # type: ignore[no-any-return]


def forward_plain(logits: Tensor, labels: Tensor, loss: Loss) -> tuple[Tensor, ...] | None:
    """What `forward` writes, of a plain loss in torch's own calls; None of another, and where a label is wrong."""
    if not is_plain(labels, logits.shape[-1], loss):
        return None
    kind, target = wide_dtype(logits.dtype), plain_targets(labels, loss)
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    rows = rows if rows.dtype == kind else rows.to(kind)
    logarithms = torch.log_softmax(rows, 1)
    plain = Plain.of(logarithms, target, loss)
    if plain is None:
        return None
    # L = z_y − log p_y, and 0 where a token does not count: torch's loss of each is −log p_y, or 0.
    of_each = [torch.ops.aten.nll_loss.default(x, target, None, _NONE, loss.ignore_index) for x in (logarithms, rows)]
    sizes, targets = of_each[0].sub_(of_each[1]), target.int()
    if not plain.is_whole:
        targets.masked_fill_(target == loss.ignore_index, -1)
    return plain.value, plain.value.new_empty(0), targets, sizes, plain.kept_count


def _backward_plain(dloss: Tensor, logits: Tensor, targets: Tensor, count: Tensor, loss: Loss, dlogits: Tensor) -> None:
    """The same in few calls: (p − 1_y)·g, written over p."""
    rows = logits if logits.dim() == 2 else logits.reshape(-1, logits.shape[-1])
    is_own = dlogits.is_contiguous() and dlogits.dtype == count.dtype
    into = None if not is_own else dlogits if rows is logits else dlogits.view(rows.shape)
    p = torch.softmax(rows if rows.dtype == count.dtype else rows.to(count.dtype), 1, out=into)
    target, ignored, counted = targets.long(), None, count.item()
    if counted == 1 or counted != target.shape[0]:  # a count of 1 may be that of no label
        ignored, target = (target < 0).unsqueeze(1), target.clamp_min(0)
    p.scatter_(1, target.unsqueeze(1), -1.0, reduce="add")
    p.mul_(dloss / count if loss.reduction == "mean" else dloss)
    if ignored is not None:
        p.masked_fill_(ignored, 0.0)
    if not is_own:
        dlogits.copy_(p.view(dlogits.shape))


def forward(logits: Tensor, labels: Tensor, loss: Loss, fault: Fault, outputs: tuple[Tensor, ...]) -> None:
    """Into the loss, log-probabilities where they are asked for, targets, L and the number of labels."""
    out, log_probabilities, targets, sizes, count = outputs
    classes = logits.shape[-1]
    tokens = tokens_of(labels, classes, loss, fault)
    write_count(tokens, count)
    write_targets(tokens, targets)
    rows = logits.reshape(-1, classes)
    losses = [sizes.new_empty(0)]
    for block in row_blocks(*rows.shape):
        z, _ = cap(part(rows, block).to(sizes.dtype), loss.softcap)
        own = tokens.part(block)
        results = row_results(z, own, loss)
        losses.append(own.keep(results.losses))
        part(sizes, block).copy_(own.keep(results.sizes))
        if loss.log_probabilities:
            log_probabilities.view(-1)[block] = own.keep(results.log_probabilities)
    write_loss(losses[1] if len(losses) == 2 else torch.cat(losses), count, loss, out)


def backward(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, logits: Tensor, targets: Tensor, sizes: Tensor,
    count: Tensor, loss: Loss, dlogits: Tensor,
) -> None:  # fmt: skip
    """Into dlogits, which may be the logits themselves."""
    classes, kind = logits.shape[-1], wide_dtype(logits.dtype)
    if dloss is not None and dlog_probabilities is None and is_plain(targets, classes, loss):
        return _backward_plain(dloss, logits, targets, count, loss, dlogits)
    g, h = upstream_of_rows(dloss, dlog_probabilities, count, len(targets), loss)
    tokens, rows = tokens_from(targets), logits.reshape(-1, classes)
    into = dlogits.view(-1, classes) if dlogits.is_contiguous() else rows.new_empty(rows.shape)
    for block in row_blocks(*rows.shape):
        z, slope = cap(part(rows, block).to(kind), loss.softcap)
        own, target = None if h is None else part(h, block), part(into, block)
        p = torch.softmax(z, -1, out=target if into.dtype == kind else None)
        row_slopes(p, slope, tokens.part(block), part(sizes, block), part(g, block), own, loss)
        if into.dtype != kind:
            target.copy_(p)
    if not dlogits.is_contiguous():
        dlogits.copy_(into.view(dlogits.shape))
