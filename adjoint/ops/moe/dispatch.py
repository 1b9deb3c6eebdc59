"""Dispatch.   rows[inverse[t, j], :] = x[t, :]

with the rows in order of (indices[t, j], t, j): grouped by expert, then by token, then by slot. Every entry has
a row, however many an expert gets: nothing is dropped and nothing padded.

Adjoint, given drows:   dx[t, :] = Σ over j, in order, of drows[inverse[t, j], :]

Saves the layout alone. An index out of range belongs to no expert: its row stands after all others, past the
last offset, is zero, and has no gradient.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError, second_derivative
from adjoint.core.layout import leading_axes
from adjoint.core.op import define
from adjoint.core.plan import Call, publish
from adjoint.core.preference import Preference, resolve
from adjoint.core.problem import Problem
from adjoint.ops.moe import dispatch_plans as plans
from adjoint.ops.moe.layout import Layout, allocate

OP = "moe.dispatch"

# -------------------------------------------------------------------------------------------- checks


def _check(x: Tensor, indices: Tensor, num_experts: int) -> None:
    require_floating(OP, "x", x)
    require_ids(OP, "indices", indices, "x", x)
    if x.dim() == 0 or indices.dim() != x.dim() or indices.shape[:-1] != x.shape[:-1]:
        raise ArgumentError(
            f"{OP}: x and indices must have the same axes but the last, x [..., columns] and indices [..., slots], "
            f"got shapes {tuple(x.shape)} and {tuple(indices.shape)}"
        )
    if isinstance(num_experts, bool) or not isinstance(num_experts, int | torch.SymInt) or num_experts < 1:
        raise ArgumentError(f"{OP}: num_experts must be an integer of at least 1, got {num_experts!r}")


def check_places(op: str, rows_name: str, rows: Tensor, inverse: Tensor, offsets: Tensor) -> None:
    """rows are a floating matrix with one row for each entry of inverse, and a layout's tensors are what they were."""
    require_floating(op, rows_name, rows)
    if rows.dim() != 2:
        raise ArgumentError(f"{op}: {rows_name} must have two axes, rows and columns, got shape {tuple(rows.shape)}")
    check_layout(op, rows_name, rows, inverse, offsets)
    if inverse.numel() != rows.shape[0]:
        raise ArgumentError(
            f"{op}: {rows_name} must have one row for each of the {inverse.numel()} entries of layout.inverse, "
            f"{tuple(inverse.shape)}, got {rows.shape[0]} rows"
        )


def check_layout(op: str, like_name: str, like: Tensor, inverse: Tensor, offsets: Tensor) -> None:
    """The tensors of a layout, on the device of another."""
    for name, tensor in (("inverse", inverse), ("offsets", offsets)):
        require_ids(op, f"layout.{name}", tensor, like_name, like)
        if tensor.dtype != torch.int32:
            raise ArgumentError(
                f"{op}: layout.{name} must be int32, as moe.dispatch gives it, got {tensor.dtype}; "
                f"convert it with .int()"
            )
    if inverse.dim() == 0:
        raise ArgumentError(f"{op}: layout.inverse must have the axes of indices, slots the last, got none")
    if offsets.dim() != 1 or offsets.shape[0] == 0:
        raise ArgumentError(
            f"{op}: layout.offsets must have one axis, of one more than the experts, got shape {tuple(offsets.shape)}"
        )


def _check_backward(drows: Tensor, inverse: Tensor, offsets: Tensor) -> None:
    check_places(OP, "drows", drows, inverse, offsets)


# ----------------------------------------------------------------------------------------- operators


def copied(walked: dict[str, Tensor], flat: dict[str, Tensor | None]) -> str:
    """The arguments kernels must copy first: `walked` ones are [..., columns], the others must be contiguous."""
    names = [name for name, t in walked.items() if t.numel() and leading_axes(t) is None]
    names += [name for name, t in flat.items() if t is not None and not t.is_contiguous()]
    return ", ".join(names)


def _describe(x: Tensor, indices: Tensor, num_experts: int) -> Problem:
    tokens, slots = indices.shape[:-1].numel(), indices.shape[-1]
    return Problem(
        "moe_dispatch",
        x.device,
        (x.dtype, indices.dtype),
        copied({"x": x}, {"indices": indices}),
        (tokens, slots, num_experts, x.shape[-1]),
        (num_experts,),
    )


