"""What dispatch and combine share: tokens [..., columns], and the rows of their entries in the order of a layout.

Entry token·slots + slot has the row inverse[entry]. Rows past the last offset belong to no expert: they are written as
zeros and count for nothing.
"""

import torch
from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError
from adjoint.core.layout import copied_layout, leading_axes
from adjoint.core.op import Facts


def check_rows(op: str, rows_name: str, rows: Tensor, inverse: Tensor, offsets: Tensor) -> None:
    """Requires a floating matrix with one row for each entry of inverse, and the tensors of a layout."""
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
    """Requires the tensors of a layout, on the device of another tensor."""
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


def facts(
    dtypes: tuple[torch.dtype, ...],
    entries: Tensor,
    experts: int,
    columns: int,
    tokens: dict[str, Tensor],
    others: dict[str, Tensor | None],
) -> Facts:
    """The facts of a problem. Its sizes are tokens, slots, experts and columns.

    Args:
        entries: a tensor of shape [..., slots]; only the shape is read.
        tokens: tensors [..., columns] that kernels read along at most two axes of tokens, with any stride of columns.
        others: tensors that must be contiguous.
    """
    copied = {name: x for name, x in tokens.items() if x.numel() and leading_axes(x) is None}
    sizes = entries.shape[:-1].numel(), entries.shape[-1], experts, columns
    return Facts(dtypes, copied_layout({}, copied | others), sizes)
