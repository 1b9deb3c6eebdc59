"""How far `linear_cross_entropy` may be from the exact one, evaluated in float64: docs/loss.md has the proofs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.core.problem import wide_dtype
from adjoint.ops.loss import bounds
from adjoint.ops.loss.arguments import Loss
from adjoint.ops.loss.bounds import Arithmetic


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


def _rows(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, loss: Loss, linear: Linear
) -> bounds.Rows:
    """The logits, as a plan has them."""
    u, element = linear.arithmetic.u, linear.arithmetic.element
    product = hidden @ weight.T
    error = of_sum(weight.shape[1], u) * (hidden.abs() @ weight.abs().T) + linear.arithmetic.smallest
    if linear.rounding.logits and element.itemsize == 2:
        error = error + spacing(product.abs() + error, element) / 2
    x = product if bias is None else product + bias
    if bias is not None:
        error = error + 2 * u * (x.abs() + error)
    return bounds.rows_of(x, error, labels, loss, linear.arithmetic)


def _scale(upstream: tuple[Tensor, ...], rows: bounds.Rows, loss: Loss, linear: Linear) -> float:
    """What dx is divided by before it is rounded to float16."""
    if linear.arithmetic.element != torch.float16:
        return 1.0
    g, h = bounds.upstream_of(upstream, rows, loss)
    largest = (g.abs() + h.abs()).amax() if g.numel() else g.new_ones(())
    return float(largest) or 1.0


def _rounding(size: Tensor, scale: float, linear: Linear) -> Tensor:
    """Of numbers that are rounded to 16 bits before they are multiplied by the upstream gradient, or by a scale.

    What a number is multiplied by moves it to another place between powers of two: so bfloat16, which has as many
    exponents as float32, is off by half of its ε; of float16 the scale is known.
    """
    if linear.arithmetic.element == torch.bfloat16:
        return size * (torch.finfo(torch.bfloat16).eps / 2)
    return scale * spacing(size / scale, linear.arithmetic.element) / 2


def linear_bound(loss: Loss, linear_of: Callable[[int, int], Linear], output: str) -> Callable[..., Tensor]:
    """Of one output, from the inputs of the reference; `linear_of(tokens, classes)` says how the plan computes."""

    def forward(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
        linear = linear_of(labels.numel(), weight.shape[0])
        rows = _rows(hidden, weight, labels, bias, loss, linear)
        if output == "loss":
            return bounds.loss_error(rows, loss, linear.arithmetic)
        return bounds.losses_error(rows, loss, linear.arithmetic)[1]

    def backward(*inputs: Tensor) -> Tensor:
        number = 2 if loss.log_probabilities else 1
        upstream, (hidden, weight, labels) = inputs[:number], inputs[number : number + 3]
        bias = inputs[number + 3] if len(inputs) > number + 3 else None
        linear = linear_of(labels.numel(), weight.shape[0])
        rows = _rows(hidden, weight, labels, bias, loss, linear)
        arithmetic, wide = linear.arithmetic, wide_dtype(linear.arithmetic.element)
        value, error = bounds.slopes_and_error(upstream, rows, loss, arithmetic)
        if linear.rounding.slopes and arithmetic.element.itemsize == 2:
            scale = _scale(upstream, rows, loss, linear)
            error = error + torch.where(rows.counted[..., None], _rounding(value.abs() + error, scale, linear), 0.0)
        value, error = value.reshape(-1, weight.shape[0]), error.reshape(-1, weight.shape[0])
        flat = hidden.reshape(-1, hidden.shape[-1])
        if output == "dhidden":
            exact, shape, terms = value @ weight, hidden.shape, weight.shape[0]
            limit = error @ weight.abs() + of_sum(terms, arithmetic.u) * ((value.abs() + error) @ weight.abs())
        elif output == "dweight":
            exact, shape, terms = value.T @ flat, weight.shape, len(flat)
            limit = error.T @ flat.abs() + of_sum(terms, arithmetic.u) * ((value.abs() + error).T @ flat.abs())
        else:
            exact, shape, terms = value.sum(0), weight.shape[:1], len(flat)
            limit = error.sum(0) + of_sum(terms, arithmetic.u) * (value.abs() + error).sum(0)
        limit = limit + 6 * arithmetic.u * exact.abs() + 4 * arithmetic.smallest
        if output == "dhidden" and linear.is_kept and arithmetic.element == torch.bfloat16:
            limit = limit + _rounding(exact.abs() + limit, 1.0, linear)
        return bounds.rounded(exact, limit, arithmetic.element, wide).view(shape)

    return backward if output.startswith("d") else forward
