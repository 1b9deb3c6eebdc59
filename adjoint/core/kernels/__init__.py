"""Triton kernels with typed parameters: how they are declared, compiled for a target, launched and counted.

    @kernel(budget=Budget(registers=32), schedule=("BLOCK",))
    @triton.jit
    def scale(x: PointerIf16.element, y: PointerIf16.element, factor: Float32, count: Int64, BLOCK: tl.constexpr):
        ...

The signature states the type of every run-time parameter, and Triton's own annotation marks the compile-time constants.
`adjoint.core.launch` binds the constants of a kernel and launches it by the names of its parameters.

Kernels are compiled from these types, and not through Triton's specialisation at call time, for three reasons. The
compiled code never depends on a batch's sizes or addresses by accident. The same description builds ahead of time for a
GPU that is not present. And a launch costs no signature matching.

These modules import Triton only inside functions, because importing the package must not import it.
"""

from adjoint.core.kernels.builds import Build, build
from adjoint.core.kernels.counts import compilations, count_compilation, count_launch, launches
from adjoint.core.kernels.declaration import Budget, Kernel, kernel, registered
from adjoint.core.kernels.parameters import (
    TRITON_TYPES,
    Float,
    Float32,
    Int,
    Int32,
    Int32If16,
    Int32x16,
    Int64,
    Int64If16,
    Int64x16,
    Parameter,
    Pointer,
    Pointer16,
    PointerIf16,
    Tiled,
)
from adjoint.core.kernels.targets import (
    NVIDIA,
    TARGETS,
    TUNED,
    TUNED_GPU,
    architecture,
    interpreting,
    triton_missing,
    why_not_for,
    why_not_on,
    why_not_triton,
)
from adjoint.core.kernels.variants import Variant, forget

__all__ = [
    "NVIDIA",
    "TARGETS",
    "TRITON_TYPES",
    "TUNED",
    "TUNED_GPU",
    "Budget",
    "Build",
    "Float",
    "Float32",
    "Int",
    "Int32",
    "Int32If16",
    "Int32x16",
    "Int64",
    "Int64If16",
    "Int64x16",
    "Kernel",
    "Parameter",
    "Pointer",
    "Pointer16",
    "PointerIf16",
    "Tiled",
    "Variant",
    "architecture",
    "build",
    "compilations",
    "count_compilation",
    "count_launch",
    "forget",
    "interpreting",
    "kernel",
    "launches",
    "registered",
    "triton_missing",
    "why_not_for",
    "why_not_on",
    "why_not_triton",
]