def _describe_backward(drows: Tensor, inverse: Tensor, offsets: Tensor) -> Problem:
    tokens, slots = inverse.shape[:-1].numel(), inverse.shape[-1]
    return Problem(
        "moe_dispatch_backward",
        drows.device,
        (drows.dtype,),
        copied({}, {"inverse": inverse, "offsets": offsets}),
        (tokens, slots, offsets.shape[0] - 1, drows.shape[1]),
    )


_dispatch = define(
    "moe_dispatch",
    "Tensor x, Tensor indices, SymInt num_experts",
    "(Tensor, Tensor, Tensor, Tensor)",
    outputs=("rows", "offsets", "permutation", "inverse"),
    tensors=("x", "indices"),
    check=_check,
    allocate=lambda x, indices, num_experts: (
        x.new_empty((indices.numel(), x.shape[-1])),
        *allocate(indices, num_experts),
    ),
    describe=_describe,
    candidates=lambda: plans.DISPATCH,
)
_dispatch_backward = define(
    "moe_dispatch_backward",
    "Tensor drows, Tensor inverse, Tensor offsets",
    "Tensor",
    outputs=("dx",),
    tensors=("drows", "inverse", "offsets"),
    check=_check_backward,
    allocate=lambda drows, inverse, offsets: (drows.new_empty((*inverse.shape[:-1], drows.shape[1])),),
    describe=_describe_backward,
    candidates=lambda: plans.DISPATCH_BACKWARD,
)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, x: Tensor, indices: Tensor, num_experts: int, preference: str
    ) -> tuple[Tensor, ...]:
        rows, offsets, permutation, inverse = _dispatch(x, indices, num_experts, preference)
        ctx.mark_non_differentiable(offsets, permutation, inverse)
        ctx.save_for_backward(inverse, offsets)
        ctx.preference = preference
        if not torch.compiler.is_compiling():
            ctx.set_materialize_grads(False)  # zeros for the layout's tensors would be memory nobody reads
        return rows, offsets, permutation, inverse

    @staticmethod
    def backward(ctx: Any, drows: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise second_derivative(OP)
        if drows is None:
            return None, None, None, None
        inverse, offsets = ctx.saved_tensors
        return _dispatch_backward(drows, inverse, offsets, ctx.preference), None, None, None


def dispatch(
    x: Float[Tensor, "*tokens columns"],
    indices: Int[Tensor, "*tokens slots"],
    num_experts: int,
    *,
    preference: Preference | None = None,
) -> tuple[Float[Tensor, "rows columns"], Layout]:
    """Each token's row once for every expert it goes to, grouped by expert; and the layout of the rows.

    The order is a pure function of `indices`: by expert, then token, then slot. Every entry has a row.

    Args:
        x: the tokens; float64, float32, bfloat16 or float16, kept by the rows.
        indices: the experts of each token; int32 or int64.
        num_experts: how many experts there are; empty ones are fine.
        preference: narrows the choice of plans for this call and its backward.

    Returns:
        The rows, byte-identical copies, and their `Layout`: `offsets`, `permutation` and `inverse`, int32.

    Raises:
        ArgumentError: shapes, dtypes or devices are wrong, or (on the CPU) an index is out of range. On a GPU
            `adjoint.check()` raises for it; its row is zero meanwhile, stands past the last offset, and
            counts for nothing in `combine`.
        Unsupported: no plan meets the preference.

    >>> import torch
    >>> rows, layout = dispatch(torch.tensor([[1.0], [2.0]]), torch.tensor([[2, 0], [0, 1]]), 4)
    >>> rows.T
    tensor([[1., 2., 2., 1.]])
    >>> layout.offsets, layout.permutation
    (tensor([0, 2, 3, 4, 4], dtype=torch.int32), tensor([1, 2, 3, 0], dtype=torch.int32))
    """
    _check(x, indices, num_experts)
    text = resolve(preference)
    if not (x.requires_grad and torch.is_grad_enabled()):
        rows, *layout = _dispatch(x, indices, num_experts, text)
    else:
        rows, *layout = _Dispatch.apply(x, indices, num_experts, text)
    return rows, Layout(*layout)


def _bind(x: Tensor, indices: Tensor, num_experts: int) -> Call:
    _check(x, indices, num_experts)
    return Call(
        _dispatch,
        (x, indices, num_experts),
        _dispatch_backward,
        lambda upstream, outputs: (upstream[0], outputs[3], outputs[1]),
        public_outputs=1,  # besides the layout, which is whole numbers and has no gradient
    )


publish(dispatch, _bind)
