"""Embedding.   out[n, :] = weight[ids[n], :]

Adjoint, given dout:   dweight[r, :] = Σ dout[n, :] over the n with ids[n] = r

Saves the ids alone. The sum runs in float32 (float64 for float64), in an order fixed by the row's own
tokens, and is rounded once; rows never referenced are 0. Grouping by row is a stable sort of ours, in the
plan's workspace, so that the dense gradient is written once, by one writer per row, without atomics.
"""

from dataclasses import replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_flag, require_floating, require_ids
from adjoint.core.errors import ArgumentError, Unsupported
from adjoint.core.layout import copied_layout, leading_axes, overlaps_itself
from adjoint.core.op import Adjoint, Facts, Op
from adjoint.core.preference import Preference
from adjoint.ops.embedding.embedding import plans
from adjoint.ops.embedding.table import check_table, padding_row

OutOfRange = Literal["raise", "zero"]


# -------------------------------------------------------------------------------------------- checks


def _check(ids: Tensor, weight: Tensor, padding: int, out_of_range: str) -> None:
    check_table("embedding", ids, weight)
    if out_of_range not in plans.OUT_OF_RANGE:
        names = ", ".join(map(repr, plans.OUT_OF_RANGE))
        raise ArgumentError(f"embedding: out_of_range must be one of {names}, got {out_of_range!r}")


def _check_backward(dout: Tensor, ids: Tensor, rows: int, padding: int) -> None:
    require_floating("embedding", "dout", dout)
    require_ids("embedding", "ids", ids, "dout", dout)
    if dout.dim() == 0 or dout.shape[:-1] != ids.shape:
        raise ArgumentError(
            f"embedding: dout must have the shape of ids, {tuple(ids.shape)}, and one axis more, "
            f"got {tuple(dout.shape)}"
        )
    if not isinstance(rows, int | torch.SymInt) or rows < 0:
        raise ArgumentError(f"embedding: rows must be an integer ≥ 0, got {rows!r}")


def _check_into(dout: Tensor, ids: Tensor, accumulate_into: Tensor, padding: int) -> None:
    _check_backward(dout, ids, 0, padding)
    _require_buffer(accumulate_into, dout.device, (*accumulate_into.shape[:1], dout.shape[-1]))


def _require_buffer(buffer: Tensor, device: torch.device, shape: tuple[int, ...]) -> None:
    """Requires a buffer to which a gradient of a shape can be added."""
    require_floating("embedding", "accumulate_into", buffer)
    if tuple(buffer.shape) != tuple(shape):
        raise ArgumentError(
            f"embedding: accumulate_into must have the shape of weight, {tuple(shape)}, got {tuple(buffer.shape)}"
        )
    if buffer.device != device:
        raise ArgumentError(
            f"embedding: accumulate_into must be on the device of weight, {device}, got {buffer.device}"
        )
    if not torch.compiler.is_compiling() and overlaps_itself(buffer):  # strides of a graph may be symbols
        raise ArgumentError(
            f"embedding: accumulate_into must hold each element once, but its strides {buffer.stride()} overlap"
        )


# --------------------------------------------------------------------------------------- declaration


def _describe(ids: Tensor, weight: Tensor, padding: int, out_of_range: str) -> Facts:
    (rows, columns), count = weight.shape, ids.numel()
    copied = not ids.is_contiguous()
    layout = "past 31 bits" if max(count, rows) > plans.MAX_NUMBER else "ids copied" if copied else ""
    return Facts((weight.dtype, ids.dtype), layout, (count, columns) if copied else (columns,))


def _describe_backward(dout: Tensor, ids: Tensor, rows: int, padding: int) -> Facts:
    layout = ""
    if not (dout.is_contiguous() and ids.is_contiguous()):
        is_readable = dout.numel() == 0 or leading_axes(dout) is not None  # columns need not be adjacent
        layout = copied_layout({}, {"gradient": None if is_readable else dout, "ids": ids})
    return Facts((dout.dtype, ids.dtype), layout, (ids.numel(), rows, dout.shape[-1]))


def _describe_into(dout: Tensor, ids: Tensor, accumulate_into: Tensor, padding: int) -> Facts:
    facts = _describe_backward(dout, ids, accumulate_into.shape[0], padding)
    return facts._replace(dtypes=(*facts.dtypes, accumulate_into.dtype))


def _refuse_size(*arguments: Any) -> tuple[Tensor, ...]:
    raise Unsupported(
        "embedding: the size of a row-sparse gradient is data, so it is not available under torch.compile, in a "
        "CUDA graph or with out=; leave sparse out there"
    )


