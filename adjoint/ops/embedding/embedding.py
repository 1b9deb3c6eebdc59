"""Embedding.   out[n, :] = weight[ids[n], :]

Adjoint, given dout:   dweight[r, :] = Σ dout[n, :] over the n with ids[n] = r

Saves the ids alone. The sum runs in float32 (float64 for float64), in an order fixed by the row's own
tokens, and is rounded once; rows never referenced are 0. Grouping by row is a stable sort of ours, in the
plan's workspace, so that the dense gradient is written once, by one writer per row, without atomics.
"""

from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError, Unsupported, second_derivative
from adjoint.core.layout import leading_axes, overlaps_itself
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.embedding import plans

OutOfRange = Literal["raise", "zero"]


# -------------------------------------------------------------------------------------------- checks


def check_table(op: str, ids: Tensor, weight: Tensor) -> None:
    """ids are integers, weight a floating matrix, both on one device."""
    require_floating(op, "weight", weight)
    if weight.dim() != 2:
        raise ArgumentError(f"{op}: weight must have two axes, rows and columns, got shape {tuple(weight.shape)}")
    require_ids(op, "ids", ids, "weight", weight)


def _check(ids: Tensor, weight: Tensor, out_of_range: str) -> None:
    check_table("embedding", ids, weight)
    if out_of_range not in plans.OUT_OF_RANGE:
        known = ", ".join(map(repr, plans.OUT_OF_RANGE))
        raise ArgumentError(f"embedding: out_of_range must be one of {known}, got {out_of_range!r}")


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
    require_buffer(accumulate_into, dout.device, (*accumulate_into.shape[:1], dout.shape[-1]))


def require_buffer(buffer: Tensor, device: torch.device, shape: tuple[int, ...]) -> None:
    """A buffer that a gradient of a given shape can be added to."""
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


def normalized_padding(op: str, padding_idx: int | None, rows: int) -> int:
    """padding_idx counted from the beginning; −1 for none."""
    if padding_idx is None:
        return -1
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise ArgumentError(f"{op}: padding_idx must be an integer or None, got {padding_idx!r}")
    if not -rows <= padding_idx < rows:
        raise ArgumentError(
            f"{op}: padding_idx must be within the {rows} rows of weight, from {-rows} to {rows - 1}, got {padding_idx}"
        )
    return padding_idx % rows


# ----------------------------------------------------------------------------------------- operators


def layout_of(gradient: Tensor, ids: Tensor) -> str:
    """What kernels must copy before they can walk it; empty when nothing must be."""
    copied = [] if gradient.numel() == 0 or leading_axes(gradient) is not None else ["gradient"]
    copied += [] if ids.is_contiguous() else ["ids"]
    return f"{' and '.join(copied)} copied" if copied else ""


def _describe(ids: Tensor, weight: Tensor, out_of_range: str) -> Problem:
    columns = weight.shape[1]
    copied = not ids.is_contiguous()
    sizes = (ids.numel(), columns) if copied else (columns,)
    layout = "ids copied" if copied else ""
    if max(ids.numel(), weight.shape[0]) > plans.MAX_NUMBER:
        layout = "past 31 bits"
    return Problem("embedding", weight.device, (weight.dtype, ids.dtype), layout, sizes, (out_of_range,))


def _describe_gradient(op: str, dout: Tensor, ids: Tensor, rows: int, options: tuple[Any, ...]) -> Problem:
    sizes = (ids.numel(), rows, dout.shape[-1])
    return Problem(op, ids.device, (dout.dtype, ids.dtype), layout_of(dout, ids), sizes, options)


def _describe_into(dout: Tensor, ids: Tensor, accumulate_into: Tensor, padding: int) -> Problem:
    problem = _describe_gradient("embedding_backward_into", dout, ids, accumulate_into.shape[0], (padding,))
    return problem._replace(dtypes=(*problem.dtypes, accumulate_into.dtype))


def _allocate_sparse(dout: Tensor, ids: Tensor, rows: int, padding: int) -> tuple[Tensor, ...]:
    raise Unsupported(
        "embedding: the size of a row-sparse gradient is data, so it is not available under torch.compile, in a "
        "CUDA graph or with out=; leave sparse out there"
    )


