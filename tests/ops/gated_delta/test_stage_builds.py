"""The stage kernels compile to the instructions they are written for."""

import re

import pytest
import torch

from adjoint.core import kernels
from adjoint.core.kernels import TARGETS
from adjoint.ops.gated_delta.w_u_plans import SCHEDULES

pytestmark = pytest.mark.skipif(
    kernels.interpreting() or bool(kernels.triton_missing()), reason="the ordinary process compiles"
)


@pytest.mark.parametrize("T", [torch.bfloat16, torch.float32], ids=str)
def test_chunks_are_copied_ahead_and_multiplied_in_groups_of_warps(T: torch.dtype) -> None:
    """Keys, values and T go to shared memory 16 bytes at a time, past the registers, while a chunk is computed."""
    from triton.backends.compiler import GPUTarget

    from adjoint.ops.gated_delta.w_u_launch import Kinds, variant

    schedule = SCHEDULES.named("gated_delta_w_u", "default")
    described = variant("gated_delta_w_u", Kinds(torch.bfloat16, T, 128, 128, 64, 0), schedule, False, True)
    ptx = described.compile(GPUTarget(*TARGETS["sm_90"])).asm["ptx"]
    assert re.search(r"cp\.async\.cg\.shared\.global \[[^\]]*\], \[[^\]]*\], 0x10", ptx)
    multiplied = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)
    parts = {torch.bfloat16: 1, torch.float32: 2}[T]
    assert multiplied == ["64"] * (4 * 4 * parts), "four tiles of 64 columns, four steps of 16 tokens, each part of T"
    assert "mma.sync" not in ptx
    assert set(re.findall(r"st\.global[\w.:]*", ptx)) == {"st.global.v4.b32"}
