"""Launches the kernel of the gradients of tokens of the gated delta rule, all at once, on Hopper."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from adjoint.core.kernels import TRITON_TYPES, Variant, registered
from adjoint.ops.gated_delta.rule.hopper import gradients_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule.hopper.launch import strides
from adjoint.ops.gated_delta.rule.shape import Shape, Walkable
from adjoint.ops.gated_delta.rule.triton.launch import Launches, is_aligned

_ELEMENTS = frozenset(("q", "k", "v", "do", "states", "dstates", "new", "Y", "dq", "dk", "dv"))


def variant(shape: Shape, key: tuple[Any, ...]) -> Variant:
    """The kernel for strides and options; strides are constants, so that an address is a sum with a constant."""
    (q_stride, q_head, k_stride, k_head, v_stride, v_head, do_stride, do_head), normalize = key
    kernel = registered()["rule_gradients_hopper"]
    types = {}
    for name in kernel.parameters:
        if name in _ELEMENTS:
            types[name] = f"*{TRITON_TYPES[shape.element]}"
        elif name in ("items", "scale", "places"):
            types[name] = {"items": "i32", "scale": "fp32", "places": "*i32"}[name]
        elif name in ("dg", "dbeta"):
            types[name] = f"*{TRITON_TYPES[shape.gate if name == 'dg' else shape.strength]}"
        elif not name.isupper():
            types[name] = "*fp32"
    constants = {
        "KEY_HEADS": shape.key_heads,
        "Q_STRIDE": q_stride,
        "Q_HEAD": q_head,
        "K_STRIDE": k_stride,
        "K_HEAD": k_head,
        "V_STRIDE": v_stride,
        "V_HEAD": v_head,
        "DO_STRIDE": do_stride,
        "DO_HEAD": do_head,
        "GROUP": shape.group,
        "K": shape.K,
        "V": shape.V,
        "NORMALIZED": normalize,
    }
    promised = [name for name in types if name == "gates" or name in _ELEMENTS]
    return kernel.variant(types, constants, promised, num_warps=8, num_stages=1)


@cache
def programs(device: torch.device) -> int:
    """As many as run at a time: shared memory has room for one on a multiprocessor."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def gradients(
    launch: Launches,
    memory: Mapping[str, Any],
    q: Walkable,
    k: Walkable,
    v: Walkable,
    do: Walkable,
    results: tuple[Tensor, ...],
    scale: float,
    normalize: bool,
) -> None:
    """dq, dk, dv, dg and dβ, into `results`; where a caller's begin at no multiple of 16 bytes, by way of others."""
    # Stores of less than 16 bytes have no registers left.
    given = [out if is_aligned(out) else torch.empty_like(out) for out in results[:3]] + list(results[3:])
    shape, absent = launch.shape, memory["gates"]  # stands for a pointer that no variant reads
    items = shape.chunks * shape.key_heads
    launch(
        ("gradients_hopper", strides(q, k, v, do), normalize),
        min(items, programs(launch.device)), q.start, k.start, v.start, do.start, memory["gates"], memory["places"],
        *(memory[name] for name in ("states", "dstates", "new", "Y")), *given,
        *(memory.get(name, absent) for name in ("q_factors", "k_factors")), items, scale,
    )  # fmt: skip
    for out, found in zip(results, given, strict=True):
        if found is not out:
            out.copy_(found)
