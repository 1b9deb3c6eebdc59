"""How far the losses may be from the exact ones, evaluated in float64 for the inputs: docs/loss.md has the proofs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.core.problem import wide_dtype
from adjoint.ops.loss import reference
from adjoint.ops.loss.arguments import Loss

SECOND_ORDER = 1.01
"""What the products of two small errors add, at most, to those of one."""


class Arithmetic(NamedTuple):
    """How a plan computes.

    Attributes:
        element: the type of the logits, or of hidden and weight.
        classes: additions that a term of a sum over the classes goes through.
        tokens: additions that a token's loss goes through.
    """

    element: torch.dtype
    classes: int
    tokens: int

    @property
    def u(self) -> float:
        return torch.finfo(wide_dtype(self.element)).eps / 2

    @property
    def smallest(self) -> float:
        return torch.finfo(wide_dtype(self.element)).smallest_normal

    @property
    def largest(self) -> float:
        return torch.finfo(wide_dtype(self.element)).max

    @property
    def tiny(self) -> float:
        """The smallest number there is: η."""
        return self.smallest * torch.finfo(wide_dtype(self.element)).eps


class Rows(NamedTuple):
    """What is known of rows of logits: z and dz/dx, errors of x and of z, L and its error, labels and which count."""

    z: Tensor
    slope: Tensor
    x_error: Tensor
    z_error: Tensor
    size: Tensor
    size_error: Tensor
    target: Tensor
    counted: Tensor


def rows_of(
    x: Tensor, x_error: Tensor | float, target: Tensor, counted: Tensor, loss: Loss, arithmetic: Arithmetic
) -> Rows:
    """Rows of logits x that a plan has with some error, with their classes, as `reference.targets` has them."""
    u = arithmetic.u
    x = torch.where(counted[..., None], x, 0.0)
    x_error = torch.as_tensor(x_error, dtype=x.dtype, device=x.device).expand_as(x)
    x_error = torch.where(counted[..., None], x_error, 0.0)
    z, slope, z_error = x, torch.ones_like(x), x_error
    if loss.softcap:
        z = reference.capped(x, loss.softcap)
        slope = 1 - (z / loss.softcap).square()
        z_error = x_error + u * (10 * loss.softcap + 2 * z.abs())
    size = torch.logsumexp(z, -1)
    moved = torch.maximum(torch.logsumexp(z + z_error, -1) - size, size - torch.logsumexp(z - z_error, -1))
    top = z.amax(-1)
    far = (top[..., None] - z).nan_to_num(nan=0.0, posinf=0.0)
    mean = (torch.exp(z - size[..., None]) * far).sum(-1)
    own = u * (3 * mean + 5 * arithmetic.classes + 24 + 8 * (size - top).abs() + 3 * size.abs() + 2 * top.abs())
    return Rows(z, slope, x_error, z_error, size, SECOND_ORDER * (moved + own), target, counted)


def losses_error(rows: Rows, loss: Loss, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """Of each token's loss and of its label's log-probability."""
    u = arithmetic.u
    chosen = rows.z.gather(-1, rows.target[..., None])[..., 0]
    of_chosen = rows.z_error.gather(-1, rows.target[..., None])[..., 0]
    log_probability = chosen - rows.size
    of_log = of_chosen + rows.size_error + u * (2 * chosen.abs() + 2 * rows.size.abs() + 2 * log_probability.abs())
    of_loss = (1 - loss.label_smoothing) * of_log
    if loss.label_smoothing:
        mean, magnitude = rows.z.mean(-1), rows.z.abs().mean(-1)
        of_mean = rows.z_error.mean(-1) + u * (arithmetic.classes + 8) * (magnitude + rows.size.abs())
        of_loss = of_loss + loss.label_smoothing * (rows.size_error + of_mean)
        of_loss = of_loss.masked_fill(magnitude * rows.z.shape[-1] > arithmetic.largest, torch.inf)  # of z on the way
        value = -(1 - loss.label_smoothing) * log_probability + loss.label_smoothing * (rows.size - mean)
    else:
        value = -log_probability
    square = loss.z_loss * rows.size * rows.size
    if loss.z_loss:
        of_loss = of_loss + loss.z_loss * (2 * rows.size.abs() + rows.size_error) * rows.size_error
    of_loss = of_loss + 6 * u * (value.abs() + square) + 4 * arithmetic.smallest
    zero = torch.zeros_like(of_loss)
    return torch.where(rows.counted, SECOND_ORDER * of_loss, zero), torch.where(rows.counted, of_log, zero)


def reduced_error(of_tokens: Tensor, losses: Tensor, counted: Tensor, loss: Loss, arithmetic: Arithmetic) -> Tensor:
    """Of the loss after its reduction, from the errors and losses of all tokens."""
    if loss.reduction == "none":
        return of_tokens
    values = losses.abs().sum()
    total = of_tokens.sum() + arithmetic.u * arithmetic.tokens * (values + of_tokens.sum())
    number = int(counted.sum()) if loss.reduction == "mean" else 1
    if number > 1 and values + total > arithmetic.largest:
        return torch.full_like(total, torch.inf)  # the sum may overflow, whatever the mean is
    return (total + 4 * arithmetic.u * (values + of_tokens.sum())) / max(1, number) + arithmetic.smallest


def losses_of(rows: Rows, loss: Loss) -> Tensor:
    """Each token's loss, of rows whose cap is applied."""
    log_probability = rows.z.gather(-1, rows.target[..., None])[..., 0] - rows.size
    value = -(1 - loss.label_smoothing) * log_probability + loss.z_loss * rows.size * rows.size
    if loss.label_smoothing:
        value = value + loss.label_smoothing * (rows.size - rows.z.mean(-1))
    return torch.where(rows.counted, value, 0.0)


