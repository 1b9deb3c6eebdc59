"""Routing.   The k best of E experts for each token, and their weights.

    s_e = softmax(x)_e   or   σ(x_e)
    C   = the k experts with the largest x_e (softmax without a bias), else with the largest s_e + bias_e
    w_c = s_c / Σ_{C} s   (renormalize)   or   s_c

Adjoint, given dw:

    renormalised softmax   dx_c = w_c·(dw_c − Σ w·dw)                     0 for experts not chosen
    softmax                dx_e = [e in C]·w_e·dw_e − s_e·Σ w·dw
    renormalised sigmoid   dx_c = w_c·(dw_c − Σ w·dw)·(1 − σ(x_c))        0 for experts not chosen
    sigmoid                dx_c = w_c·dw_c·(1 − σ(x_c))                   0 for experts not chosen

A renormalised softmax weight is the softmax over the chosen logits alone, so nothing is summed over all experts,
and its backward needs the weights and indices, [tokens, k] each, and not the logits. The other modes keep the logits.
"""

from typing import Any, Literal, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import as_int, require_flag, require_floating, require_integer
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short, wide_dtype
from adjoint.ops.moe.logits import check_logits
from adjoint.ops.moe.route import plans

_OP = "moe.route"

Score = Literal["softmax", "sigmoid"]
SCORES = get_args(Score)

# -------------------------------------------------------------------------------------------- checks


def _check(
    logits: Tensor, bias: Tensor | None, k: int, score: str, num_groups: int, groups_kept: int, renormalize: bool
) -> None:
    check_logits(_OP, logits)
    experts = logits.shape[-1]
    for name, value in (("k", k), ("num_groups", num_groups), ("groups_kept", groups_kept)):
        require_integer(_OP, name, value)
    require_flag(_OP, "renormalize", renormalize)
    if not 1 <= k <= min(experts, plans.MAX_K):
        raise ArgumentError(
            f"{_OP}: k must be from 1 to {min(experts, plans.MAX_K)}, the number of experts and at most "
            f"{plans.MAX_K}, got {k} for {experts} experts"
        )
    if score not in SCORES:
        raise ArgumentError(f"{_OP}: score must be one of {', '.join(map(repr, SCORES))}, got {score!r}")
    if num_groups < 1 or experts % num_groups:
        raise ArgumentError(
            f"{_OP}: num_groups must divide the {experts} experts into groups of one size, got {num_groups}"
        )
    if not 1 <= groups_kept <= num_groups:
        raise ArgumentError(f"{_OP}: groups_kept must be from 1 to num_groups, {num_groups}, got {groups_kept}")
    size = experts // num_groups
    if groups_kept * size < k:
        raise ArgumentError(
            f"{_OP}: {groups_kept} of {num_groups} groups of {size} experts hold {groups_kept * size} experts, "
            f"fewer than k = {k}; keep more groups or choose fewer"
        )
    if bias is not None:
        _check_bias(bias, logits)


def _check_bias(bias: Tensor, logits: Tensor) -> None:
    require_floating(_OP, "bias", bias)
    kind = wide_dtype(logits.dtype)
    if bias.dtype != kind:
        raise ArgumentError(
            f"{_OP}: bias must be {short(kind)}, in which it is added to scores of {short(logits.dtype)} logits, "
            f"got {short(bias.dtype)}"
        )
    if tuple(bias.shape) != (logits.shape[-1],):
        raise ArgumentError(
            f"{_OP}: bias must have one value for each of the {logits.shape[-1]} experts, got shape {tuple(bias.shape)}"
        )
    if bias.device != logits.device:
        raise ArgumentError(f"{_OP}: bias must be on the device of logits, {logits.device}, got {bias.device}")


def _check_backward(dweights: Tensor, weights: Tensor, indices: Tensor, logits: Tensor | None, *options: Any) -> None:
    experts, k, dtype, score, renormalize = options
    tensors = {"dweights": dweights, "weights": weights, "indices": indices}
    for name, tensor in tensors.items():
        kind = torch.int64 if name == "indices" else wide_dtype(dtype)
        if tensor.dtype != kind:
            raise ArgumentError(f"{_OP}: {name} must be {short(kind)}, got {short(tensor.dtype)}")
        if tensor.dim() == 0 or tensor.shape[-1] != k or tensor.shape != weights.shape:
            raise ArgumentError(
                f"{_OP}: {name} must have the shape of weights, {tuple(weights.shape)}, got {tuple(tensor.shape)}"
            )
        if tensor.device != weights.device:
            raise ArgumentError(f"{_OP}: {name} must be on {weights.device}, got {tensor.device}")
    if logits is None and _reads_logits(score, renormalize):
        raise ArgumentError(f"{_OP}: the gradient of this mode needs the logits, got None")
    if logits is not None and tuple(logits.shape) != (*weights.shape[:-1], experts):
        raise ArgumentError(
            f"{_OP}: logits must have shape {(*weights.shape[:-1], experts)}, got {tuple(logits.shape)}"
        )


