"""Embedding bag.   out[b, :] = reduce over the entries n of bag b of   factor[n] · weight[ids[n], :]

`reduce` is the sum, the mean (the sum over the number of entries that count) or the maximum. An entry that
is `padding_idx` counts for nothing; an empty bag is 0.

Adjoint, given dout:
    dweight[r, :]          = Σ factor[n] · dout[bag of n, :] over the n with ids[n] = r
    dper_sample_weights[n] = dout[bag of n, :] · weight[ids[n], :]
with factor 1/count for the mean, and for the maximum only the columns that entry n has won.

Saves ids, offsets, per-sample weights, and the table where their gradient is wanted; besides, for the mean
how many entries count in each bag, for the maximum the entry that won in each column.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids, require_like
from adjoint.core.errors import ArgumentError, second_derivative
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.embedding import bag_plans
from adjoint.ops.embedding.embedding import check_table, normalized_padding
from adjoint.ops.embedding.plans import NEED_WEIGHT, NEED_WEIGHTS

Mode = Literal["mean", "sum", "max"]
MODES = ("mean", "sum", "max")


# -------------------------------------------------------------------------------------------- checks


def _check(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    padding: int,
    include_last_offset: bool,
) -> None:
    check_table("embedding_bag", ids, weight)
    if mode not in MODES:
        raise ArgumentError(f"embedding_bag: mode must be one of {', '.join(map(repr, MODES))}, got {mode!r}")
    if offsets is None:
        if ids.dim() != 2:
            raise ArgumentError(
                f"embedding_bag: ids must have two axes, bags and entries, or one and offsets; got shape "
                f"{tuple(ids.shape)} and no offsets"
            )
    else:
        require_ids("embedding_bag", "offsets", offsets, "weight", weight)
        if ids.dim() != 1 or offsets.dim() != 1:
            raise ArgumentError(
                f"embedding_bag: with offsets, ids and offsets must have one axis each, got shapes "
                f"{tuple(ids.shape)} and {tuple(offsets.shape)}"
            )
        if include_last_offset and offsets.numel() == 0:
            raise ArgumentError("embedding_bag: include_last_offset=True needs at least one offset, the end")
    if include_last_offset and offsets is None:
        raise ArgumentError("embedding_bag: include_last_offset=True says how to read offsets, and none are given")
    if per_sample_weights is not None:
        if mode != "sum":
            raise ArgumentError(f'embedding_bag: per_sample_weights go with mode="sum", got mode={mode!r}')
        require_like("embedding_bag", "per_sample_weights", per_sample_weights, "weight", weight, tuple(ids.shape))


def _check_backward(
    dout: Tensor,
    ids: Tensor,
    weight: Tensor | None,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    extra: Tensor,
    rows: int,
    mode: str,
    padding: int,
    include_last_offset: bool,
    need: int,
) -> None:
    require_floating("embedding_bag", "dout", dout)
    if dout.dim() != 2:
        raise ArgumentError(f"embedding_bag: dout must have two axes, bags and columns, got shape {tuple(dout.shape)}")
    if weight is None:
        if need & NEED_WEIGHTS:
            raise ArgumentError("embedding_bag: the gradient of per_sample_weights needs weight, and it is not given")
        weight = dout[:0]
    elif weight.shape[0] != rows:
        raise ArgumentError(f"embedding_bag: weight must have the {rows} rows that rows says, got {weight.shape[0]}")
    _check(ids, weight, offsets, per_sample_weights, mode, padding, include_last_offset)
    bags, columns = _bags(ids, offsets, include_last_offset), weight.shape[1]
    require_like("embedding_bag", "dout", dout, "weight", weight, (bags, columns))
    shape = _extra_shape(mode, bags, columns)
    if tuple(extra.shape) != shape or extra.dtype != torch.int32 or not extra.is_contiguous():
        raise ArgumentError(
            f"embedding_bag: extra must be what the forward gave, contiguous int32 of shape {shape}, got "
            f"{extra.dtype} of shape {tuple(extra.shape)}"
        )


# ----------------------------------------------------------------------------------------- operators


def _bags(ids: Tensor, offsets: Tensor | None, include_last_offset: bool) -> int:
    return ids.shape[0] if offsets is None else offsets.shape[0] - int(include_last_offset)


def _extra_shape(mode: str, bags: int, columns: int) -> tuple[int, ...]:
    """What the backward needs besides: the winners of each column, or how many entries count."""
    return {"max": (bags, columns), "mean": (bags,), "sum": (0,)}[mode]


def _describe(
    op: str,
    ids: Tensor,
    table: Tensor,
    rows: int,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    options: tuple[Any, ...],
    include_last_offset: bool,
) -> Problem:
    """`table` has the columns and the dtype of the table: itself, or a gradient."""
    given = {"ids": ids, "offsets": offsets, "per_sample_weights": per_sample_weights}
    layout = ", ".join(name for name, t in given.items() if t is not None and not t.is_contiguous())
    dtypes = (table.dtype, ids.dtype) if offsets is None else (table.dtype, ids.dtype, offsets.dtype)
    sizes = (ids.numel(), rows, table.shape[1], _bags(ids, offsets, include_last_offset))
    return Problem(op, table.device, dtypes, layout, sizes, options)


def _allocate(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    mode: str,
    padding: int,
    include_last_offset: bool,
) -> tuple[Tensor, Tensor]:
    bags, columns = _bags(ids, offsets, include_last_offset), weight.shape[1]
    extra = _extra_shape(mode, bags, columns)
    return weight.new_empty((bags, columns)), weight.new_empty(extra, dtype=torch.int32)


def _allocate_backward(
    dout: Tensor,
    ids: Tensor,
    weight: Tensor | None,
    offsets: Tensor | None,
    per_sample_weights: Tensor | None,
    extra: Tensor,
    rows: int,
    mode: str,
    padding: int,
    include_last_offset: bool,
    need: int,
) -> tuple[Tensor, Tensor]:
    return (
        dout.new_empty((rows, dout.shape[1]) if need & NEED_WEIGHT else (0,)),
        dout.new_empty(tuple(ids.shape) if need & NEED_WEIGHTS else (0,)),
    )


_embedding_bag = define(
    "embedding_bag",
    "Tensor ids, Tensor weight, Tensor? offsets, Tensor? per_sample_weights, str mode, int padding_idx, "
    "bool include_last_offset",
    "(Tensor, Tensor)",
    outputs=("out", "extra"),
    tensors=("ids", "weight", "offsets", "per_sample_weights"),
    check=_check,
    allocate=_allocate,
    describe=lambda ids, weight, offsets, factors, *options: _describe(
        "embedding_bag", ids, weight, weight.shape[0], offsets, factors, options, options[2]
    ),
    candidates=lambda: bag_plans.EMBEDDING_BAG,
)
_embedding_bag_backward = define(
    "embedding_bag_backward",
    "Tensor dout, Tensor ids, Tensor? weight, Tensor? offsets, Tensor? per_sample_weights, Tensor extra, "
    "SymInt rows, str mode, int padding_idx, bool include_last_offset, int need",
    "(Tensor, Tensor)",
    outputs=("dweight", "dper_sample_weights"),
    tensors=("dout", "ids", "weight", "offsets", "per_sample_weights", "extra"),
    check=_check_backward,
    allocate=_allocate_backward,
    describe=lambda dout, ids, weight, offsets, factors, extra, *options: _describe(
        "embedding_bag_backward", ids, dout, options[0], offsets, factors, options, options[3]
    ),
    candidates=lambda: bag_plans.EMBEDDING_BAG_BACKWARD,
)


class _EmbeddingBag(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        offsets: Tensor | None,
        per_sample_weights: Tensor | None,
        mode: str,
        padding: int,
        include_last_offset: bool,
        preference: str,
    ) -> Tensor:
        out, extra = _embedding_bag(
            ids, weight, offsets, per_sample_weights, mode, padding, include_last_offset, preference
        )
        table = weight if ctx.needs_input_grad[3] else None
        ctx.save_for_backward(ids, table, offsets, per_sample_weights, extra)
        ctx.options, ctx.preference = (weight.shape[0], mode, padding, include_last_offset), preference
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative("embedding_bag")
        ids, weight, offsets, per_sample_weights, extra = ctx.saved_tensors
        needs_weight, needs_weights = ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        need = NEED_WEIGHT * needs_weight + NEED_WEIGHTS * needs_weights
        dweight, dweights = _embedding_bag_backward(
            dout, ids, weight, offsets, per_sample_weights, extra, *ctx.options, need, ctx.preference
        )
        gradients = [None] * 8
        gradients[1] = dweight if needs_weight else None
        gradients[3] = dweights if needs_weights else None
        return tuple(gradients)


def embedding_bag(
    ids: Int[Tensor, "*shape"],
    weight: Float[Tensor, "rows columns"],
    offsets: Int[Tensor, " offsets"] | None = None,
    per_sample_weights: Float[Tensor, "*shape"] | None = None,
    *,
    mode: Mode = "mean",
    padding_idx: int | None = None,
    include_last_offset: bool = False,
    preference: Preference | None = None,
) -> Float[Tensor, "bags columns"]:
    """The sum, mean or maximum of the rows of each bag of ids.

    Args:
        ids: int32 or int64. Two axes: each row is a bag. One axis: `offsets` say where bags begin.
        weight: the table; float64, float32, bfloat16 or float16, kept by the result.
        offsets: int32 or int64, ascending from 0: where each bag begins; it ends where the next begins.
        per_sample_weights: for "sum", a factor for each entry, like `ids`, of the dtype of `weight`.
        mode: "mean" divides by the number of entries that count; "max" takes the first of equal entries.
        padding_idx: an id that counts for nothing. Negative counts from the end.
        include_last_offset: the last offset is the end of the last bag, not the beginning of one more.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: shapes, dtypes, devices or options are wrong, or (on the CPU) an id is out of
            range or offsets are out of order; on a GPU `adjoint.check()` raises for values.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> embedding_bag(torch.tensor([0, 1, 1]), weight, torch.tensor([0, 2]), mode="sum")
    tensor([[4., 6.],
            [3., 4.]])
    """
    arguments = _arguments(ids, weight, offsets, mode, per_sample_weights, padding_idx, include_last_offset)
    text = resolve(preference)
    wanted = weight.requires_grad or (per_sample_weights is not None and per_sample_weights.requires_grad)
    if not (wanted and torch.is_grad_enabled()):
        return _embedding_bag(*arguments, text)[0]  # type: ignore[no-any-return]
    return _EmbeddingBag.apply(*arguments, text)  # type: ignore[no-any-return]


def _arguments(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None,
    mode: str,
    per_sample_weights: Tensor | None,
    padding_idx: int | None,
    include_last_offset: bool,
) -> tuple[Any, ...]:
    """The operator's arguments, checked."""
    check_table("embedding_bag", ids, weight)
    padding = normalized_padding("embedding_bag", padding_idx, weight.shape[0])
    arguments = (ids, weight, offsets, per_sample_weights, mode, padding, bool(include_last_offset))
    _check(*arguments)
    return arguments


def _bind(
    ids: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    per_sample_weights: Tensor | None = None,
    *,
    mode: Mode = "mean",
    padding_idx: int | None = None,
    include_last_offset: bool = False,
) -> Call:
    arguments = _arguments(ids, weight, offsets, mode, per_sample_weights, padding_idx, include_last_offset)
    need = NEED_WEIGHT | (NEED_WEIGHTS if per_sample_weights is not None else 0)
    tensors, options = arguments[:4], arguments[4:]
    return Call(
        _embedding_bag,
        arguments,
        _embedding_bag_backward,
        lambda upstream, outputs: (upstream[0], *tensors, outputs[1], weight.shape[0], *options, need),
        public_outputs=1,
    )


publish(embedding_bag, _bind)
