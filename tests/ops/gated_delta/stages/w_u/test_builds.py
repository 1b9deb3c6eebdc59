"""The stage kernels compile to the instructions they are written for."""

import re

import pytest
import torch

from adjoint.core import kernels
from adjoint.core.kernels import TARGETS
from adjoint.core.launch import variants
from adjoint.ops.gated_delta.stages.w_u.cases import built_calls

pytestmark = pytest.mark.skipif(
    kernels.interpreting() or bool(kernels.triton_missing()), reason="the ordinary process compiles"
)


@pytest.mark.parametrize("T", [torch.bfloat16, torch.float32], ids=str)
def test_chunks_are_read_at_once_and_multiplied_in_groups_of_warps(T: torch.dtype) -> None:
    """Every access is 16 bytes wide but those of the gates, and all loads come before the first product."""
    from triton.backends.compiler import GPUTarget

    (variant,) = {
        variant
        for call in built_calls()
        if tuple(x.dtype for x in call.arguments[:5:4]) == (torch.bfloat16, T) and call.arguments[0].shape[-1] == 128
        for _, variant in variants(call, "sm_90")
        if variant.kernel == "gated_delta_w_u" and "k" in variant.aligned
    }
    ptx = variant.compile(GPUTarget(*TARGETS["sm_90"])).asm["ptx"]
    columns, parts = {torch.bfloat16: (64, 1), torch.float32: (32, 2)}[T]
    multiplied = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)
    assert multiplied == [str(columns)] * (256 // columns * 4 * parts), "each tile, four steps of 16 tokens, each part"
    assert "mma.sync" not in ptx
    assert set(re.findall(r"st\.global[\w.:]*", ptx)) == {"st.global.v4.b32"}
    wide = 4096 * T.itemsize // 16 // 128 + 2 * 8192 * 2 // 16 // 128
    assert len(re.findall(r"ld\.global[\w.:]*\.v4\.b32", ptx)) == wide, "T, then values and keys, once"
    assert ptx.rindex("ld.global") < ptx.index("wgmma.mma_async")
