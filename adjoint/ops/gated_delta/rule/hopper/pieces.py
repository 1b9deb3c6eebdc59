"""Pieces that the kernels in Gluon share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

together = getattr(gl, "thread_barrier", None) or gl.barrier
"""Waits for the threads of a partition, by the name a version of Triton has for it."""


@gluon.jit
def rounded_to(x, kind: gl.constexpr):
    """float32 x in a 16-bit type. Two numbers an instruction: compilers take one where the result is widened again."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def say(full, stage):
    """That a chunk has been copied. The fence is for products that read it: where they wait, it would hold them up."""
    fence_async_shared()
    together()
    mbarrier.arrive(full.index(stage))
