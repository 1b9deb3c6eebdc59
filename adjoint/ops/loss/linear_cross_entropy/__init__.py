"""Cross entropy of hidden·weightᵀ + bias, which never holds all logits.

The loss is that of `cross_entropy` for the logits x = hidden·weightᵀ + bias. Rows of hidden go through it in blocks.

Adjoint, with dx as there:   dhidden = dx·weight,   dweight = dxᵀ·hidden,   dbias = Σ dx over the tokens

Where the loss is one number, every token has the same upstream gradient, so the gradients for an upstream gradient of 1
are computed in the forward, while a block's logits are there: three matrix products in all. They are kept as sums in
float32 (`weight_sums`, `bias_sums`) and scaled and rounded once in the backward. Those of hidden, a block's own, are
kept in bfloat16 where hidden is; float16, which has too few exponents for a mean over many tokens, is kept in float32
and divided by the number of labels in the backward. A forward of which nobody needs a gradient computes none of this.

With reduction="none" or log-probabilities the upstream gradients are not known: the forward keeps a class and a
logsumexp of each token, 8 bytes, and the backward computes the logits again.
"""

from typing import Any, Literal, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout, copied_names
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.core.problem import short, wide_dtype
from adjoint.ops.loss.arguments import OPTIONS, Loss, check_labels, check_options, check_saved, check_upstream, options
from adjoint.ops.loss.eager import is_handed_on
from adjoint.ops.loss.linear_cross_entropy import plans
from adjoint.ops.loss.linear_cross_entropy.kept import (
    NEED_BIAS,
    NEED_HIDDEN,
    NEED_WEIGHT,
    hidden_sums_dtype,
    needed_sums,
)
from adjoint.ops.loss.plans import DTYPES, NAMES

_OP = "linear_cross_entropy"

Reduction = Literal["mean", "sum", "none"]


# -------------------------------------------------------------------------------------------- checks


def _check_layer(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """hidden [..., D] and weight [V, D] of one dtype, and a bias [V]."""
    require_floating(_OP, "hidden", hidden)
    if hidden.dim() == 0:
        raise ArgumentError(f"{_OP}: hidden must have an axis of columns, the last, got a tensor without axes")
    require_floating(_OP, "weight", weight)
    columns = hidden.shape[-1]
    if weight.dim() != 2 or weight.shape[1] != columns or weight.shape[0] == 0:
        raise ArgumentError(
            f"{_OP}: weight must have shape [classes, {columns}], at least one class, for hidden with {columns} "
            f"columns, got {tuple(weight.shape)}"
        )
    require_like(_OP, "weight", weight, "hidden", hidden, tuple(weight.shape))
    if bias is not None:
        require_floating(_OP, "bias", bias)
        require_like(_OP, "bias", bias, "hidden", hidden, (weight.shape[0],))


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *values: Any) -> None:
    loss = Loss(*values[:-1])
    _check_layer(hidden, weight, bias)
    check_labels(_OP, labels, "hidden", hidden, loss)
    check_options(_OP, loss)


