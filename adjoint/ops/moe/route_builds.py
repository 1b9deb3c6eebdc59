"""The kernel variants of the router and its losses, as they are compiled for a GPU.

The rows of the benchmark, every element type and mode on one of them, and the largest problems.
"""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import Variant
from adjoint.ops.moe.route_plans import MAX_EXPERTS, MAX_K, SCHEDULES

_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    from adjoint.ops.moe import losses_launch
    from adjoint.ops.moe.route_launch import Access, Kinds, variant

    rows, split, aligned = Access(False), Access(True), Access(False, True)
    softmax, sigmoid = ("softmax", True), ("sigmoid", True)
    described: list[tuple[str, Kinds, Access]] = [
        *(("moe_route_forward", Kinds(_BF16, e, k, *softmax), rows) for e, k in ((512, 10), (256, 8), (128, 8))),
        *(("moe_route_forward", Kinds(dtype, 128, 8, *softmax), rows) for dtype in (_F16, _F32)),
        ("moe_route_forward", Kinds(_BF16, 100, 8, "softmax", False), split),
        ("moe_route_forward", Kinds(_BF16, 128, 8, *softmax, True), rows),
        ("moe_route_forward", Kinds(_BF16, 256, 8, *sigmoid, True), rows),
        ("moe_route_forward", Kinds(_BF16, MAX_EXPERTS, MAX_K, *softmax), rows),
        ("moe_route_grouped", Kinds(_BF16, 256, 8, *sigmoid, True, 8, 4), rows),
        ("moe_route_grouped", Kinds(_F32, MAX_EXPERTS, MAX_K, "softmax", False, False, 8, 4), rows),
        *(("moe_route_backward", Kinds(_BF16, e, k, *softmax), aligned) for e, k in ((512, 10), (128, 8))),
        ("moe_route_backward", Kinds(_F32, MAX_EXPERTS, MAX_K, *sigmoid), split),
        ("moe_route_backward_dense", Kinds(_BF16, 512, 10, "softmax", False), rows),
        ("moe_route_backward_dense", Kinds(_F32, MAX_EXPERTS, MAX_K, "softmax", False), split),
    ]
    for kernel, kinds, access in described:
        schedule = {} if kernel == "moe_route_grouped" else SCHEDULES.lookup(kernel)
        yield f"{kernel} {kinds} {access}", variant(kernel, kinds, schedule, access)

    for kernel in ("moe_balance_runs", "moe_balance_backward", "moe_z_runs", "moe_z_backward"):
        warps = SCHEDULES.lookup(kernel)["warps"]
        for experts, k, dtype, masked in ((128, 8, _BF16, False), (512, 10, _F32, True)):
            yield (
                f"{kernel} {experts} {dtype}",
                losses_launch.variant(kernel, warps, experts, k, dtype, masked=masked, split=masked),
            )
    yield "moe_balance_finish", losses_launch.variant("moe_balance_finish", 1, 512)
    yield "moe_z_finish", losses_launch.variant("moe_z_finish", 1)
    yield "moe_add_runs", losses_launch.variant("moe_add_runs", 4)
