"""What kernels in Gluon, Triton's dialect for one architecture, share: aggregates and layouts."""

from typing import Any, dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate
from triton.language.core import base_value

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Makes the threads of a partition wait for each other; versions of Triton have different names for it."""


@dataclass_transform()
def bundle(cls: type) -> type:
    """An aggregate whose constructor takes its fields in their order."""
    names = gl.constexpr(tuple(cls.__annotations__))  # a constant, on which Triton's cache depends

    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(names.value, values, strict=True):
            setattr(self, name, gl.constexpr(value) if isinstance(value, int) else value)

    cls.__init__ = gluon.constexpr_function(__init__)
    return aggregate(cls)


def fields(names: str) -> type:
    """An aggregate of fields and nothing else."""
    return bundle(type("Fields", (), {"__annotations__": dict.fromkeys(names.split(), base_value)}))


TILE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
"""A matrix of a 16-bit type in shared memory, as products read it."""


@gluon.constexpr_function
def row_layout(columns, warps=4):
    """Rows of a 16-bit type as threads copy them."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def product_layout(columns, warps=4):
    """The accumulators of a product, 16 rows a warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])


@gluon.jit
def rounded_to(x, kind: gl.constexpr):
    """float32 x in a 16-bit type, two numbers an instruction: compilers round one at a time if it is widened again."""
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def rest_of(x, rounded):
    """What float32 x has beyond its rounding to a 16-bit type, rounded too: compilers widen bfloat16 in two steps."""
    kind: gl.constexpr = rounded.dtype
    if kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """{
                .reg .f32 first, second;
                shl.b32 first, $3, 16;
                and.b32 second, $3, 0xffff0000;
                sub.rn.f32 first, $1, first;
                sub.rn.f32 second, $2, second;
                cvt.rn.bf16x2.f32 $0, second, first;
            }""",
            "=r,r,r,r", [x, rounded], gl.bfloat16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return rounded_to(x - rounded.to(gl.float32), kind)
