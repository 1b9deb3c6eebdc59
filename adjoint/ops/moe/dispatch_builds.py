"""The kernel variants of layout, dispatch and combine, as they are compiled for a GPU.

Every kernel in every element type, and in every access for one of them.
"""

from collections.abc import Iterator

import torch

from adjoint.core.arguments import FLOATING
from adjoint.core.kernels import Variant
from adjoint.ops.moe.dispatch_plans import SCHEDULES
from adjoint.ops.moe.layout import MAX_EXPERTS

_COLUMNS = 4096


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named; indices in both types where a kernel reads them."""
    from adjoint.ops.moe import layout_launch
    from adjoint.ops.moe.dispatch_launch import ACCESSES, variant

    for indices, experts in ((torch.int64, 512), (torch.int32, 512), (torch.int64, 128), (torch.int64, MAX_EXPERTS)):
        for key, described in layout_launch.variants(indices, experts, ordered=True).items():
            if key.startswith("moe_"):  # what it shares with the core is built there
                yield f"{key} {indices} {experts} experts", described
    unordered = layout_launch.variants(torch.int64, 512, raises=False)
    yield "moe_count_experts silent", unordered["moe_count_experts"]
    yield "moe_place_entries unordered", unordered["moe_place_entries"]
    combine, backward = SCHEDULES.lookup("moe_combine"), SCHEDULES.lookup("moe_combine_backward")
    copies, sums = SCHEDULES.lookup("moe_dispatch"), SCHEDULES.lookup("moe_dispatch_backward")
    for dtype in FLOATING:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        for access in ACCESSES if dtype == torch.bfloat16 else ACCESSES[:1]:
            for weights in dict.fromkeys((wide, dtype)) if access == "aligned" else (wide,):
                for name, schedule, raises in (
                    ("moe_scatter", backward, False),
                    ("moe_sum", combine, True),
                    ("moe_dots", backward, False),
                ):
                    described = variant(name, dtype, weights, _COLUMNS, schedule, access, raises)
                    yield f"{name} {dtype} weighted {weights} {access}", described
            for name, schedule in (("moe_gather", copies), ("moe_scatter", backward), ("moe_sum", sums)):
                yield f"{name} {dtype} {access}", variant(name, dtype, None, _COLUMNS, schedule, access)
            yield f"moe_sum {dtype} {access} checked", variant("moe_sum", dtype, None, _COLUMNS, combine, access, True)
