"""The expert layer's products compile to the instructions they are written for."""

import re

import pytest
import torch

from adjoint.core import kernels
from adjoint.core.kernels import TARGETS
from adjoint.ops.moe.experts_plans import SCHEDULES

pytestmark = pytest.mark.skipif(
    kernels.interpreting() or bool(kernels.triton_missing()), reason="the ordinary process compiles"
)

PRODUCTS = [
    ("moe_experts", "up"),
    ("moe_experts", "down"),
    ("moe_experts_backward", "hidden"),
    ("moe_experts_backward", "dx"),
    ("moe_experts_backward", "dgate_up"),
    ("moe_experts_backward", "ddown"),
]


@pytest.mark.parametrize(("op", "key"), PRODUCTS)
def test_products_copy_16_bytes_at_a_time_and_multiply_in_groups_of_warps(op: str, key: str) -> None:
    """Both operands go from memory to shared memory past the registers, rows read by token included."""
    from triton.backends.compiler import GPUTarget

    from adjoint.ops.moe.experts_variants import SHARED_BYTES, Kinds, variants

    kinds = Kinds(torch.bfloat16, torch.bfloat16, 2048, 128, 768, 8, SHARED_BYTES["sm_90"])
    variant = variants(op, kinds, SCHEDULES.named(op, "NVIDIA H200"), 15)[key, True]
    ptx = variant.compile(GPUTarget(*TARGETS["sm_90"])).asm["ptx"]
    constants = dict(variant.constants)
    widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
    assert widths == {"0x10"}
    columns = constants["COLUMNS"] * (2 if key == "up" else 1)
    multiplied = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)
    assert multiplied and set(multiplied) == {str(min(columns, 256))}
    assert "mma.sync" not in ptx
