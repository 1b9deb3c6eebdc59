"""What the router's kernels are compiled to: nothing that lets a layout of threads decide about bits."""

import re
from collections import Counter

import pytest
import torch

from adjoint import moe
from adjoint.core.kernels import Variant, interpreting
from tests.ops.moe.compiled import compiled, sums_in_the_order_of_a_layout, variants_of
from tests.ops.moe.routing import HALF, SINGLE

pytestmark = pytest.mark.skipif(interpreting(), reason="the ordinary process compiles")

KERNELS = ("moe_route_forward", "moe_route_grouped", "moe_route_backward", "moe_route_backward_dense")


def _variants() -> dict[str, Variant]:
    """Every kernel once, in a mode that sums."""
    half, single = (torch.empty(64, 64, dtype=dtype, device="meta") for dtype in (HALF, SINGLE))
    bias = torch.empty(64, device="meta")
    return (
        variants_of(moe.route, half, 10, renormalize=False, bias=bias, num_groups=4, groups_kept=2)
        | variants_of(moe.route, single, 10, renormalize=False)
        | variants_of(moe.route, half, 40, score="sigmoid")
        | variants_of(moe.route, half, 10, renormalize=False, bias=bias)
    )


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_reduction_adds_floats_in_the_order_of_a_layout(kernel: str) -> None:
    """Sums are written out, lane by lane or half by half."""
    assert not sums_in_the_order_of_a_layout(_variants()[kernel])


def test_a_round_of_the_selection_is_one_reduction_of_the_warp() -> None:
    """16-bit logits: k maxima of 32-bit keys, five exchanges of the one sum, and no memory shared by warps."""
    variants = variants_of(moe.route, torch.empty(64, 128, dtype=HALF, device="meta"), 8)
    used = Counter(
        re.findall(r"\b(redux|shfl|bar|ex2|ld\.shared|st\.shared)\b", compiled(variants["moe_route_forward"], "ptx"))
    )
    assert used == {"redux": 8, "shfl": 5, "ex2": 1}


@pytest.mark.parametrize(("experts", "warps"), [(8, 1), (504, 1), (512, 2), (760, 2), (768, 4), (1000, 4), (1024, 4)])
def test_the_more_experts_the_more_warps_share_a_row_in_groups(experts: int, warps: int) -> None:
    """Powers of two alone: Triton compiles no other number."""
    logits = torch.empty(64, experts, dtype=HALF, device="meta")
    assert variants_of(moe.route, logits, 2, num_groups=8, groups_kept=4)["moe_route_grouped"].num_warps == warps
