"""Builds of kernels for a GPU that need not be present, and the resources that their machine code uses."""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from adjoint.core.errors import Unsupported
from adjoint.core.kernels.targets import TARGETS
from adjoint.core.kernels.variants import Variant


@dataclass(frozen=True)
class Build:
    """The resources that a compiled kernel uses. Registers are per thread, and None where they are not reported."""

    registers: int | None
    spilled_bytes: int
    shared_bytes: int


def build(variant: Variant, target: str) -> Build:
    """Compiles a variant for a target and reports what the machine code uses.

    Registers and spills come from the machine code itself: for NVIDIA from `cuobjdump`, and for AMD from the metadata
    in the assembly.
    """
    if target not in TARGETS:
        raise Unsupported(f"build: unknown target {target!r}; known are {', '.join(TARGETS)}")
    from triton.backends.compiler import GPUTarget

    compiled = variant.compile(GPUTarget(*TARGETS[target]))
    if "cubin" in compiled.asm:
        return Build(*_nvidia_usage(compiled.asm["cubin"]), compiled.metadata.shared)
    text = compiled.asm["amdgcn"]
    spilled = sum(int(n) for n in re.findall(r"\.private_segment_fixed_size:\s+(\d+)", text))
    registers = re.search(r"\.vgpr_count:\s+(\d+)", text)
    return Build(int(registers[1]) if registers else None, spilled, compiled.metadata.shared)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers per thread, and bytes of local memory (spills and stack) per thread."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", report)
    if usage is None:
        raise RuntimeError(f"cuobjdump reported no resource usage:\n{report}")
    return int(usage[1]), int(usage[2]) + int(usage[3])
