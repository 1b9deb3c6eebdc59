"""How far the router's weights and gradients may be from the exact ones, derived, in float64.

With u = 2⁻²⁴: e^d in float32 costs 3·|d|·u for its argument (the difference, the product with log₂e, the constant)
and 5·u for the exponential itself; n additions cost n·u of what they add; a quotient 3·u. Every bound below is the sum
of such terms, so a weight w has the relative error u·c with

    softmax   c = 3·|d| + 3·Σ p·|d| + n + 16      d = x − maximum, the sum over the terms of the denominator
    sigmoid   c = 3·|d| + 3·Σ w·|d| + n + 40      d = min(x, 0) − its maximum over the chosen
              c = 3·|min(x, 0)| + 16              not renormalised

Plain PyTorch computes in float64 and rounds to float32 once: u·w. Where logits are float64, it rounds nothing more, and
has the bounds above with u = 2⁻⁵³ and a sum's terms for n; a renormalised sigmoid is there the softmax of log σ(x), so
that d = min(x, 0), the logarithm's own size up to log 2.
"""

import torch
from torch import Tensor

from adjoint.core.guarantee import spacing
from adjoint.core.problem import wide_dtype
from adjoint.ops.moe.route import reference


def roundoff(kind: torch.dtype) -> float:
    """The unit roundoff u of weights of a type: 2⁻²⁴ or 2⁻⁵³."""
    return torch.finfo(kind).eps / 2


def lost(kind: torch.dtype) -> float:
    """The most that weights below the range of their type may lose: 2⁻¹²⁵ or 2⁻¹⁰²¹."""
    return 2 * torch.finfo(kind).tiny


def _finite(values: Tensor) -> Tensor:
    """Replaces NaN and infinities by 0. Their effect on a weight is stated and exact, so they have no error."""
    return values.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def distances(
    logits: Tensor, indices: Tensor, score: str, renormalize: bool, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """|d| of every expert, and the Σ share·|d| of each row's denominator."""
    absent = logits.masked_fill(logits.isnan(), float("-inf"))
    chosen = logits.gather(1, indices)
    if score == "sigmoid":
        part, chosen_part = absent.clamp_max(0), chosen.clamp_max(0)
        if not renormalize:
            return _finite(part.abs()), torch.zeros_like(logits[:, :1])
        top = _finite(chosen_part).amax(1, keepdim=True) if chosen_part.numel() else chosen_part[:, :1]
        if kind == torch.float64:
            top = torch.zeros_like(top)
        shares = reference.weights_of(logits, indices, score, True)
        mean = (_finite(shares) * _finite((chosen_part - top).abs())).sum(1, keepdim=True)
        return _finite((part - top).abs()), mean
    top = absent.amax(1, keepdim=True)
    far = _finite((absent - top).abs())
    if renormalize:
        largest = chosen.masked_fill(chosen.isnan(), float("-inf")).amax(1, keepdim=True)
        far = _finite((absent - largest).abs())
        shares = _finite(reference.weights_of(logits, indices, score, True))
        return far, (shares * far.gather(1, indices)).sum(1, keepdim=True)
    return far, (_finite(torch.softmax(absent, -1)) * far).sum(1, keepdim=True)


def relative(
    logits: Tensor, indices: Tensor, score: str, renormalize: bool, kind: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The relative error of each chosen weight, and of every expert's share of the denominator, computed in `kind`."""
    far, mean = distances(logits, indices, score, renormalize, kind)
    additions = 6 if renormalize else logits.shape[1] / 32 + 7
    if kind == torch.float64:
        additions = indices.shape[1] if renormalize else logits.shape[1]
    constant = additions + (16 if score == "softmax" else 40 if renormalize else 16)
    every = roundoff(kind) * (3 * far + 3 * mean + constant)
    return every.gather(1, indices), every


def weights_bound(
    logits: Tensor, indices: Tensor, score: str, renormalize: bool, kind: torch.dtype, rounds_once: bool
) -> Tensor:
    """The bound of weights of type `kind`, computed in this type, or in float64 and rounded once."""
    weights = _finite(reference.weights_of(logits, indices, score, renormalize))
    if rounds_once:
        return 1.001 * roundoff(kind) * weights + lost(kind)
    error, _ = relative(logits, indices, score, renormalize, kind)
    return error * 1.001 * weights + lost(kind)


def gradient_bound(
    dweights: Tensor,
    logits: Tensor,
    indices: Tensor,
    score: str,
    renormalize: bool,
    dtype: torch.dtype,
    rounds_once: bool,
) -> Tensor:
    """The bound of the logits' gradient.

    It has the weights' own error, once in the factor and once inside Σ w·dw, the error of that sum, and the final
    rounding.
    """
    kind = wide_dtype(dtype)
    u = roundoff(kind)
    terms_of_a_sum = indices.shape[1] if kind == torch.float64 else 0
    weights = _finite(reference.weights_of(logits, indices, score, renormalize))
    size = dweights.abs()
    dot = (weights * size).sum(1, keepdim=True)
    error, every = relative(logits, indices, score, renormalize, kind)
    worst = error.amax(1, keepdim=True) if error.numel() else error[:, :1]
    slack: float | Tensor = (20 + terms_of_a_sum) * u
    if rounds_once:  # all is in float64 except the weights, which were rounded once
        worst, every, slack = torch.full_like(worst, u), torch.full_like(every, u), 2 * u
    terms = weights * (size + dot)
    if score == "sigmoid":
        chosen = _finite(logits.gather(1, indices))
        terms = weights * (size + dot * renormalize) * torch.sigmoid(-chosen)
        slack = slack if rounds_once else u * (3 * chosen.clamp_min(0) + 32 + terms_of_a_sum)
    limit = torch.zeros_like(logits)
    if score == "softmax" and not renormalize:
        share = _finite(torch.softmax(logits.masked_fill(logits.isnan(), float("-inf")), -1))
        limit = (2 * worst + every + slack) * share * dot
    limit = limit.scatter(1, indices, (2 * worst + slack) * terms)
    exact = reference.route_backward(dweights, logits, indices, score, renormalize)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    tiny = lost(kind) * (4 + 2 * size.amax(1, keepdim=True)) + smallest if size.numel() else smallest
    rounded = limit + tiny + spacing(exact.abs() + limit, dtype) / 2
    if score == "softmax" and not renormalize:
        return rounded
    return torch.zeros_like(rounded).scatter(1, indices, rounded.gather(1, indices))  # exactly 0 for experts not chosen
