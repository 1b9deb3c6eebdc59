"""Cross entropy of logits.   loss_t = (1 − ε)·(L − z_y) + ε·(L − mean z) + λ·L²,   L = logsumexp(z),   y = labels[t]

z are the logits x, or softcap·tanh(x / softcap); ε is label_smoothing, λ z_loss. Tokens whose label is ignore_index
count for nothing; the mean is over those that count.

Adjoint, given g of a token's loss and h of its label's log-probability z_y − L, with p = softmax(z) over V classes:

    dz = (g·(1 + 2·λ·L) − h)·p + (h − g·(1 − ε))·1_y − g·ε/V,     dx = dz·(1 − (z / softcap)²)

Saves the logits, and for each token its class and L: 8 bytes. Of few logits on the CPU the forward computes dx for
upstream gradients of 1, and saves that alone: see `eager.keeps_slopes`. Under autocast nothing is cast.
"""

from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, reuse_form
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short, wide_dtype
from adjoint.ops.loss import plans
from adjoint.ops.loss.arguments import OPTIONS, Loss, check_labels, check_options, check_saved, check_upstream, options
from adjoint.ops.loss.eager import is_handed_on, keeps_slopes

_OP = "cross_entropy"

Reduction = Literal["mean", "sum", "none"]


def _check_logits(logits: Tensor) -> None:
    require_floating(_OP, "logits", logits)
    if 0 in logits.shape[-1:] or not logits.shape:
        raise ArgumentError(
            f"{_OP}: logits must have an axis of classes, the last, and at least one class, got shape "
            f"{tuple(logits.shape)}"
        )


def _check(logits: Tensor, labels: Tensor, *values: Any) -> None:
    loss = Loss(*values[:-1])
    _check_logits(logits)
    check_labels(_OP, labels, "logits", logits, loss)
    check_options(_OP, loss)


def _check_backward(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, logits: Tensor, targets: Tensor, sizes: Tensor,
    count: Tensor, *values: Any,
) -> None:  # fmt: skip
    loss = Loss(*values[:-1])
    _check_logits(logits)
    check_options(_OP, loss)
    upstream = {"dloss": dloss, "dlog_probabilities": dlog_probabilities}
    check_upstream(_OP, loss, logits.shape[:-1], logits, upstream)
    check_saved(_OP, logits, targets, sizes, count)


def _allocate(logits: Tensor, labels: Tensor, *values: Any) -> tuple[Tensor, ...]:
    *numbers, with_slopes, keep = values
    loss, tokens, kind = Loss(*numbers), labels.shape, wide_dtype(logits.dtype)
    number = 0 if with_slopes else labels.numel()
    return (
        logits.new_empty(tokens if loss.reduction == "none" else (), dtype=kind),
        logits.new_empty(tokens if loss.log_probabilities else 0, dtype=kind),
        logits.new_empty(number, dtype=torch.int32),
        logits.new_empty(number, dtype=kind),
        logits.new_empty(0 if with_slopes else 1, dtype=kind),
        logits.new_empty(logits.shape if with_slopes and keep else 0, dtype=kind),
    )


def _sizes(logits: Tensor) -> tuple[int, int]:
    classes = logits.shape[-1]
    return logits.numel() // classes, classes


def _describe(logits: Tensor, labels: Tensor, *values: Any) -> Facts:
    is_whole = logits.is_contiguous() and labels.is_contiguous()
    layout = "" if is_whole else copied_layout({"logits": logits}, {"labels": labels})
    return Facts((logits.dtype, labels.dtype), layout, _sizes(logits))


def _describe_backward(dloss: Tensor | None, dlog_probabilities: Tensor | None, logits: Tensor, *values: Any) -> Facts:
    upstream = {"dloss": dloss, "dlog_probabilities": dlog_probabilities}
    parts = [copied_layout({"logits": logits}, upstream)]
    parts += [f"{name} absent" for name, gradient in upstream.items() if gradient is None]
    return Facts((logits.dtype,), "; ".join(filter(None, parts)), _sizes(logits))


def _check_kept(dloss: Tensor | None, dlog_probabilities: Tensor | None, slopes: Tensor, *values: Any) -> None:
    *numbers, _with_slopes, dtype = values
    if dtype not in plans.DTYPES:
        raise ArgumentError(f"{_OP}: dtype must be one of {', '.join(plans.DTYPES)}, got {dtype!r}")
    require_floating(_OP, "slopes", slopes)
    kind = wide_dtype(plans.DTYPES[dtype])
    if slopes.dtype != kind or not slopes.dim():
        raise ArgumentError(
            f"{_OP}: slopes must be {short(kind)} of the shape of the logits, as the forward gives them"
        )
    if dloss is None or dlog_probabilities is not None:
        raise ArgumentError(f"{_OP}: the loss must have an upstream gradient, and nothing else may have one")
    check_upstream(_OP, Loss(*numbers), slopes.shape[:-1], slopes, {"dloss": dloss})


def _describe_kept(dloss: Tensor, dlog_probabilities: Any, slopes: Tensor, *values: Any) -> Facts:
    return Facts((plans.DTYPES[values[-1]],), "", _sizes(slopes))


