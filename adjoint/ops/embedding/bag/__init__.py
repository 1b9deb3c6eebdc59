"""Embedding bag.   out[b, :] = reduce over the entries n of bag b of   factor[n] · weight[ids[n], :]

`reduce` is the sum, the mean (the sum divided by the number of entries that count) or the maximum. An entry that is
`padding_idx` does not count. An empty bag gives 0.

Adjoint, given dout:
    dweight[r, :]          = Σ factor[n] · dout[bag of n, :] over the n with ids[n] = r
    dper_sample_weights[n] = dout[bag of n, :] · weight[ids[n], :]
with factor 1/count for the mean, and for the maximum only in the columns in which entry n is the maximum.

It saves ids, offsets, per-sample weights, and the table if the gradient of these weights is needed. For the mean it
also saves how many entries count in each bag, and for the maximum the entry that is the maximum of each column.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_flag, require_floating, require_ids, require_like
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.embedding.bag import plans
from adjoint.ops.embedding.bag.plans import NEED_WEIGHT, NEED_WEIGHTS
from adjoint.ops.embedding.table import check_table, padding_row

Mode = Literal["mean", "sum", "max"]
MODES = ("mean", "sum", "max")


# -------------------------------------------------------------------------------------------- checks


def _check(
    ids: Tensor, weight: Tensor, offsets: Tensor | None, factors: Tensor | None, mode: str, padding: int, has_last: bool
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
        if has_last:
            raise ArgumentError("embedding_bag: include_last_offset=True says how to read offsets, and none are given")
    else:
        require_ids("embedding_bag", "offsets", offsets, "weight", weight)
        if ids.dim() != 1 or offsets.dim() != 1:
            raise ArgumentError(
                f"embedding_bag: with offsets, ids and offsets must have one axis each, got shapes "
                f"{tuple(ids.shape)} and {tuple(offsets.shape)}"
            )
        if has_last and offsets.numel() == 0:
            raise ArgumentError("embedding_bag: include_last_offset=True needs at least one offset, the end")
    if factors is not None:
        if mode != "sum":
            raise ArgumentError(f'embedding_bag: per_sample_weights go with mode="sum", got mode={mode!r}')
        require_like("embedding_bag", "per_sample_weights", factors, "weight", weight, tuple(ids.shape))


def _check_backward(*arguments: Any) -> None:
    dout, ids, weight, offsets, factors, extra, rows, mode, padding, has_last, need = arguments
    require_floating("embedding_bag", "dout", dout)
    if dout.dim() != 2:
        raise ArgumentError(f"embedding_bag: dout must have two axes, bags and columns, got shape {tuple(dout.shape)}")
    if weight is None:
        if need & NEED_WEIGHTS:
            raise ArgumentError("embedding_bag: the gradient of per_sample_weights needs weight, and it is not given")
        weight = dout[:0]
    elif weight.shape[0] != rows:
        raise ArgumentError(f"embedding_bag: weight must have the {rows} rows that rows says, got {weight.shape[0]}")
    _check(ids, weight, offsets, factors, mode, padding, has_last)
    bags, columns = _bags(ids, offsets, has_last), weight.shape[1]
    require_like("embedding_bag", "dout", dout, "weight", weight, (bags, columns))
    shape = _extra_shape(mode, bags, columns)
    if tuple(extra.shape) != shape or extra.dtype != torch.int32 or not extra.is_contiguous():
        raise ArgumentError(
            f"embedding_bag: extra must be what the forward gave, contiguous int32 of shape {shape}, got "
            f"{extra.dtype} of shape {tuple(extra.shape)}"
        )


# --------------------------------------------------------------------------------------- declaration


def _bags(ids: Tensor, offsets: Tensor | None, has_last: bool) -> int:
    return ids.shape[0] if offsets is None else offsets.shape[0] - int(has_last)


def _extra_shape(mode: str, bags: int, columns: int) -> tuple[int, ...]:
    """The shape of the further output for the backward: the winners of each column, or how many entries count."""
    return {"max": (bags, columns), "mean": (bags,), "sum": (0,)}[mode]


def _facts(ids: Tensor, table: Tensor, rows: int, offsets: Tensor | None, factors: Any, has_last: bool) -> Facts:
    """The facts of a problem. `table` has the columns and the dtype of the table: it is the table, or a gradient."""
    layout = copied_layout({}, {"ids": ids, "offsets": offsets, "per_sample_weights": factors})
    dtypes = (table.dtype, ids.dtype) if offsets is None else (table.dtype, ids.dtype, offsets.dtype)
    return Facts(dtypes, layout, (ids.numel(), rows, table.shape[1], _bags(ids, offsets, has_last)))


def _allocate(ids: Tensor, weight: Tensor, offsets: Tensor | None, *options: Any) -> tuple[Tensor, Tensor]:
    """Empty outputs. The kernels write `extra` even if it is not needed, because it is small, or for the maximum
    because they compute it anyway."""
    _, mode, _, has_last, _ = options
    bags, columns = _bags(ids, offsets, has_last), weight.shape[1]
    extra = _extra_shape(mode, bags, columns)
    return weight.new_empty((bags, columns)), weight.new_empty(extra, dtype=torch.int32)


def _allocate_backward(dout: Tensor, ids: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    rows, need = rest[4], rest[-1]
    return (
        dout.new_empty((rows, dout.shape[1]) if need & NEED_WEIGHT else (0,)),
        dout.new_empty(tuple(ids.shape) if need & NEED_WEIGHTS else (0,)),
    )


_bag = Op(
    "embedding_bag",
    inputs=("ids", "weight", "offsets?", "per_sample_weights?"),
    differentiable=("weight", "per_sample_weights"),
    options="str mode, int padding_idx, bool include_last_offset",
    outputs=("out",),
    kept=("extra",),
    check=_check,
    allocate=_allocate,
    describe=lambda ids, weight, offsets, factors, mode, padding, has_last, keep: _facts(
        ids, weight, weight.shape[0], offsets, factors, has_last
    ),
    forward=lambda: plans.EMBEDDING_BAG,
    adjoint=Adjoint(
        lambda: plans.EMBEDDING_BAG_BACKWARD,
        lambda dout, ids, weight, offsets, factors, extra, rows, mode, padding, has_last, need: _facts(
            ids, dout, rows, offsets, factors, has_last
        ),
        saves=("ids", "weight?", "offsets?", "per_sample_weights?", "extra"),
        omits=lambda needs, *arguments: () if needs["per_sample_weights"] else ("weight",),
        options="SymInt rows, str mode, int padding_idx, bool include_last_offset",
        options_of=lambda ids, weight, offsets, factors, *options: (weight.shape[0], *options),
        check=_check_backward,
        allocate=_allocate_backward,
    ),
)


@_bag.public
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
        ids: int32 or int64. With two axes, each row is a bag. With one axis, `offsets` say where bags begin.
        weight: the table; float64, float32, bfloat16 or float16, kept by the result.
        offsets: int32 or int64, ascending from 0: where each bag begins. A bag ends where the next one begins.
        per_sample_weights: for "sum", a factor for each entry, like `ids`, of the dtype of `weight`.
        mode: "mean" divides by the number of entries that count; "max" takes the first of equal entries.
        padding_idx: an id that bags leave out. A negative number counts from the end.
        include_last_offset: whether the last offset is the end of the last bag, and not the beginning of a further bag.
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
    padding = -1
    if padding_idx is not None:
        check_table("embedding_bag", ids, weight)
        padding = padding_row("embedding_bag", padding_idx, weight.shape[0])
    require_flag("embedding_bag", "include_last_offset", include_last_offset)
    return _bag.call(  # type: ignore[no-any-return]
        ids, weight, offsets, per_sample_weights, mode, padding, include_last_offset, preference=preference
    )
