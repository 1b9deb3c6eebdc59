"""The router's losses.

    load balancing   L = E·Σ_e f_e·P_e,   f_e = choices of e / tokens,   P_e = mean of softmax(x)_e
    z                L = mean of logsumexp(x)²

Adjoint, given dL, for each of M tokens, p = softmax(x):

    load balancing   dx_e = dL·E/M·p_e·(f_e − Σ p·f)          f counts, and has no gradient
    z                dx_e = dL·2/M·logsumexp(x)·p_e

Both save the logits and the mask, and one small tensor that the forward gives beside the loss: the fractions f with the
number of tokens (`load`), or that number (`tokens`).
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from adjoint.core.arguments import require_ids, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout
from adjoint.core.op import Adjoint, Candidates, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short, wide_dtype
from adjoint.ops.moe.logits import check_logits
from adjoint.ops.moe.losses import plans

# -------------------------------------------------------------------------------------------- checks


def _check_mask(op: str, mask: Tensor | None, logits: Tensor) -> None:
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ArgumentError(f"{op}: mask must be a tensor or None, got {type(mask).__name__}")
    if mask.dtype != torch.bool:
        raise ArgumentError(
            f"{op}: mask must be bool, True for tokens that count, got {short(mask.dtype)}; "
            f"convert it first, for example with mask != 0"
        )
    if tuple(mask.shape) != tuple(logits.shape[:-1]):
        raise ArgumentError(
            f"{op}: mask must have the shape of logits without its last axis, {tuple(logits.shape[:-1])}, "
            f"got {tuple(mask.shape)}"
        )
    if mask.device != logits.device:
        raise ArgumentError(f"{op}: mask must be on the device of logits, {logits.device}, got {mask.device}")


def _check_balance(logits: Tensor, indices: Tensor, mask: Tensor | None) -> None:
    op = "moe.load_balancing_loss"
    check_logits(op, logits)
    require_ids(op, "indices", indices, "logits", logits)
    if indices.dim() != logits.dim() or indices.shape[:-1] != logits.shape[:-1]:
        raise ArgumentError(
            f"{op}: indices must have the shape of logits but for the last axis, {tuple(logits.shape[:-1])} and the "
            f"number of choices, got {tuple(indices.shape)}"
        )
    if not 1 <= indices.shape[-1] <= logits.shape[-1]:
        raise ArgumentError(
            f"{op}: indices must hold from 1 to {logits.shape[-1]} choices a token, as many as there are experts, "
            f"got {indices.shape[-1]}"
        )
    _check_mask(op, mask, logits)


def _check_z(logits: Tensor, mask: Tensor | None) -> None:
    check_logits("moe.z_loss", logits)
    _check_mask("moe.z_loss", mask, logits)


def _check_backward(op: str, dloss: Tensor, logits: Tensor, mask: Tensor | None, saved: Tensor) -> None:
    check_logits(op, logits)
    _check_mask(op, mask, logits)
    for name, tensor in (("dloss", dloss), ("what the forward saved", saved)):
        kind = wide_dtype(logits.dtype)
        if tensor.dtype != kind or tensor.device != logits.device:
            raise ArgumentError(
                f"{op}: {name} must be {short(kind)} on {logits.device}, got {short(tensor.dtype)} on {tensor.device}"
            )
    expected = (logits.shape[-1] + 1,) if op == "moe.load_balancing_loss" else (1,)
    if dloss.dim() or tuple(saved.shape) != expected:
        raise ArgumentError(
            f"{op}: dloss must have no axes and what the forward saved shape {expected}, got {tuple(dloss.shape)} "
            f"and {tuple(saved.shape)}"
        )


# --------------------------------------------------------------------------------------- declarations


def _describe(logits: Tensor, mask: Tensor | None, indices: Tensor | None = None) -> Facts:
    layout = copied_layout({"logits": logits}, {"indices": indices, "mask": mask})
    dtypes = tuple(tensor.dtype for tensor in (logits, indices, mask) if tensor is not None)
    experts = logits.shape[-1]
    return Facts(dtypes, layout, (experts, logits.numel() // experts, 1 if indices is None else indices.shape[-1]))


def _loss(
    name: str,
    inputs: tuple[str, ...],
    saved: str,
    check: Callable[..., None],
    describe: Callable[..., Facts],
    forward: Candidates,
    backward: Candidates,
) -> Op:
    """Declares one of the two losses. It gives a scalar and `saved`: the number of tokens, or each expert's fraction
    and then that number."""
    return Op(
        f"moe_{name}",
        label=f"moe.{name}",
        inputs=inputs,
        differentiable=("logits",),
        outputs=("loss", saved),
        constant=(saved,),
        check=check,
        allocate=lambda logits, *rest: (
            logits.new_empty((), dtype=wide_dtype(logits.dtype)),
            logits.new_empty(logits.shape[-1] + 1 if saved == "load" else 1, dtype=wide_dtype(logits.dtype)),
        ),
        describe=describe,
        forward=forward,
        adjoint=Adjoint(
            backward,
            lambda dloss, logits, mask, saved: _describe(logits, mask),
            saves=("logits", "mask?", saved),
            check=lambda *arguments: _check_backward(f"moe.{name}", *arguments),
        ),
    )


_balance = _loss(
    "load_balancing_loss",
    ("logits", "indices", "mask?"),
    "load",
    _check_balance,
    lambda logits, indices, mask: _describe(logits, mask, indices),
    lambda: plans.BALANCE,
    lambda: plans.BALANCE_BACKWARD,
)
_z = _loss("z_loss", ("logits", "mask?"), "tokens", _check_z, _describe, lambda: plans.Z, lambda: plans.Z_BACKWARD)


def _stacked(
    logits: Sequence[Tensor], indices: Sequence[Tensor], mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The logits, indices and mask of the tokens of all layers, with the layers along a first axis."""
    op = "moe.load_balancing_loss"
    if not isinstance(indices, list | tuple) or len(indices) != len(logits) or not logits:
        what = f"{len(indices)}" if isinstance(indices, list | tuple) else f"a {type(indices).__name__}"
        raise ArgumentError(
            f"{op}: logits in a {type(logits).__name__} are those of several layers, so indices must be a list or "
            f"tuple of as many tensors, at least 1, got {len(logits)} logits and {what} for indices"
        )
    for layer in range(len(logits)):
        check_logits(op, logits[layer])
        require_like(op, f"logits[{layer}]", logits[layer], "logits[0]", logits[0])
        require_ids(op, f"indices[{layer}]", indices[layer], "logits[0]", logits[0])
        require_like(op, f"indices[{layer}]", indices[layer], "indices[0]", indices[0])
    _check_mask(op, mask, logits[0])
    stacked = torch.stack(tuple(logits))
    return stacked, torch.stack(tuple(indices)), None if mask is None else mask.expand(stacked.shape[:-1])


