"""What the kernels of the router's losses are compiled to: nothing that lets a layout of threads decide about bits."""

import pytest
import torch

from adjoint import moe
from adjoint.core.kernels import interpreting
from tests.ops.moe.compiled import sums_in_the_order_of_a_layout, variants_of
from tests.ops.moe.routing import HALF

pytestmark = pytest.mark.skipif(interpreting(), reason="the ordinary process compiles")


def test_no_reduction_adds_floats_in_the_order_of_a_layout() -> None:
    logits = torch.empty(64, 64, dtype=HALF, device="meta")
    indices, mask = (
        torch.empty(64, 4, dtype=torch.int64, device="meta"),
        torch.empty(64, dtype=torch.bool, device="meta"),
    )
    variants = variants_of(moe.load_balancing_loss, logits, indices, mask) | variants_of(moe.z_loss, logits, mask)
    assert set(variants) == {
        "moe_balance_runs", "moe_balance_backward", "moe_balance_finish", "moe_z_runs", "moe_z_backward",
        "moe_z_finish", "moe_add_runs",
    }  # fmt: skip
    assert not [name for name, variant in variants.items() if sums_in_the_order_of_a_layout(variant)]
