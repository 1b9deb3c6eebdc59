"""The expert layer's products compile to the instructions they are written for."""

import re

import pytest
import torch

import adjoint
from adjoint.core import kernels
from adjoint.core.kernels import TARGETS, Variant
from adjoint.core.launch import setups
from adjoint.ops.moe.experts.cases import built_calls

pytestmark = pytest.mark.skipif(
    kernels.interpreting() or bool(kernels.triton_missing()), reason="the ordinary process compiles"
)

PRODUCTS = [
    ("moe_experts_up", {}),
    ("moe_experts_product", {"BY_COLUMN": True}),
    ("moe_experts_down_adjoint", {}),
    ("moe_experts_product", {"BY_COLUMN": False}),
    ("moe_experts_outer", {"LEFT_BY_TOKEN": False}),
    ("moe_experts_outer", {"LEFT_BY_TOKEN": True}),
]


def _tuned(kernel: str, constants: dict[str, bool]) -> Variant:
    """The variant for aligned bfloat16 tensors under the schedule of the GPU that kernels are tuned on."""
    call = next(call for call in built_calls() if call.arguments[0].dtype == torch.bfloat16)
    _, forward, _, backward = setups(call, "sm_90", "triton.grouped")
    launches = [launch for setup in (forward, backward) for launch in setup.launches]
    (variant,) = {
        launch.variant
        for launch in launches
        if launch.kernel.name == kernel and launch.aligned and constants.items() <= launch.settings.items()
    }
    return variant


@pytest.mark.parametrize(("kernel", "constants"), PRODUCTS, ids=str)
def test_products_copy_16_bytes_at_a_time_and_multiply_in_groups_of_warps(
    kernel: str, constants: dict[str, bool]
) -> None:
    """Both operands go from memory to shared memory past the registers, rows read by token included."""
    from triton.backends.compiler import GPUTarget

    variant = _tuned(kernel, constants)
    ptx = variant.compile(GPUTarget(*TARGETS["sm_90"])).asm["ptx"]
    widths = set(re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^\]]*\], \[[^\]]*\], (\w+)", ptx))
    assert widths == {"0x10"}
    columns = dict(variant.constants)["COLUMNS"] * (2 if kernel == "moe_experts_up" else 1)
    multiplied = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)
    assert multiplied and set(multiplied) == {str(min(columns, 256))}
    assert "mma.sync" not in ptx


@pytest.mark.parametrize("direction", [0, 1], ids=["forward", "backward"])
def test_kernels_for_hopper_copy_by_tma_and_multiply_256_columns_at_once(direction: int) -> None:
    """Each of two warpgroups, while a third one copies; nothing is spilled."""
    from triton.backends.compiler import GPUTarget

    call = next(call for call in built_calls() if call.arguments[0].dtype == torch.bfloat16)
    setup = list(setups(call, "sm_90", "gluon.grouped"))[2 * direction]
    products = [launch.variant for launch in setup.launches if launch.kernel.name.endswith("_hopper")]
    assert len(products) == (4 if direction else 2)
    for variant in products:
        ptx = variant.compile(GPUTarget(*TARGETS["sm_90"])).asm["ptx"]
        multiplied = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)
        assert len(multiplied) == 8 and set(multiplied) == {"256"}, variant.kernel
        assert "cp.async.bulk.tensor.2d" in ptx and "setmaxnreg" in ptx, variant.kernel
        built = kernels.build(variant, "sm_90")
        assert built.spilled_bytes == 0 and built.shared_bytes <= 232_448, (variant.kernel, built)


@pytest.mark.parametrize(("hidden", "plan"), [(64, "triton.grouped"), (128, "gluon.grouped")])
def test_narrow_layers_have_a_plan_that_every_triton_compiles(hidden: int, plan: str) -> None:
    x, gate_up, down = (
        torch.empty(shape, dtype=torch.bfloat16) for shape in ((3, hidden), (2, 128, hidden), (2, hidden, 64))
    )
    routing = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.bfloat16)
    assert adjoint.plan(adjoint.moe.experts, x, gate_up, down, *routing, target="sm_90").name == plan
