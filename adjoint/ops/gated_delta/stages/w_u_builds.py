"""The kernel variants of `recompute_w_u`, `gate` and `normalize`, as they are compiled for a GPU."""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import NVIDIA, Variant
from adjoint.ops.gated_delta.stages.w_u_plans import SCHEDULES

_EVERYTHING = 31
_HEADS = 32


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel in every type; for one type also without alignment, packed, and with the longest rows."""
    if target in NVIDIA:
        yield from _stage()
    yield from _gates()


def _stage() -> Iterator[tuple[str, Variant]]:
    from adjoint.ops.gated_delta.stages.w_u_launch import Kinds, bounds_variant, variant

    for index in (torch.int32, torch.int64):
        yield f"gated_delta_bounds {index}", bounds_variant(index, report=index == torch.int64)
    both, wide = (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)
    kinds = (both, wide, (torch.float16, torch.float32), (torch.float32, torch.float32))
    for kernel in ("gated_delta_w_u", "gated_delta_w_u_backward", "gated_delta_w_u_backward_keys"):
        schedule = SCHEDULES.named(kernel.removesuffix("_keys"), "default")

        def built(
            element: torch.dtype, T: torch.dtype, size: int, packed: bool, aligned: bool, chunk: int = 64
        ) -> tuple[str, Variant]:
            own = Kinds(element, T, size, size, chunk, _EVERYTHING)
            words = f"{element} T {T} size {size} chunk {chunk} packed={packed} aligned={aligned}"
            return f"{kernel} {words}", variant(kernel, own, schedule, packed, aligned)  # noqa: B023

        for element, T in kinds:
            yield built(element, T, 128, False, True)
        yield built(*wide, 256, True, True)
        yield built(torch.float32, torch.float32, 256, False, False)
        yield built(*wide, 128, False, False)
        yield built(*both, 9, True, False, 16)


def _gates() -> Iterator[tuple[str, Variant]]:
    from adjoint.ops.gated_delta.stages.gate_launch import variant

    for element in (torch.bfloat16, torch.float32):
        of_gate = {name: element for name in ("a", "b", "da", "db", "dt_bias")}
        schedule = SCHEDULES.named("gated_delta_gate", "default")
        yield (
            f"gated_delta_gate {element}",
            variant("gated_delta_gate", of_gate, _HEADS, schedule["warps"], elements=schedule["elements"]),
        )
        schedule = SCHEDULES.named("gated_delta_gate_backward", "default")
        wanted = {"NEED_A": True, "NEED_B": True, "NEED_SUMS": True}
        yield (
            f"gated_delta_gate_backward {element}",
            variant("gated_delta_gate_backward", of_gate, _HEADS, schedule["warps"], **wanted),
        )
        wanted = {"NEED_FIRST": True, "NEED_SECOND": True}
        last = {"second": element} if element != torch.float32 else {}
        yield f"gated_delta_add_runs {element}", variant("gated_delta_add_runs", last, _HEADS, 4, **wanted)
        of_vectors = dict.fromkeys(("x", "y", "dx", "dy"), element)
        for kernel in ("gated_delta_normalize", "gated_delta_normalize_backward"):
            schedule = SCHEDULES.named(kernel, "default")
            for size, aligned in ((128, True), (1000, False)) if element == torch.float32 else ((128, False),):
                described = variant(kernel, of_vectors, size, schedule["warps"], aligned, elements=schedule["elements"])
                yield f"{kernel} {element} size {size} aligned={aligned}", described
