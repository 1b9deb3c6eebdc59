"""The order of the rows of a dispatch: grouped by expert, then by token, then by slot.

The T·k entries of `indices` [T, k], numbered token·k + slot, are ordered by a stable sort of their experts.
An entry whose expert is out of range belongs to none and comes last, past `offsets[num_experts]`. Nothing else
decides about the order, so the layout is a pure function of `indices`.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from adjoint.core.schedules import Schedules

SCHEDULES = Schedules(Path(__file__).with_name("schedules.json"))
"""The schedules of the kernels that compute a layout."""

MAX_ENTRIES = 2**28
"""The most entries that a layout can number on a GPU."""

MAX_EXPERTS = 2048
"""The most experts that one counting sort can handle on a GPU."""


REPORTED = "reported with position and value: at once on the CPU, by adjoint.check() on a GPU"
"""The words of guarantees for an index out of range."""


class Layout(NamedTuple):
    """The places of the rows of a dispatch. All three tensors are int32 and contiguous, and have no gradient.

    Attributes:
        offsets: the rows of expert e are those from `offsets[e]` to `offsets[e + 1]`. Rows past the last offset belong
            to entries whose expert is out of range.
        permutation: the entry, token·k + slot, of each row.
        inverse: the row of each entry, in the shape of `indices`.
    """

    offsets: Int[Tensor, " experts_and_one"]
    permutation: Int[Tensor, " rows"]
    inverse: Int[Tensor, "*tokens slots"]


def allocate(indices: Tensor, num_experts: int) -> Layout:
    """Empty memory for a layout."""
    return Layout(
        indices.new_empty((num_experts + 1,), dtype=torch.int32),
        indices.new_empty((indices.numel(),), dtype=torch.int32),
        indices.new_empty(indices.shape, dtype=torch.int32),
    )
