"""Plain losses, of few logits on the CPU, in the few calls of torch that torch's own loss makes."""

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.ops.loss.arguments import Loss

_NONE, _MEAN, _SUM = 0, 1, 2
"""Reductions, as torch numbers them."""

_FEW = 2**17
"""Logits whose exponentials take less time than calls of torch, of which there are fewer if they are computed twice."""


def reduction_of(loss: Loss) -> int:
    """The mean, or the sum, which is what gradients of each loss add up to."""
    return _MEAN if loss.reduction == "mean" else _SUM


def is_plain(labels: Tensor, classes: int, loss: Loss) -> bool:
    """Whether the loss is torch's own, of few logits on the CPU, and takes torch's few calls."""
    _, label_smoothing, z_loss, softcap, _, _, log_probabilities = loss
    if label_smoothing or z_loss or softcap or log_probabilities:
        return False
    return labels.is_cpu and 0 < labels.numel() * classes <= _FEW


def plain_targets(labels: Tensor, loss: Loss) -> Tensor:
    """The class of each token of a plain loss, ignore_index where it does not count, in one row."""
    target = labels.long()
    if loss.shift:
        none = target.new_full((*target.shape[:-1], 1), loss.ignore_index)
        target = torch.cat((target[..., 1:], none), -1)
    return target if target.dim() == 1 else target.reshape(-1)


_UNITS = {kind: torch.ones((), dtype=kind, device="cpu") for kind in (torch.float32, torch.float64)}
"""Upstream gradients of 1."""

NOTHING = {
    kind: tuple([torch.empty(0, dtype=kind, device="cpu") for _ in range(5)])
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.int32)
}
"""Outputs without elements, which all calls share; no two of a call are the same."""

# What follows runs once a call, and costs a small loss as much as its arithmetic: torch's functions are bound here.
_losses_of, _slopes_of_losses = torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss_backward.default
_slopes_of_logits, _losses_of_each = torch._log_softmax_backward_data, torch.ops.aten.nll_loss.default


class Plain(NamedTuple):
    """A plain loss: its value, or those of the tokens in one row; the number of labels as a tensor, whether there are
    any, and whether each token has one."""

    value: Tensor
    number: Tensor
    has_labels: bool
    is_whole: bool

    @staticmethod
    def of(logarithms: Tensor, target: Tensor, loss: Loss) -> "Plain | None":
        """From the logarithms of all probabilities; None where a label is out of range."""
        try:
            value, number = _losses_of(logarithms, target, None, reduction_of(loss), loss.ignore_index)
        except IndexError:
            return None
        counted = number.item()
        if loss.reduction == "none":
            value = _losses_of_each(logarithms, target, None, _NONE, loss.ignore_index)
        elif not counted:
            value = torch.zeros_like(value)
        return Plain(value, number, counted > 0, counted == target.shape[0])

    def value_like(self, labels: Tensor) -> Tensor:
        """The value; those of tokens in the shape of their labels."""
        return self.value.view(labels.shape) if self.value.dim() and labels.dim() != 1 else self.value

    @property
    def kept_count(self) -> Tensor:
        """The number of labels, at least 1, as it is kept."""
        return self.number.view(1) if self.has_labels else self.number.new_ones(1)


def plain_slopes(
    logarithms: Tensor, target: Tensor, number: Tensor, ignore_index: int, reduction: int, is_whole: bool
) -> Tensor:
    """dx of a plain loss for an upstream gradient of 1; 0 where a token does not count, whatever its logits."""
    kind = logarithms.dtype
    slopes = _slopes_of_losses(_UNITS[kind], logarithms, target, None, reduction, ignore_index, number)
    _slopes_of_logits(slopes, logarithms, 1, kind, out=slopes)
    if not is_whole:
        slopes.index_fill_(0, (target == ignore_index).nonzero().view(-1), 0.0)
    return slopes  # type: ignore[no-any-return]


def plain_rows(
    rows: Tensor, logarithms: Tensor, target: Tensor, plain: Plain, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """The class and L of each token of a plain loss, as `forward` writes them."""
    # L = z_y − log p_y, and 0 where a token does not count: torch's loss of each is −log p_y, or 0.
    of_each = [_losses_of_each(x, target, None, _NONE, ignore_index) for x in (logarithms, rows)]
    sizes, targets = of_each[0].sub_(of_each[1]), target.int()
    if not plain.is_whole:
        targets.masked_fill_(target == ignore_index, -1)
    return targets, sizes