def upstream_of(upstream: tuple[Tensor, ...], counted: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """g of the loss and h of the log-probability of each token, from which of all tokens count."""
    g = upstream[0].expand(counted.shape)
    g = g / max(1, int(counted.sum())) if loss.reduction == "mean" else g
    return g, upstream[1] if loss.log_probabilities else torch.zeros_like(g)


def slopes_and_error(g: Tensor, h: Tensor, rows: Rows, loss: Loss, arithmetic: Arithmetic) -> tuple[Tensor, Tensor]:
    """dx of each logit, and its error before it is rounded to anything; g and h are those of `upstream_of`."""
    u, classes = arithmetic.u, rows.z.shape[-1]
    g, h = g[..., None], h[..., None]
    size, of_size = rows.size[..., None], rows.size_error[..., None]
    p = torch.exp(rows.z - size)
    far = (size - rows.z).abs().nan_to_num(nan=0.0, posinf=0.0)
    of_exponent = rows.z_error + of_size
    of_p_itself = p * (torch.expm1(of_exponent) + u * (3 * far + 10)) + arithmetic.smallest
    of_p_itself = torch.where(of_exponent > 50, 2.0, of_p_itself)  # of which nothing is known, but that p is at most 1
    of_p = g * (1 + 2 * loss.z_loss * size) - h
    factor = g.abs() * (1 + 2 * loss.z_loss * size.abs()) + h.abs()
    label = torch.nn.functional.one_hot(rows.target, classes).to(p.dtype)
    fixed = label * (h - g * (1 - loss.label_smoothing)) - g * loss.label_smoothing / classes
    magnitude = label * (h.abs() + g.abs()) + g.abs() * loss.label_smoothing / classes
    value = of_p * p + fixed
    error = factor * of_p_itself
    if loss.z_loss:
        error = error + g.abs() * (2 * loss.z_loss * of_size * (p + of_p_itself))
    # What is below the smallest normal number is rounded by up to half of η; g, by way of 1 + 2λL, by more.
    error = error + 10 * u * (factor * p + magnitude) + arithmetic.tiny * (10 + 2 * loss.z_loss * size.abs())
    if loss.softcap:
        steep = rows.slope * (torch.expm1(2 * rows.x_error / loss.softcap) + u * 24) + u * 8
        steep = steep + u * 6 * rows.slope * torch.atanh((rows.z / loss.softcap).clamp(-1 + 1e-16, 1 - 1e-16)).abs()
        steep = steep.nan_to_num(nan=SECOND_ORDER).clamp_max(SECOND_ORDER)  # both slopes are between 0 and 1
        error = error * (rows.slope + steep) + value.abs() * steep + arithmetic.tiny
        value = value * rows.slope
    # Nothing is known of logits that may have overflowed, nor where factors of p or of the label do.
    known = of_exponent.isfinite() & (SECOND_ORDER * (factor + magnitude) < arithmetic.largest)
    error = error.masked_fill(~known, torch.inf)
    zero = torch.zeros_like(value)
    counted = rows.counted[..., None]
    return torch.where(counted, value, zero), torch.where(counted, SECOND_ORDER * error, zero)


def rounded(exact: Tensor, error: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """The error of a result after it is rounded to a dtype; to the type it was computed in, it is not rounded again."""
    return error if dtype == wide else error + spacing(exact.abs() + error, dtype) / 2


Bound = Callable[..., Tensor]


def cross_entropy_bound(loss: Loss, arithmetic: Arithmetic, output: str) -> Bound:
    """Of one output of `cross_entropy` or of its backward, from the inputs of the reference."""

    def forward(logits: Tensor, labels: Tensor) -> Tensor:
        rows = rows_of(logits, 0.0, *reference.targets(labels, loss.ignore_index, loss.shift), loss, arithmetic)
        of_losses, of_logs = losses_error(rows, loss, arithmetic)
        if output == "log_probabilities":
            return of_logs
        return reduced_error(of_losses, losses_of(rows, loss), rows.counted, loss, arithmetic)

    def backward(*inputs: Tensor) -> Tensor:
        *upstream, logits, labels = inputs
        rows = rows_of(logits, 0.0, *reference.targets(labels, loss.ignore_index, loss.shift), loss, arithmetic)
        g, h = upstream_of(tuple(upstream), rows.counted, loss)
        value, error = slopes_and_error(g, h, rows, loss, arithmetic)
        return rounded(value, error, arithmetic.element, wide_dtype(arithmetic.element))

    return backward if output == "dlogits" else forward