@_balance.public
def load_balancing_loss(
    logits: Float[Tensor, "*tokens experts"] | Sequence[Float[Tensor, "*tokens experts"]],
    indices: Int[Tensor, "*tokens k"] | Sequence[Int[Tensor, "*tokens k"]],
    mask: Bool[Tensor, "*tokens"] | None = None,
    *,
    preference: Preference | None = None,
) -> Float[Tensor, ""]:
    """E·Σ f·P over the experts, where f is how often each is chosen per token, and P its mean probability.

    It is k if the load is even. `load_balancing_loss_func` of Hugging Face's mixture models computes the same, but from
    a top-k of its own instead of the choices that were made. It is for one layer, or for a list or tuple of layers,
    whose tokens are counted as if all were those of one layer. This is not the mean of the layers' losses, because
    layers that are uneven in different ways compensate each other.

    Args:
        logits: the router's logits, bfloat16, float16, float32 or float64; probabilities are their softmax. Those of
            several layers have one shape and dtype, and are copied into one tensor.
        indices: the chosen experts, int32 or int64, as `route` returns them; they have no gradient. For several layers
            there is one tensor for each tensor of logits.
        mask: True for tokens that count; without a mask all do. There is one mask for all layers.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        A scalar, float32 (float64 for float64 logits); 0 if no token counts.

    Raises:
        ArgumentError: a shape, dtype or device is wrong, or (on the CPU) an index is out of range; on a GPU
            `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> logits = torch.zeros(6, 3)
    >>> load_balancing_loss(logits, torch.tensor([[0], [1], [2], [0], [1], [2]]))
    tensor(1.)
    >>> layers = [torch.tensor([[9.0, 0.0]]), torch.tensor([[0.0, 9.0]])]
    >>> load_balancing_loss(layers, [torch.tensor([[0]]), torch.tensor([[1]])])
    tensor(1.)
    """
    if isinstance(logits, list | tuple):
        logits, indices, mask = _stacked(logits, indices, mask)  # type: ignore[arg-type]
    return _balance.call(logits, indices, mask, preference=preference)[0]  # type: ignore[no-any-return]


@_z.public
def z_loss(
    logits: Float[Tensor, "*tokens experts"],
    mask: Bool[Tensor, "*tokens"] | None = None,
    *,
    preference: Preference | None = None,
) -> Float[Tensor, ""]:
    """The mean over tokens of logsumexp(logits)², which keeps a router's logits small.

    Args:
        logits: bfloat16, float16, float32 or float64.
        mask: True for tokens that count; without a mask all do.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        A scalar, float32 (float64 for float64 logits); 0 if no token counts.

    Raises:
        ArgumentError: a shape, dtype or device is wrong.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> z_loss(torch.zeros(5, 1))
    tensor(0.)
    """
    return _z.call(logits, mask, preference=preference)[0]  # type: ignore[no-any-return]