def _allocate_kept(dloss: Tensor, dlog_probabilities: Any, slopes: Tensor, *values: Any) -> tuple[Tensor, ...]:
    return (slopes.new_empty(slopes.shape, dtype=plans.DTYPES[values[-1]]),)


def _unscaled(dloss: Tensor, dlog_probabilities: Any, slopes: Tensor, *values: Any) -> tuple[Tensor, ...] | None:
    """What was kept, rounded, where it is the gradient itself."""
    return (slopes.to(plans.DTYPES[values[-1]]),) if is_handed_on(dloss) else None


_SAVES = ("logits", "targets", "sizes", "count")

_cross_entropy = Op(
    _OP,
    inputs=("logits", "labels"),
    differentiable=("logits",),
    options=f"{OPTIONS}, bool with_slopes",
    outputs=("loss", "log_probabilities"),
    kept=("targets", "sizes", "count", "slopes"),
    absent=lambda logits, labels, *values: () if values[-2] else ("log_probabilities",),
    check=_check,
    allocate=_allocate,
    describe=_describe,
    forward=lambda: plans.CROSS_ENTROPY,
    asks_device=True,
    adjoint=Adjoint(lambda: plans.CROSS_ENTROPY_BACKWARD, _describe_backward, saves=_SAVES, check=_check_backward),
    alternatives={
        "reuse": Adjoint(
            lambda: plans.CROSS_ENTROPY_BACKWARD,
            _describe_backward,
            saves=_SAVES,
            check=_check_backward,
            name="backward_reuse",
            overwrites=True,
        ),
        "kept": Adjoint(
            lambda: plans.CROSS_ENTROPY_BACKWARD_KEPT,
            _describe_kept,
            saves=("slopes",),
            options=f"{OPTIONS}, bool with_slopes, str dtype",
            options_of=lambda logits, labels, *values: (*values, plans.NAMES[logits.dtype]),
            check=_check_kept,
            allocate=_allocate_kept,
            name="backward_kept",
            at_once=_unscaled,
        ),
    },
)


@overload
def cross_entropy(
    logits: Float[Tensor, "*tokens classes"], labels: Int[Tensor, "*tokens"], *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Reduction = "mean",
    shift: bool = False, return_log_probabilities: Literal[False] = False, reuse_inputs: bool = False,
    preference: Preference | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Float[Tensor, "*tokens classes"], labels: Int[Tensor, "*tokens"], *, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Reduction = "mean",
    shift: bool = False, return_log_probabilities: Literal[True], reuse_inputs: bool = False,
    preference: Preference | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@_cross_entropy.public
def cross_entropy(
    logits: Tensor, labels: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    softcap: float | None = None, reduction: Reduction = "mean", shift: bool = False,
    return_log_probabilities: bool = False, reuse_inputs: bool = False, preference: Preference | None = None,
) -> Any:  # fmt: skip
    """−log softmax(logits)[label] of each token, its mean, or its sum; in float32, in float64 for float64.

    Args:
        logits: any shape with an axis of classes, the last; float64, float32, bfloat16 or float16.
        labels: int32 or int64, of the shape of logits without its last axis. One that is neither ignore_index nor a
            class is reported by position and value: at once on the CPU; on a GPU through `adjoint.check()`, and its
            token counts for nothing meanwhile.
        ignore_index: the label of tokens that count for nothing, whatever their logits.
        label_smoothing: ε, from 0 to 1: what the label gives to all classes alike.
        z_loss: λ: adds λ·logsumexp² to the loss of each token.
        softcap: logits x are replaced by softcap·tanh(x / softcap).
        reduction: "mean" over the tokens that count, 0 where none does; "sum"; or "none", a loss for each token.
        shift: the class of a token is the label of the next one along the last axis of labels; the last one has none.
            In packed sequences, give the first token of each the label ignore_index: what it says of the sequence
            before it is then left out.
        return_log_probabilities: also returns log softmax(logits)[label] of each token, 0 for tokens that do not count.
        reuse_inputs: the backward writes the gradient over `logits` instead of into new memory. They are lost after
            backward, and a second backward raises.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: a shape, dtype, device or option is wrong, or (on the CPU) a label is.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> logits = torch.tensor([[0.0, 0.0], [9.0, 9.0], [0.0, 1.0]], requires_grad=True)
    >>> loss = cross_entropy(logits, torch.tensor([0, 1, -100]))
    >>> loss
    tensor(0.6931, grad_fn=<_CrossEntropyBackward>)
    >>> loss.backward()
    >>> logits.grad
    tensor([[-0.2500,  0.2500],
            [ 0.2500, -0.2500],
            [ 0.0000,  0.0000]])
    """
    values = options(_OP, ignore_index, label_smoothing, z_loss, softcap, reduction, shift, return_log_probabilities)
    form = "" if reuse_inputs is False else reuse_form(_OP, reuse_inputs)
    with_slopes = not form and keeps_slopes(logits, values)
    loss, log_probabilities = _cross_entropy.call(
        logits, labels, *values, with_slopes, preference=preference, form="kept" if with_slopes else form
    )
    return (loss, log_probabilities) if return_log_probabilities else loss