# ---------------------------------------------------------------------------------------- declaration


def _reads_logits(score: str, renormalize: bool) -> bool:
    """Whether a backward reads the logits. That of a softmax over the chosen experts needs only their weights."""
    return not (score == "softmax" and renormalize)


def _sizes(experts: int, rows: int, layout: str) -> tuple[int, ...]:
    """The sizes on which a plan depends. The number of rows is one if they are copied, or if they are too many."""
    return (experts, rows) if layout or rows > plans.MAX_ROWS else (experts,)


def _describe(logits: Tensor, bias: Tensor | None, *options: Any) -> Facts:
    layout, experts = copied_layout({"logits": logits}), logits.shape[-1]
    dtypes = (logits.dtype,) if bias is None else (logits.dtype, bias.dtype)
    return Facts(dtypes, layout, _sizes(experts, logits.numel() // experts, layout))


def _describe_backward(
    dweights: Tensor, weights: Tensor, indices: Tensor, logits: Tensor | None, *options: Any
) -> Facts:
    experts, k, dtype, _, _ = options
    layout = copied_layout({"dweights": dweights, "logits": logits}, {"weights": weights, "indices": indices})
    return Facts((dtype,), layout, _sizes(experts, weights.numel() // k, layout))


def _allocate(logits: Tensor, bias: Tensor | None, k: int, *options: Any) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], k)
    return logits.new_empty(shape, dtype=wide_dtype(logits.dtype)), logits.new_empty(shape, dtype=torch.int64)


_route = Op(
    "moe_route",
    label=_OP,
    inputs=("logits", "bias?"),
    differentiable=("logits",),
    options="int k, str score, int num_groups, int groups_kept, bool renormalize",
    outputs=("weights", "indices"),
    constant=("indices",),
    check=_check,
    allocate=_allocate,
    describe=_describe,
    forward=lambda: plans.ROUTE,
    adjoint=Adjoint(
        lambda: plans.ROUTE_BACKWARD,
        _describe_backward,
        saves=("weights", "indices", "logits?"),
        omits=lambda needs, logits, bias, k, score, num_groups, groups_kept, renormalize: (
            () if _reads_logits(score, renormalize) else ("logits",)
        ),
        options="int experts, int k, ScalarType dtype, str score, bool renormalize",
        options_of=lambda logits, bias, k, score, num_groups, groups_kept, renormalize: (
            logits.shape[-1], k, logits.dtype, score, renormalize
        ),
        check=_check_backward,
        allocate=lambda dweights, weights, indices, logits, experts, k, dtype, score, renormalize: (
            weights.new_empty((*weights.shape[:-1], experts), dtype=dtype),
        ),
    ),
)  # fmt: skip


@_route.public
def route(
    logits: Float[Tensor, "*tokens experts"],
    k: int,
    *,
    score: Score = "softmax",
    bias: Float[Tensor, " experts"] | None = None,
    num_groups: int = 1,
    groups_kept: int = 1,
    renormalize: bool = True,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "*tokens k"], Int[Tensor, "*tokens k"]]:
    """The k best experts of each token, largest first, and their weights.

    Args:
        logits: bfloat16, float16, float32 or float64, any strides; up to 1024 experts along the last axis.
        k: the number of experts of a token, up to 64.
        score: the scores of which weights are made: the softmax over the experts, or the sigmoid of each logit.
        bias: float32, or float64 for float64 logits. It is added to the scores only for the selection. It does not
            change the weights, and has no gradient.
        num_groups: the number of groups of adjacent experts. A token uses only some of the groups.
        groups_kept: the number of groups that a token uses: those with the largest sum of their two best selection
            scores.
        renormalize: whether to divide a token's weights by their sum.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        weights, float32 (float64 for float64 logits), and indices, int64, both [..., k].

    For a softmax without a bias, the selection compares the logits themselves. Otherwise it compares score + bias. The
    score is computed in float64 and rounded once to float32, and the sum is in float32; for float64 logits both are in
    float64. Of equal experts the lower one wins, and NaN ranks last. A row with +∞, or with nothing above −∞, has NaN
    weights.

    Raises:
        ArgumentError: a shape, dtype, device or option is wrong.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> weights, indices = route(torch.tensor([[0.0, 2.0, 1.0, 2.0]]), 2)
    >>> indices
    tensor([[1, 3]])
    >>> weights
    tensor([[0.5000, 0.5000]])
    """
    k, num_groups, groups_kept = map(as_int, (k, num_groups, groups_kept))
    return _route.call(  # type: ignore[no-any-return]
        logits, bias, k, score, num_groups, groups_kept, renormalize, preference=preference
    )
