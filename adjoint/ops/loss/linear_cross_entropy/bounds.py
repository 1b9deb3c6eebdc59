"""How far `linear_cross_entropy` may be from the exact one, evaluated in float64: docs/loss.md has the proofs."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import overflow_threshold, spacing
from adjoint.core.problem import wide_dtype
from adjoint.ops.loss import bounds, reference
from adjoint.ops.loss.arguments import Loss
from adjoint.ops.loss.bounds import Arithmetic

BLOCK_ELEMENTS = 2**27
"""Logits that a bound holds at once: 1 GiB in float64, of which it has some twenty at its peak."""


class Rounding(NamedTuple):
    """What a plan rounds to the type of hidden on the way.

    Attributes:
        logits: a block's logits, before the bias is added.
        slopes: dx, before it is multiplied.
    """

    logits: bool
    slopes: bool


class Linear(NamedTuple):
    """How a plan computes: its sums over classes and tokens, what it rounds, and whether gradients are kept."""

    arithmetic: Arithmetic
    rounding: Rounding
    is_kept: bool


def of_sum(terms: int, u: float) -> float:
    """γ: the error of a sum of products beside Σ|terms|, in any order; matrix instructions cut off, which costs 2u."""
    return bounds.SECOND_ORDER * 2 * (terms + 4) * u


class Tokens(NamedTuple):
    """Rows of hidden and what is known of each without its logits: its class, if it counts, and g and h.

    g and h, the upstream gradients of a token's loss and log-probability, are those of all tokens' reduction.
    """

    hidden: Tensor
    target: Tensor
    counted: Tensor
    g: Tensor
    h: Tensor

    @classmethod
    def of(cls, hidden: Tensor, labels: Tensor, loss: Loss, upstream: tuple[Tensor, ...] = ()) -> "Tokens":
        target, counted = reference.targets(labels, loss.ignore_index, loss.shift)
        g = h = hidden.new_zeros(labels.shape)
        if upstream:
            g, h = bounds.upstream_of(upstream, counted, loss)
        flat = hidden.reshape(labels.numel(), hidden.shape[-1])
        return cls(flat, *(x.reshape(-1) for x in (target, counted, g, h)))

    def blocks(self, classes: int) -> Iterator["Tokens"]:
        """The same tokens, as many at a time as have BLOCK_ELEMENTS logits; one block, without any, where there are
        none."""
        step = max(1, BLOCK_ELEMENTS // classes)
        for start in range(0, max(1, len(self.target)), step):
            yield Tokens(*(x[start : start + step] for x in self))

    def scale(self, linear: Linear) -> float:
        """What dx is divided by before it is rounded to float16."""
        if linear.arithmetic.element != torch.float16 or not len(self.g):
            return 1.0
        largest = float(torch.where(self.counted, self.g.abs() + self.h.abs(), 0.0).amax())
        return largest if 0 < largest < float("inf") else 1.0


def _rows(tokens: Tokens, weight: Tensor, bias: Tensor | None, loss: Loss, linear: Linear) -> bounds.Rows:
    """The logits, as a plan has them."""
    u, element, hidden = linear.arithmetic.u, linear.arithmetic.element, tokens.hidden
    product = hidden @ weight.T
    sizes = hidden.abs() @ weight.abs().T
    error = of_sum(weight.shape[1], u) * sizes + linear.arithmetic.smallest
    if linear.rounding.logits and element.itemsize == 2:
        rounded = product.abs() + error
        error = error + spacing(rounded, element) / 2
        error = error.masked_fill(rounded >= overflow_threshold(element), torch.inf)
    x = product if bias is None else product + bias
    if bias is not None:
        error = error + 2 * u * (x.abs() + error)
        sizes = sizes + bias.abs()
    known = sizes < linear.arithmetic.largest  # no sum overflows on its way
    x, error = torch.where(known, x, 0.0), torch.where(known, error, torch.inf)
    return bounds.rows_of(x, error, tokens.target, tokens.counted, loss, linear.arithmetic)


def _rounding(size: Tensor, scale: float, linear: Linear) -> Tensor:
    """Of numbers that are rounded to 16 bits before they are multiplied by the upstream gradient, or by a scale.

    What a number is multiplied by moves it to another place between powers of two: so bfloat16, which has as many
    exponents as float32, is off by half of its ε; of float16 the scale is known.
    """
    if linear.arithmetic.element == torch.bfloat16:
        return size * (torch.finfo(torch.bfloat16).eps / 2)
    return scale * spacing(size / scale, linear.arithmetic.element) / 2


def linear_bound(loss: Loss, linear_of: Callable[[int, int], Linear], output: str) -> Callable[..., Tensor]:
    """Of one output, from the inputs of the reference; `linear_of(tokens, classes)` says how the plan computes.

    Tokens go through in blocks: a vocabulary's logits, in float64 and several times over, have room nowhere.
    """

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        linear = linear_of(labels.numel(), weight.shape[0])
        tokens = Tokens.of(hidden, labels, loss)

        def of_block(block: Tokens) -> tuple[Tensor, ...]:
            rows = _rows(block, weight, bias, loss, linear)
            return *bounds.losses_error(rows, loss, linear.arithmetic), bounds.losses_of(rows, loss)

        found = [of_block(block) for block in tokens.blocks(weight.shape[0])]
        of_losses, of_logs, losses = (torch.cat(each) for each in zip(*found, strict=True))
        if output == "log_probabilities":
            return of_logs.view(labels.shape)
        error = bounds.reduced_error(of_losses, losses, tokens.counted, loss, linear.arithmetic)
        return error.view(labels.shape) if loss.reduction == "none" else error

    def backward(*inputs: Tensor) -> Tensor:
        number = 2 if loss.log_probabilities else 1
        upstream, (hidden, weight, labels) = inputs[:number], inputs[number : number + 3]
        bias = inputs[number + 3] if len(inputs) > number + 3 else None
        linear = linear_of(labels.numel(), weight.shape[0])
        arithmetic, wide = linear.arithmetic, wide_dtype(linear.arithmetic.element)
        tokens = Tokens.of(hidden, labels, loss, upstream)
        scale, terms = tokens.scale(linear), weight.shape[0] if output == "dhidden" else labels.numel()

        def of_block(block: Tokens) -> tuple[Tensor, Tensor, Tensor]:
            """What a block gives of the gradient, the errors of the slopes and of their sum, and its terms' sizes."""
            rows = _rows(block, weight, bias, loss, linear)
            value, error = bounds.slopes_and_error(block.g, block.h, rows, loss, arithmetic)
            if linear.rounding.slopes and arithmetic.element.itemsize == 2:
                of_slopes = _rounding(value.abs() + error, scale, linear)
                error = error + torch.where(block.counted[:, None], of_slopes, 0.0)
            size = value.abs() + error
            error = error + of_sum(terms, arithmetic.u) * size
            if output == "dhidden":
                return value @ weight, error @ weight.abs(), size @ weight.abs()
            if output == "dweight":
                return value.T @ block.hidden, error.T @ block.hidden.abs(), size.T @ block.hidden.abs()
            return value.sum(0), error.sum(0), size.sum(0)

        found = (of_block(block) for block in tokens.blocks(weight.shape[0]))
        if output == "dhidden":
            exact, limit, sizes = (torch.cat(each).view(hidden.shape) for each in zip(*found, strict=True))
        else:
            exact, limit, sizes = next(found)
            for more, error, size in found:
                exact += more
                limit += error
                sizes += size
        # What is kept is for a loss whose gradient is 1: what underflows of it is multiplied by the gradient there is.
        lost = 4 * arithmetic.smallest * (1 + upstream[0].abs().amax() if linear.is_kept else 1)
        limit = limit + 6 * arithmetic.u * exact.abs() + lost
        if output == "dhidden" and linear.is_kept and arithmetic.element == torch.bfloat16:
            limit = limit + _rounding(exact.abs() + limit, 1.0, linear)
        limit = bounds.rounded(exact, limit, arithmetic.element, wide)
        return torch.where(sizes < arithmetic.largest, limit, torch.inf)  # a sum may overflow on its way

    return backward if output.startswith("d") else forward
