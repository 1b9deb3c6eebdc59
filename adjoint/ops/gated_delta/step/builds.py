"""The kernel variants of `gated_delta_step` and its adjoint, as they are compiled for a GPU.

The benchmark's states as tuned, every element type, the largest heads with every mode on, and any strides.
"""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import Variant
from adjoint.ops.gated_delta.step.plans import SCHEDULES

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    from adjoint.ops.gated_delta.step import backward_launch as adjoint
    from adjoint.ops.gated_delta.step.launch import Kinds, variant

    forward = "gated_delta_step_tiles"
    gpus = ("default", "NVIDIA H200") if target == "sm_90" else ("default",)
    listed: set[Variant] = set()
    described = [
        ("decode", Kinds(_BF16, _F32, _F32, _F32, None, 128, 128, in_place=True), True, True),
        ("decode bf16 states", Kinds(_BF16, _F32, _F32, _BF16, torch.int32, 128, 128, in_place=True), True, True),
        ("decode paged", Kinds(_BF16, _F32, _F32, _F32, torch.int32, 128, 128, True, in_place=True), True, True),
        ("decode large heads", Kinds(_BF16, _BF16, _BF16, _F32, torch.int64, 256, 256, True, True), True, True),
        ("decode large bf16 states", Kinds(_F16, _F32, _F32, _BF16, torch.int32, 256, 256, True), True, True),
        ("many tokens", Kinds(_F16, _F32, _F32, _F32, torch.int64, 128, 128), False, True),
        ("everything", Kinds(_BF16, _BF16, _BF16, _F32, torch.int32, 256, 256, True, True, True), False, True),
        ("strides", Kinds(_F32, _F32, _F32, _F32, torch.int32, 256, 256, True, True, True), False, False),
        ("float64", Kinds(_F64, _F64, _F64, _F64, torch.int64, 256, 256, True), False, True),
    ]
    for gpu in gpus:
        for name, kinds, one_token, aligned in described:
            built = variant(kinds, SCHEDULES.named(forward, gpu), one_token, aligned)
            if built not in listed:
                listed.add(built)
                yield f"{forward} {name} {gpu}", built

    schedule = SCHEDULES.lookup("gated_delta_step_backward_tiles")
    for name, gradients in (
        ("a layer", Kinds(_BF16, _F32, _F32, _F32, None, 128, 128)),
        ("everything", Kinds(_BF16, _BF16, _BF16, _BF16, torch.int32, 256, 256, True, True)),
        ("float64", Kinds(_F64, _F64, _F64, _F64, torch.int64, 256, 256, True)),
    ):
        for kernel, warps in (("tiles", schedule["warps"]), ("tokens", schedule["token_warps"]), ("places", 4)):
            if kernel != "places" or gradients.indices is not None:
                built = adjoint.variant(f"gated_delta_step_backward_{kernel}", gradients, warps)
                yield f"gated_delta_step_backward_{kernel} {name}", built