def _assemble(results: tuple[Tensor, Tensor], arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Makes the row-sparse tensor from the rows that occur and their gradients."""
    (indices, values), (dout, _, rows, *_) = results, arguments
    kind = {"dtype": values.dtype, "device": values.device, "layout": torch.sparse_coo, "is_coalesced": True}
    build = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors  # sparse_coo_tensor of torch 2.11 warns: no checks
    return (build(1, 1, (rows, dout.shape[-1]), indices[None], values, **kind),)


_DENSE = Adjoint(
    lambda: plans.EMBEDDING_BACKWARD,
    _describe_backward,
    saves=("ids",),
    options="SymInt rows, int padding_idx",
    options_of=lambda ids, weight, padding, out_of_range: (weight.shape[0], padding),
    check=_check_backward,
    allocate=lambda dout, ids, rows, padding: (dout.new_empty((rows, dout.shape[-1])),),
)

_embedding = Op(
    "embedding",
    inputs=("ids", "weight"),
    differentiable=("weight",),
    options="int padding_idx, str out_of_range",
    outputs=("out",),
    check=_check,
    allocate=lambda ids, weight, padding, out_of_range: (weight.new_empty((*ids.shape, weight.shape[1])),),
    describe=_describe,
    forward=lambda: plans.EMBEDDING,
    adjoint=_DENSE,
    alternatives={
        "into": Adjoint(
            lambda: plans.EMBEDDING_BACKWARD_INTO,
            _describe_into,
            name="backward_into",
            saves=("ids",),
            buffers=("accumulate_into",),
            options="int padding_idx",
            options_of=lambda ids, weight, padding, out_of_range: (padding,),
            check=_check_into,
        ),
        "sparse": replace(
            _DENSE,
            candidates=lambda: plans.EMBEDDING_BACKWARD_SPARSE,
            name="backward_sparse",
            gradients=("rows", "dweight"),
            allocate=_refuse_size,
            assemble=_assemble,
        ),
    },
)


@_embedding.public
def embedding(
    ids: Int[Tensor, "*shape"],
    weight: Float[Tensor, "rows columns"],
    *,
    padding_idx: int | None = None,
    out_of_range: OutOfRange = "raise",
    accumulate_into: Float[Tensor, "rows columns"] | None = None,
    sparse: bool = False,
    preference: Preference | None = None,
) -> Float[Tensor, "*shape columns"]:
    """out[n, :] = weight[ids[n], :]: byte-identical copies of the rows.

    Args:
        ids: int32 or int64, any shape, any strides.
        weight: the table; float64, float32, bfloat16 or float16, kept by the result.
        padding_idx: a row that is looked up as any other, and gets no gradient. A negative number counts from the end.
        out_of_range: "raise" reports the position and value of the first id below 0 or past the last row: at once on
            the CPU, and on a GPU through `adjoint.check()`, with zero rows meanwhile. "zero" gives zero rows and no
            gradient, and reports nothing.
        accumulate_into: a buffer of any floating dtype and the shape of `weight`. The backward adds the gradient to it
            instead of returning one. So `weight.grad` stays as it is, and autograd's hooks, including those of
            distributed wrappers, do not see the gradient. Under `torch.compile` nothing else in the graph may read the
            buffer. If it changes before another op's backward has read it, this is an error outside of a graph, but
            unnoticed inside.
        sparse: whether the gradient is a row-sparse tensor, coalesced, with ascending rows. Its size depends on the
            ids, so the backward waits for the device once.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: ids are not integers, weight is not a floating matrix, devices differ, or an option or (on the
            CPU) an id is out of range.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> out = embedding(torch.tensor([1, 1, 0]), weight)
    >>> out.sum().backward()
    >>> weight.grad
    tensor([[1., 1.],
            [2., 2.]])
    """
    if padding_idx is None and accumulate_into is None and sparse is False:
        return _embedding.call(ids, weight, -1, out_of_range, preference=preference)  # type: ignore[no-any-return]
    require_flag("embedding", "sparse", sparse)
    check_table("embedding", ids, weight)
    form = "sparse" if sparse else ""
    buffers: tuple[Tensor, ...] = ()
    if accumulate_into is not None:
        _require_buffer(accumulate_into, weight.device, tuple(weight.shape))
        if sparse:
            raise ArgumentError("embedding: accumulate_into adds to a dense buffer; leave sparse out, or the buffer")
        if accumulate_into.requires_grad:
            raise ArgumentError("embedding: accumulate_into must not require a gradient itself; detach it")
        form, buffers = "into", (accumulate_into,)
    if sparse and torch.compiler.is_compiling():
        _refuse_size()
    padding = padding_row("embedding", padding_idx, weight.shape[0])
    return _embedding.call(  # type: ignore[no-any-return]
        ids, weight, padding, out_of_range, preference=preference, form=form, buffers=buffers
    )
