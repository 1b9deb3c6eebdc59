"""Launches the kernels that compute a layout, into memory that is there.

    sizes = regions(count, num_experts)          # what the workspace must hold
    write(launch, memory, indices, layout, num_experts, fault)

`launch(key, grid, *arguments)` starts a kernel by the key of its variant, from `variants(...)`. Nothing is
allocated and nobody waits for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.errors import Fault, status_word
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.device import grouping
from adjoint.device.grouping import Launch
from adjoint.ops.moe.layout import Layout

SPAN = 512
"""Entries a program counts and sorts."""


_WARPS = {"moe_count_experts": 4, "moe_place_entries": 8}
"""Of each kernel of the layout."""


def span() -> int:
    """Entries of a program; few in the interpreter, so that small problems have several."""
    return 64 if kernels.interpreting() else SPAN


def bins(num_experts: int) -> int:
    """Bins of the counting sort: the experts, rounded up to a power of two."""
    return max(2, 1 << (num_experts - 1).bit_length())


def spans(count: int) -> int:
    """Programs that count; at least one, because someone must write the offsets."""
    return max(1, -(-count // span()))


def regions(count: int, num_experts: int) -> dict[str, tuple[torch.dtype, int]]:
    """The memory a layout's computation needs besides the layout."""
    width = bins(num_experts)
    return {
        "expert_counts": (torch.int32, spans(count) * width),
        "expert_begins": (torch.int32, spans(count) * width),
        "expert_totals": (torch.int32, width),
    }


def variants(indices: torch.dtype, num_experts: int, raises: bool = True, ordered: bool = False) -> dict[str, Variant]:
    """What is compiled to lay out entries of a number of experts, by the key it is launched with.

    With `raises`, an expert out of range is recorded in the status word; a backward has no need to. With `ordered`,
    the order to fill the rows in is written too.
    """
    from adjoint.ops.moe import layout_kernels as _  # noqa: F401  (registers them)

    constants = {"RAISE": raises, "ORDER": ordered, "BINS": bins(num_experts), "SPAN": span()}
    pointers = {"indices": f"*{TRITON_TYPES[indices]}", "status_word": "*i64", "order": "*i64"}
    numbers = ("fault", "count", "experts", "chunk")
    listed = {"group_sum_counts": grouping.variants(indices)["group_sum_counts"]}
    for key, warps in _WARPS.items():
        kernel = kernels.registered()[key]
        listed[key] = kernel.variant(
            {
                name: pointers.get(name, "i32" if name in numbers else "*i32")
                for name in kernel.parameters
                if not name.isupper()
            },
            {name: constants[name] for name in kernel.parameters if name.isupper()},
            num_warps=warps,
            num_stages=1,
        )
    return listed


def write(
    launch: Launch,
    memory: Mapping[str, Any],
    indices: Tensor,
    layout: Layout,
    num_experts: int,
    fault: Fault,
    chunk: int = 1,
) -> None:
    """Fills a layout from contiguous indices; `memory` holds what `regions` names.

    The tensors of the layout may be addresses, as `Regions.pointers` gives them. Variants that are `ordered` fill
    memory["order"] too, for chunks of so many spans.
    """
    count, number = indices.numel(), spans(indices.numel())
    counts, begins, totals = (memory[f"expert_{name}"] for name in ("counts", "begins", "totals"))
    word = status_word(indices.device)
    launch("moe_count_experts", (number,), indices, counts, word, fault.row, count, num_experts)
    grouping.sum_counts(launch, counts, begins, totals, bins(num_experts), number)
    order = memory.get("order", counts)  # what stands for it is not read
    launch(
        "moe_place_entries", (number,), indices, counts, begins, totals, *layout, order, count, num_experts, chunk
    )  # fmt: skip