def _check_scaling(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, hidden_sums: Tensor, weight_sums: Tensor,
    bias_sums: Tensor, count: Tensor, *values: Any,
) -> None:  # fmt: skip
    dtype = values[-2]
    if dtype not in DTYPES:
        raise ArgumentError(f"{_OP}: dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    kind = wide_dtype(DTYPES[dtype])
    if dloss is None or dloss.dtype != kind or dloss.dim() or dlog_probabilities is not None:
        raise ArgumentError(f"{_OP}: dloss must be one {short(kind)}, and nothing else may have an upstream gradient")
    for name, tensor in (("weight_sums", weight_sums), ("bias_sums", bias_sums), ("count", count)):
        if tensor.dtype != kind or tensor.device != hidden_sums.device:
            raise ArgumentError(f"{_OP}: {name} must be {short(kind)}, as the forward gives it")


def _check_again(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    targets: Tensor, sizes: Tensor, count: Tensor, *values: Any,
) -> None:  # fmt: skip
    loss = Loss(*values[:-2])
    _check_layer(hidden, weight, bias)
    check_options(_OP, loss)
    upstream = {"dloss": dloss, "dlog_probabilities": dlog_probabilities}
    check_upstream(_OP, loss, hidden.shape[:-1], hidden, upstream)
    check_saved(_OP, hidden, targets, sizes, count)


# --------------------------------------------------------------------------------------- declaration


def _sizes(hidden: Tensor, weight: Tensor) -> tuple[int, ...]:
    tokens = 1
    for size in hidden.shape[:-1]:
        tokens *= size
    return tokens, weight.shape[1], weight.shape[0]


def _copied(hidden: Tensor, weight: Tensor, **others: Tensor | None) -> str:
    """Which tensors are copied before kernels read them: those that are not contiguous, and matrices whose memory
    begins at no multiple of 16 bytes."""
    if not (hidden.data_ptr() | weight.data_ptr()) % 16 and all(
        [x is None or x.is_contiguous() for x in (hidden, weight, *others.values())]
    ):
        return ""
    matrices = {"hidden": hidden, "weight": weight}
    layout = copied_layout({}, {**matrices, **others})
    shifted = [name for name, x in matrices.items() if x.is_contiguous() and x.data_ptr() % 16]
    return f"{', '.join([*copied_names(layout), *shifted])} copied" if shifted else layout


def _describe(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *values: Any) -> Facts:
    parts = [_copied(hidden, weight, labels=labels, bias=bias)]
    parts += ["bias absent"] * (bias is None)
    return Facts((hidden.dtype, labels.dtype), "; ".join(filter(None, parts)), _sizes(hidden, weight))


def _describe_scaling(
    dloss: Tensor, dlog_probabilities: Tensor | None, hidden_sums: Tensor, weight_sums: Tensor, bias_sums: Tensor,
    count: Tensor, *values: Any,
) -> Facts:  # fmt: skip
    layout = copied_layout({}, {"hidden_sums": hidden_sums, "weight_sums": weight_sums, "bias_sums": bias_sums})
    sizes = tuple(x.numel() for x in (hidden_sums, weight_sums, bias_sums))
    return Facts((DTYPES[values[-2]],), layout, sizes)


def _describe_again(
    dloss: Tensor | None, dlog_probabilities: Tensor | None, hidden: Tensor, weight: Tensor, bias: Tensor | None,
    *rest: Any,
) -> Facts:  # fmt: skip
    upstream = {"dloss": dloss, "dlog_probabilities": dlog_probabilities}
    parts = [_copied(hidden, weight, bias=bias, **upstream)]
    parts += [f"{name} absent" for name, x in {"bias": bias, **upstream}.items() if x is None]
    return Facts((hidden.dtype,), "; ".join(filter(None, parts)), _sizes(hidden, weight))


def _allocate(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *values: Any) -> tuple[Tensor, ...]:
    *numbers, frozen, keep = values
    loss, kind = Loss(*numbers), wide_dtype(hidden.dtype)
    number = 0 if loss.is_total else labels.numel()
    needed = needed_sums(loss, frozen, keep, bias is not None)

    def sums(like: Tensor | None, bit: int, dtype: torch.dtype) -> Tensor:
        return hidden.new_empty(like.shape if like is not None and needed & bit else 0, dtype=dtype)

    return (
        hidden.new_empty(labels.shape if loss.reduction == "none" else (), dtype=kind),
        hidden.new_empty(labels.shape if loss.log_probabilities else 0, dtype=kind),
        hidden.new_empty(number, dtype=torch.int32),
        hidden.new_empty(number, dtype=kind),
        hidden.new_empty(1, dtype=kind),
        sums(hidden, NEED_HIDDEN, hidden_sums_dtype(hidden.dtype)),
        sums(weight, NEED_WEIGHT, kind),
        sums(bias, NEED_BIAS, kind),
    )


def _allocate_scaled(
    dloss: Tensor, dlog_probabilities: Any, hidden_sums: Tensor, weight_sums: Tensor, bias_sums: Tensor,
    count: Tensor, *values: Any,
) -> tuple[Tensor, ...]:  # fmt: skip
    dtype, need = values[-2:]
    return tuple(
        count.new_empty(sums.shape if need >> bit & 1 else 0, dtype=DTYPES[dtype])
        for bit, sums in enumerate((hidden_sums, weight_sums, bias_sums))
    )


def _unscaled(dloss: Tensor, dlog_probabilities: Any, *arguments: Any) -> tuple[Tensor, ...] | None:
    """What was kept, where it is the gradient itself, of a type that is not rounded."""
    sums, (dtype, _) = arguments[:3], arguments[-2:]
    return sums if dtype in ("float32", "float64") and is_handed_on(dloss) else None


def _allocate_again(
    dloss: Any, dlog_probabilities: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> tuple[Tensor, ...]:
    need = rest[-1]
    return tuple(
        hidden.new_empty(x.shape if x is not None and need >> bit & 1 else 0)
        for bit, x in enumerate((hidden, weight, bias))
    )


def _flops(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, *values: Any) -> int:
    """The logits, and where gradients are computed with them a product for each."""
    *numbers, frozen, keep = values
    needed = needed_sums(Loss(*numbers), frozen, keep, False)
    return 2 * hidden.numel() * weight.shape[0] * (1 + needed.bit_count())


def _flops_again(dloss: Any, dlog_probabilities: Any, hidden: Tensor, weight: Tensor, *rest: Any) -> int:
    """The logits, and a product for each gradient of a matrix."""
    return 2 * hidden.numel() * weight.shape[0] * (1 + (rest[-1] & 3).bit_count())


_linear_cross_entropy = Op(
    _OP,
    inputs=("hidden", "weight", "labels", "bias?"),
    differentiable=("hidden", "weight", "bias"),
    options=f"{OPTIONS}, int frozen",
    outputs=("loss", "log_probabilities"),
    kept=("targets", "sizes", "count", "hidden_sums", "weight_sums", "bias_sums"),
    absent=lambda hidden, weight, labels, bias, *values: () if values[-2] else ("log_probabilities",),
    check=_check,
    allocate=_allocate,
    describe=_describe,
    forward=lambda: plans.FORWARD,
    flops=_flops,
    adjoint=Adjoint(
        lambda: plans.SCALING,
        _describe_scaling,
        saves=("hidden_sums", "weight_sums", "bias_sums", "count"),
        options=f"{OPTIONS}, int frozen, str dtype",
        options_of=lambda hidden, weight, labels, bias, *values: (*values, NAMES[hidden.dtype]),
        check=_check_scaling,
        allocate=_allocate_scaled,
        at_once=_unscaled,
    ),
    alternatives={
        "again": Adjoint(
            lambda: plans.AGAIN,
            _describe_again,
            name="backward_again",
            saves=("hidden", "weight", "bias?", "targets", "sizes", "count"),
            check=_check_again,
            allocate=_allocate_again,
            flops=_flops_again,
        )
    },
)


@overload
def linear_cross_entropy(
    hidden: Float[Tensor, "*tokens columns"], weight: Float[Tensor, "classes columns"], labels: Int[Tensor, "*tokens"],
    *, bias: Float[Tensor, " classes"] | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: Reduction = "mean", shift: bool = False,
    return_log_probabilities: Literal[False] = False, preference: Preference | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    hidden: Float[Tensor, "*tokens columns"], weight: Float[Tensor, "classes columns"], labels: Int[Tensor, "*tokens"],
    *, bias: Float[Tensor, " classes"] | None = None, ignore_index: int = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, softcap: float | None = None, reduction: Reduction = "mean", shift: bool = False,
    return_log_probabilities: Literal[True], preference: Preference | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@_linear_cross_entropy.public
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, bias: Tensor | None = None, ignore_index: int = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, softcap: float | None = None, reduction: Reduction = "mean",
    shift: bool = False, return_log_probabilities: bool = False, preference: Preference | None = None,
) -> Any:  # fmt: skip
    """The cross entropy of hidden·weightᵀ + bias, as `cross_entropy` has it, without ever holding all logits.

    Args:
        hidden: any shape with an axis of columns, the last; float64, float32, bfloat16 or float16.
        weight: a row for each class, in the dtype of hidden.
        labels: int32 or int64, of the shape of hidden without its last axis. One that is neither ignore_index nor a
            class is reported by position and value: at once on the CPU; on a GPU through `adjoint.check()`, and its
            token counts for nothing meanwhile.
        bias: a number for each class, in the dtype of hidden.
        ignore_index: the label of tokens that count for nothing.
        label_smoothing: ε, from 0 to 1: what the label gives to all classes alike.
        z_loss: λ: adds λ·logsumexp² to the loss of each token.
        softcap: logits x are replaced by softcap·tanh(x / softcap).
        reduction: "mean" over the tokens that count, 0 where none does; "sum"; or "none", a loss for each token.
        shift: the class of a token is the label of the next one along the last axis of labels; the last one has none.
            In packed sequences, give the first token of each the label ignore_index: what it says of the sequence
            before it is then left out.
        return_log_probabilities: also returns the log-probability of each token's label, 0 for those that do not count.
        preference: narrows the choice of plans for this call and its backward. The default plan on a GPU takes the
            vendor's matrix products, whose bits nobody promises; `repeatable=True` takes products of our own, and a
            token's loss then has bits of its own too, whatever its batch.

    Returns:
        The loss, in float32, in float64 for float64: a scalar, or one of the shape of labels; with
        `return_log_probabilities` a tuple of it and the log-probabilities.

    Raises:
        ArgumentError: a shape, dtype, device or option is wrong, or (on the CPU) a label is.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]], requires_grad=True)
    >>> loss = linear_cross_entropy(hidden, torch.eye(2), torch.tensor([0, -100]))
    >>> loss.backward()
    >>> loss, hidden.grad
    (tensor(0.3133, grad_fn=<_LinearCrossEntropyBackward>), tensor([[-0.2689,  0.2689],
            [ 0.0000,  0.0000]]))
    """
    values = options(_OP, ignore_index, label_smoothing, z_loss, softcap, reduction, shift, return_log_probabilities)
    loss, log_probabilities = _linear_cross_entropy.call(
        hidden, weight, labels, bias, *values, _frozen(hidden, weight, bias), preference=preference,
        form="" if values.is_total else "again",
    )  # fmt: skip
    return (loss, log_probabilities) if return_log_probabilities else loss


def _frozen(*inputs: Any) -> int:
    """A mask of the inputs that need no gradient while another does: the forward computes none for them."""
    needs = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
    return sum(1 << bit for bit, needed in enumerate(needs) if not needed) if any(needs) else 0
