"""The arguments that both embeddings take: ids, a table, and the row of padding; and errors of their values."""

from torch import Tensor

from adjoint.core.arguments import require_floating, require_ids
from adjoint.core.errors import ArgumentError, register_fault

ID_OUT_OF_RANGE = register_fault(
    "embedding: ids must be at least 0 and less than the number of rows of weight, "
    'got {value} at position {position} (counted in order); out_of_range="zero" makes such rows zero instead'
)
BAG_ID_OUT_OF_RANGE = register_fault(
    "embedding_bag: ids must be at least 0 and less than the number of rows of weight, "
    "got {value} at position {position} (counted in order)"
)
OFFSETS_OUT_OF_ORDER = register_fault(
    "embedding_bag: offsets must begin with 0, never descend, and not exceed the number of ids, "
    "got {value} at position {position} of the offsets"
)


def check_table(op: str, ids: Tensor, weight: Tensor) -> None:
    """Requires integer ids and a floating matrix as weight, both on one device."""
    require_floating(op, "weight", weight)
    if weight.dim() != 2:
        raise ArgumentError(f"{op}: weight must have two axes, rows and columns, got shape {tuple(weight.shape)}")
    require_ids(op, "ids", ids, "weight", weight)


def padding_row(op: str, padding_idx: int | None, rows: int) -> int:
    """padding_idx, counted from the beginning; −1 if there is none."""
    if padding_idx is None:
        return -1
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, int):
        raise ArgumentError(f"{op}: padding_idx must be an integer or None, got {padding_idx!r}")
    if not -rows <= padding_idx < rows:
        raise ArgumentError(
            f"{op}: padding_idx must be within the {rows} rows of weight, from {-rows} to {rows - 1}, got {padding_idx}"
        )
    return padding_idx % rows


def is_counted(ids: Tensor, rows: int, padding: int) -> Tensor:
    """Which ids name a row that is not the padding."""
    return (ids >= 0) & (ids < rows) & (ids != padding)