_embedding = define(
    "embedding",
    "Tensor ids, Tensor weight, str out_of_range",
    "Tensor",
    outputs=("out",),
    tensors=("ids", "weight"),
    check=_check,
    allocate=lambda ids, weight, out_of_range: (weight.new_empty((*ids.shape, weight.shape[1])),),
    describe=_describe,
    candidates=lambda: plans.EMBEDDING,
)
_embedding_backward = define(
    "embedding_backward",
    "Tensor dout, Tensor ids, SymInt rows, int padding_idx",
    "Tensor",
    outputs=("dweight",),
    tensors=("dout", "ids"),
    check=_check_backward,
    allocate=lambda dout, ids, rows, padding: (dout.new_empty((rows, dout.shape[-1])),),
    describe=lambda dout, ids, rows, padding: _describe_gradient(
        "embedding_backward", dout, ids, rows, (rows, padding)
    ),
    candidates=lambda: plans.EMBEDDING_BACKWARD,
)
_embedding_backward_into = define(
    "embedding_backward_into",
    "Tensor dout, Tensor ids, Tensor(a!) accumulate_into, int padding_idx",
    "()",
    outputs=("dweight",),
    tensors=("dout", "ids", "accumulate_into"),
    check=_check_into,
    allocate=lambda dout, ids, accumulate_into, padding: (),
    describe=_describe_into,
    candidates=lambda: plans.EMBEDDING_BACKWARD_INTO,
)
_embedding_backward_sparse = define(
    "embedding_backward_sparse",
    "Tensor dout, Tensor ids, int rows, int padding_idx",
    "(Tensor, Tensor)",
    outputs=("rows", "dweight"),
    tensors=("dout", "ids"),
    check=_check_backward,
    allocate=_allocate_sparse,
    describe=lambda dout, ids, rows, padding: _describe_gradient(
        "embedding_backward_sparse", dout, ids, rows, (rows, padding)
    ),
    candidates=lambda: plans.EMBEDDING_BACKWARD_SPARSE,
)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        accumulate_into: Tensor | None,
        padding: int,
        out_of_range: str,
        sparse: bool,
        preference: str,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.padding, ctx.sparse, ctx.preference = weight.shape[0], padding, sparse, preference
        # Not saved: it is written to, by this backward and by those of other calls.
        ctx.accumulate_into = accumulate_into
        return _embedding(ids, weight, out_of_range, preference)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative("embedding")
        (ids,) = ctx.saved_tensors
        dweight = None
        if ctx.accumulate_into is not None:
            _embedding_backward_into(dout, ids, ctx.accumulate_into, ctx.padding, ctx.preference)
        elif ctx.sparse:
            rows, values = _embedding_backward_sparse(dout, ids, ctx.rows, ctx.padding, ctx.preference)
            shape = (ctx.rows, dout.shape[-1])
            dweight = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False, is_coalesced=True)
        else:
            dweight = _embedding_backward(dout, ids, ctx.rows, ctx.padding, ctx.preference)
        return None, dweight, None, None, None, None, None


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
        padding_idx: a row that is looked up as any other, and gets no gradient. Negative counts from
            the end.
        out_of_range: "raise" reports the first id below 0 or past the last row, by position and value:
            at once on the CPU; on a GPU through `adjoint.check()`, with zero rows meanwhile. "zero"
            gives zero rows and no gradient, silently.
        accumulate_into: the backward adds the gradient to this buffer, of any floating dtype and the
            shape of `weight`, instead of returning one: `weight.grad` stays as it is, and hooks of
            autograd, those of distributed wrappers included, do not see it. Under `torch.compile`
            nothing else in the graph may read it: that it changes before another op's backward has
            read it is an error outside of a graph, and goes unnoticed inside.
        sparse: the gradient is a row-sparse tensor, coalesced, rows ascending. Its size is data, so the
            backward waits for the device once.
        preference: narrows the choice of plans for this call and its backward.

    Raises:
        ArgumentError: ids are not integers, weight is not a floating matrix, devices differ, an option
            is out of range, or (on the CPU) an id is.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    >>> out = embedding(torch.tensor([1, 1, 0]), weight)
    >>> out.sum().backward()
    >>> weight.grad
    tensor([[1., 1.],
            [2., 2.]])
    """
    padding = _validate(ids, weight, padding_idx, out_of_range, accumulate_into, sparse)
    text = resolve(preference)
    if not (weight.requires_grad and torch.is_grad_enabled()):
        return _embedding(ids, weight, out_of_range, text)
    return _Embedding.apply(ids, weight, accumulate_into, padding, out_of_range, sparse, text)  # type: ignore[no-any-return]


def _validate(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None,
    out_of_range: str,
    accumulate_into: Tensor | None,
    sparse: bool,
) -> int:
    """Raises for wrong arguments; the padding row, counted from the beginning, −1 for none."""
    _check(ids, weight, out_of_range)
    if accumulate_into is not None:
        require_buffer(accumulate_into, weight.device, tuple(weight.shape))
        if sparse:
            raise ArgumentError("embedding: accumulate_into adds to a dense buffer; leave sparse out, or the buffer")
        if accumulate_into.requires_grad:
            raise ArgumentError("embedding: accumulate_into must not require a gradient itself; detach it")
    if sparse and torch.compiler.is_compiling():
        _allocate_sparse(weight, ids, 0, -1)
    return normalized_padding("embedding", padding_idx, weight.shape[0])


def _bind(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    out_of_range: OutOfRange = "raise",
    accumulate_into: Tensor | None = None,
    sparse: bool = False,
) -> Call:
    padding = _validate(ids, weight, padding_idx, out_of_range, accumulate_into, sparse)
    arguments = (ids, weight, out_of_range)
    if accumulate_into is not None:
        return Call(
            _embedding,
            arguments,
            _embedding_backward_into,
            lambda upstream, outputs: (upstream[0], ids, accumulate_into, padding),
        )
    adjoint = _embedding_backward_sparse if sparse else _embedding_backward
    return Call(_embedding, arguments, adjoint, lambda upstream, outputs: (upstream[0], ids, weight.shape[0], padding))


publish(embedding, _bind)
