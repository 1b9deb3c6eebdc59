"""The kernel variants of the expert layer, as they are compiled for a GPU."""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import Variant
from adjoint.ops.moe.experts_plans import SCHEDULES

_EVERYTHING = 15
_SIZES = {"hidden": 2048, "experts": 128, "inner": 768, "slots": 8}


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel in every type; for one type also unaligned, and as tuned for a GPU."""
    from adjoint.ops.moe.experts_variants import SHARED_BYTES, Kinds, variants

    shared = SHARED_BYTES.get(target, 65_536)
    tuned = ["NVIDIA H200"] if target == "sm_90" else []
    listed: set[Variant] = set()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        kinds = Kinds(dtype, dtype, **_SIZES, shared_bytes=shared)
        for gpu in ("default", *tuned) if dtype == torch.bfloat16 else ("default",):
            for op, options in (("moe_experts", 1), ("moe_experts_backward", _EVERYTHING)):
                for key, described in variants(op, kinds, SCHEDULES.named(op, gpu), options).items():
                    aligned = not isinstance(key, tuple) or key[-1] is not False
                    if described in listed or not (aligned or dtype == torch.bfloat16):
                        continue
                    listed.add(described)
                    yield f"{op} {key} {dtype} {gpu}", described
