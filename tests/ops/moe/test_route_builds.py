"""What the router's kernels are compiled to: nothing that lets a layout of threads decide about bits."""

import re
from collections import Counter

import pytest
import torch

from adjoint.core.kernels import TARGETS, Variant, interpreting
from adjoint.ops.moe.route_plans import SCHEDULES

pytestmark = pytest.mark.skipif(interpreting(), reason="the ordinary process compiles")
HALF, SINGLE = torch.bfloat16, torch.float32


def _compiled(variant: Variant, form: str) -> str:
    from triton.backends.compiler import GPUTarget

    return str(variant.compile(GPUTarget(*TARGETS["sm_90"])).asm[form])


def _variants() -> dict[str, Variant]:
    """Every kernel once, in a mode that sums."""
    from adjoint.ops.moe import losses_launch
    from adjoint.ops.moe.route_launch import Access, Kinds, variant

    shapes = {
        "moe_route_forward": Kinds(HALF, 64, 10, "softmax", False, True),
        "moe_route_grouped": Kinds(HALF, 64, 10, "softmax", False, True, 4, 2),
        "moe_route_backward": Kinds(HALF, 64, 40, "sigmoid", True),
        "moe_route_backward_dense": Kinds(SINGLE, 64, 10, "softmax", False),
    }
    found = {
        name: variant(name, kinds, {} if "grouped" in name else SCHEDULES.lookup(name), Access(True))
        for name, kinds in shapes.items()
    }
    for name in ("moe_balance_runs", "moe_balance_backward", "moe_z_runs", "moe_z_backward"):
        found[name] = losses_launch.variant(name, 4, 64, 4, HALF, masked=True)
    return found | {"moe_balance_finish": losses_launch.variant("moe_balance_finish", 1, 64)}


KERNELS = (
    "moe_route_forward", "moe_route_grouped", "moe_route_backward", "moe_route_backward_dense", "moe_balance_runs",
    "moe_balance_backward", "moe_z_runs", "moe_z_backward", "moe_balance_finish",
)  # fmt: skip


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_reduction_adds_floats_in_the_order_of_a_layout(kernel: str) -> None:
    """Maxima may be taken in any order; sums are written out, lane by lane or half by half."""
    text = _compiled(_variants()[kernel], "ttgir")
    reductions = re.findall(r'"tt\.reduce"\(.*?\}\)', text, re.DOTALL)
    assert not [body for body in reductions if "arith.addf" in body]


def test_a_round_of_the_selection_is_one_reduction_of_the_warp() -> None:
    """16-bit logits: k maxima of 32-bit keys, five exchanges of the one sum, and no memory shared by warps."""
    from adjoint.ops.moe.route_launch import Access, Kinds, variant

    kinds = Kinds(HALF, 128, 8, "softmax", True)
    ptx = _compiled(variant("moe_route_forward", kinds, SCHEDULES.lookup("moe_route_forward"), Access(False)), "ptx")
    used = Counter(re.findall(r"\b(redux|shfl|bar|ex2|ld\.shared|st\.shared)\b", ptx))
    assert used == {"redux": 8, "shfl": 5, "ex2": 1}
