"""The arguments that both embeddings take: ids, a table, and the row of padding."""

from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError


def check_table(op: str, ids: Tensor, weight: Tensor) -> None:
    """ids are integers, weight a floating matrix, both on one device."""
    require_floating(op, "weight", weight)
    if weight.dim() != 2:
        raise ArgumentError(f"{op}: weight must have two axes, rows and columns, got shape {tuple(weight.shape)}")
    require_ids(op, "ids", ids, "weight", weight)


def padding_row(op: str, padding_idx: int | None, rows: int) -> int:
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
