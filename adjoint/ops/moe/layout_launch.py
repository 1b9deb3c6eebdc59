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
from adjoint.core.grouping import Launch
from adjoint.core.kernels import TRITON_TYPES, Variant
from adjoint.ops.moe.layout import Layout
from adjoint.ops.moe.layout_kernels import KERNELS, SPAN


def bins(num_experts: int) -> int:
    """Bins of the counting sort: one more than experts, rounded up to a power of two."""
    return 1 << num_experts.bit_length()


def spans(count: int) -> int:
    """Programs that count; at least one, because someone must write the offsets."""
    return max(1, -(-count // SPAN))


def regions(count: int, num_experts: int) -> dict[str, tuple[torch.dtype, int]]:
    """The memory a layout's computation needs besides the layout."""
    width = bins(num_experts)
    return {"expert_counts": (torch.int32, spans(count) * width), "expert_totals": (torch.int32, width)}


def _summed(width: int) -> dict[str, int]:
    """Bins and spans whose counts one program sums at a time; the interpreter wants few programs."""
    if kernels.interpreting():
        return {"WIDTH": width, "CHUNK": 16}
    return {"WIDTH": min(4, width), "CHUNK": 512}


def variants(indices: torch.dtype, num_experts: int, raises: bool = True) -> dict[str, Variant]:
    """What is compiled to lay out entries of a number of experts, by the key it is launched with.

    With `raises`, an expert out of range is recorded in the status word; a backward has no need to.
    """
    width = bins(num_experts)
    constants = {"RAISE": raises, "BINS": width} | _summed(width)
    pointers = {"indices": f"*{TRITON_TYPES[indices]}", "status_word": "*i64"}
    numbers = ("fault", "count", "experts", "spans")
    listed = {}
    for kernel in KERNELS:
        listed[kernel.name] = kernel.variant(
            {
                name: pointers.get(name, "i32" if name in numbers else "*i32")
                for name in kernel.parameters
                if not name.isupper()
            },
            {name: constants[name] for name in kernel.parameters if name.isupper()},
            num_warps=4,
            num_stages=1,
        )
    return listed


def write(
    launch: Launch, memory: Mapping[str, Any], indices: Tensor, layout: Layout, num_experts: int, fault: Fault
) -> None:
    """Fills a layout from contiguous indices; `memory` holds what `regions` names.

    The tensors of the layout may be addresses, as `Regions.pointers` gives them.
    """
    count, number = indices.numel(), spans(indices.numel())
    counts, totals = memory["expert_counts"], memory["expert_totals"]
    launch("moe_count_experts", (number,), indices, counts, status_word(indices.device), fault.row, count, num_experts)
    width = bins(num_experts)
    launch("moe_sum_counts", (-(-width // _summed(width)["WIDTH"]),), counts, totals, number)
    launch("moe_place_entries", (number,), indices, counts, totals, *layout, count, num_experts)
