"""The losses over rows of logits in plain PyTorch, on any device, in the wide type; without waiting for a GPU."""

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


def write_targets(labels: Tensor, classes: int, loss: Loss, fault: Fault, targets: Tensor, count: Tensor) -> None:
    """The class of each token, −1 where it does not count, and the number of those that do, at least 1."""
    used = labels != loss.ignore_index
    if loss.shift:
        used = used & (torch.arange(labels.shape[-1], device=labels.device) > 0)
    wrong = used & ((labels < 0) | (labels >= classes))
    report(fault, labels, wrong)
    found = torch.where(used & ~wrong, labels, -1).to(targets.dtype)
    if loss.shift:
        found = torch.cat((found[..., 1:], torch.full_like(found[..., :1], -1)), -1)
    targets.copy_(found.reshape(-1))
    count.copy_((targets >= 0).sum().clamp_min(1))


def cap(x: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """z, and dz/dx where there is a cap. x may be overwritten."""
    if not softcap:
        return x, None
    share = torch.tanh(x / softcap)
    return softcap * share, 1 - share.square()


def row_losses(z: Tensor, target: Tensor, loss: Loss, outputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Writes the loss, the label's log-probability and L of each row; gives L and all log-probabilities."""
    losses, log_probabilities, sizes = outputs
    counted = target >= 0
    index = target.clamp_min(0).long()[:, None]
    all_of_them = torch.log_softmax(z, -1)
    chosen = all_of_them.gather(1, index)[:, 0]
    size = z.gather(1, index)[:, 0] - chosen
    value = -chosen
    if loss.label_smoothing:
        value = (1 - loss.label_smoothing) * value - loss.label_smoothing * all_of_them.mean(-1)
    if loss.z_loss:
        value = value + loss.z_loss * size.square()
    for output, result in ((losses, value), (log_probabilities, chosen), (sizes, size)):
        if output.numel():
            output.copy_(torch.where(counted, result, 0.0))
    return size, all_of_them


def row_slopes(
    p: Tensor, slope: Tensor | None, target: Tensor, size: Tensor, g: Tensor | float, h: Tensor | None, loss: Loss
) -> Tensor:
    """dx of rows from p, which is overwritten: for g of the loss, a number or one a row, and h of log-probabilities."""
    index = target.clamp_min(0).long()[:, None]
    of_p = 1.0 if isinstance(g, float) else g
    if loss.z_loss:
        of_p = of_p * (1 + 2 * loss.z_loss * size)
    of_label = -(1 - loss.label_smoothing) * (1.0 if isinstance(g, float) else g)
    of_all = (1.0 if isinstance(g, float) else g) * (loss.label_smoothing / p.shape[1])
    if h is not None:
        of_p, of_label = of_p - h, of_label + h
    if isinstance(of_p, Tensor):
        p.mul_(of_p[:, None])
    p.scatter_add_(
        1, index, (of_label if isinstance(of_label, Tensor) else p.new_full(target.shape, of_label))[:, None]
    )
    if loss.label_smoothing:
        p.sub_(of_all[:, None] if isinstance(of_all, Tensor) else of_all)
    if slope is not None:
        p.mul_(slope)
    counted = (target >= 0)[:, None]
    if p.device.type != "cpu" or not counted.all():
        p.masked_fill_(~counted, 0.0)
    return p


def reduce(losses: Tensor, count: Tensor, loss: Loss, out: Tensor) -> None:
    """The loss of all tokens from that of each; where there is no reduction, it is there already."""
    if loss.reduction != "none":
        total = losses.sum()
        out.copy_(total / count[0] if loss.reduction == "mean" else total)


def upstream_of_rows(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, count: Tensor, tokens: int, loss: Loss
) -> tuple[Tensor, Tensor | None]:
    """g of the loss and h of the log-probability of each row."""
    if dloss is None:
        g = count.new_zeros(tokens)
    else:
        g = dloss.reshape(-1).expand(tokens)
        g = g / count if loss.reduction == "mean" else g
    return g, None if dlog_probabilities is None else dlog_probabilities.reshape(-1)


# ---------------------------------------------------------------------------------- logits that exist


def forward(logits: Tensor, labels: Tensor, loss: Loss, fault: Fault, outputs: tuple[Tensor, ...]) -> None:
    """Into the loss, log-probabilities where they are asked for, targets, L and the number of labels."""
    out, log_probabilities, targets, sizes, count = outputs
    classes = logits.shape[-1]
    write_targets(labels, classes, loss, fault, targets, count)
    rows = logits.reshape(-1, classes)
    losses = out.view(-1) if loss.reduction == "none" else sizes.new_empty(len(rows))
    for block in row_blocks(*rows.shape):
        z, _ = cap(rows[block].to(sizes.dtype), loss.softcap)
        chosen = log_probabilities.view(-1)[block] if log_probabilities.numel() else log_probabilities
        row_losses(z, targets[block], loss, (losses[block], chosen, sizes[block]))
    reduce(losses, count, loss, out)


def backward(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, logits: Tensor, targets: Tensor, sizes: Tensor,
    count: Tensor, loss: Loss, dlogits: Tensor,
) -> None:  # fmt: skip
    """Into dlogits, which may be the logits themselves."""
    classes = logits.shape[-1]
    g, h = upstream_of_rows(dloss, dlog_probabilities, count, len(targets), loss)
    rows, into = logits.reshape(-1, classes), dlogits.view(-1, classes) if dlogits.is_contiguous() else None
    gradient = into if into is not None else rows.new_empty(rows.shape)
    for block in row_blocks(*rows.shape):
        z, slope = cap(rows[block].to(wide_dtype(logits.dtype)), loss.softcap)
        p = torch.exp(z - sizes[block, None])
        of_block = None if h is None else h[block]
        gradient[block] = row_slopes(p, slope, targets[block], sizes[block], g[block], of_block, loss)
    if into is None:
        dlogits.copy_(gradient.view(dlogits.shape))
