"""What the kernels for Hopper share: functions that run on the device, and `ByStrides`, which binds their variants."""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from adjoint.core.kernels import Kernel
from adjoint.core.launch import Launch, Setup
from adjoint.ops.gated_delta.rule.shape import Shape, TokenRows

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""Makes the threads of a partition wait for each other; versions of Triton have different names for it."""


@aggregate
class ScanBarriers:
    """Barriers of a scan: a chunk's tiles have arrived (full), or have been read (empty); S or v' has been written to
    shared memory (staged), or has left it (drained)."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    S_staged: gl.shared_memory_descriptor
    S_drained: gl.shared_memory_descriptor
    new_staged: gl.shared_memory_descriptor
    new_drained: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, full, empty, S_staged, S_drained, new_staged, new_drained):
        self.full = full
        self.empty = empty
        self.S_staged = S_staged
        self.S_drained = S_drained
        self.new_staged = new_staged
        self.new_drained = new_drained


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
def arrive(full, stage):
    """Says that a chunk has been copied. The fence that products need before they read it is here, to delay none."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(full.index(stage))


class ByStrides:
    """The variants of a kernel, one for each choice of its tokens' strides: they are constants, and addresses cheap.

    The variant for contiguous tokens is bound at once, another when it is first launched.
    """

    def __init__(self, setup: Setup, shape: Shape, kernel: Kernel, tokens: str, **settings: Any) -> None:
        keys, values = (shape.key_heads * shape.K, shape.K), (shape.heads * shape.V, shape.V)
        self._setup, self._kernel, self._tokens, self._settings = setup, kernel, tokens.split(), settings
        contiguous = tuple(keys if name in ("Q", "K") else values for name in self._tokens)
        self._variants = {contiguous: self._bind(contiguous)}

    def _bind(self, strides: tuple[tuple[int, int], ...]) -> Launch:
        named = dict(zip(self._tokens, strides, strict=True))
        constants: dict[str, Any] = {f"{name}_STRIDE": token for name, (token, _) in named.items()}
        constants |= {f"{name}_HEAD": head for name, (_, head) in named.items()}
        return self._setup.kernel(self._kernel, **constants, **self._settings)

    def of(self, *tokens: TokenRows) -> Launch:
        """The variant for tokens, in the order of their names."""
        strides = tuple([x.strides for x in tokens])
        variant = self._variants.get(strides)
        if variant is None:
            variant = self._variants[strides] = self._bind(strides)
        return variant
