"""Targets: the architectures that kernels are built for, and why Triton's kernels cannot run on a device."""

from collections.abc import Iterable
from functools import cache

import torch

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
"""The targets that kernels are built for ahead of time: backend, architecture and threads per warp."""

NVIDIA = tuple(target for target in TARGETS if target.startswith("sm_"))

TUNED, TUNED_GPU = "sm_90", "NVIDIA H200"
"""The architecture on which kernels are tuned and timed, and the GPU, as schedules name it."""


@cache
def triton_missing() -> str:
    """Why the Triton backend cannot be used in this process at all; empty when it can."""
    try:
        import triton  # noqa: F401
    except Exception as error:  # a broken install raises more than ImportError
        return f"triton cannot be imported ({type(error).__name__}: {error})"
    return ""


@cache
def interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on the CPU. This is settled when Triton is imported."""
    if triton_missing():
        return False
    from triton import knobs

    return bool(knobs.runtime.interpret)


def why_not_triton(device: torch.device) -> str:
    """Why Triton kernels cannot run on a device; empty when they can."""
    if missing := triton_missing():
        return missing
    if interpreting():
        return "" if device.type == "cpu" else "Triton's interpreter is on, and it runs on the CPU alone"
    if device.type != "cuda":
        return f"Triton has no {device.type} backend here; its interpreter is off"
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
        return f"{torch.cuda.get_device_name(device)} is older than sm_80"
    return ""


def why_not_on(device: torch.device, targets: Iterable[str]) -> str:
    """Why kernels for some targets cannot run on a device; empty when they can.

    Kernels for only one architecture are written in Gluon: they run on no other GPU, and not in the interpreter.
    Kernels for several architectures run on every GPU of those vendors.
    """
    targets = tuple(targets)
    if len(targets) == 1:
        (target,) = targets
        if device.type != "cuda" or torch.version.hip is not None:
            return f"is for {target} alone"
        if torch.cuda.is_available() and architecture(device) != target:
            return f"is for {target}, this is {torch.cuda.get_device_name(device)}"
    elif device.type == "cuda" and torch.version.hip is not None and not set(targets) - set(NVIDIA):
        return "its kernels are for NVIDIA GPUs"
    return why_not_triton(device)


def why_not_for(target: str, targets: Iterable[str]) -> str:
    """Why kernels for some targets are not for `target`, whose GPU need not be present; empty when they are."""
    targets = tuple(targets)
    if target in targets:
        return triton_missing()
    return f"is for {targets[0]} alone" if len(targets) == 1 else "its kernels are for NVIDIA GPUs"


def architecture(device: torch.device) -> str:
    """The architecture of a device, under the name of its target: "sm_90", "gfx942"; else the type of the device."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"
