"""Launches the walk over segments on Hopper."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from adjoint.core.kernels import TRITON_TYPES, Variant, registered
from adjoint.ops.gated_delta.packing import SEGMENT
from adjoint.ops.gated_delta.rule.hopper import walk_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule.hopper.launch import strides
from adjoint.ops.gated_delta.rule.shape import Shape, Walkable
from adjoint.ops.gated_delta.rule.triton.launch import Launches

_ELEMENTS = frozenset(("k", "v", "T", "states", "new"))
_INTEGERS = frozenset(("spans", "begins", "firsts"))

STAGES = 2
"""Chunks in shared memory."""


def variant(shape: Shape, key: tuple[Any, ...]) -> Variant:
    """The kernel for strides and an option; strides are constants, so that an address is a sum with a constant."""
    _, (k_stride, k_head, v_stride, v_head), initial = key
    kernel = registered()["rule_walk_hopper"]
    types = {}
    for parameter in kernel.parameters:
        if parameter in _ELEMENTS:
            types[parameter] = f"*{TRITON_TYPES[shape.element]}"
        elif not parameter.isupper():
            types[parameter] = "*i32" if parameter in _INTEGERS else "*fp32"
    constants = {
        "HEADS": shape.heads,
        "K_STRIDE": k_stride,
        "V_STRIDE": v_stride,
        "K_HEAD": k_head,
        "V_HEAD": v_head,
        "GROUP": shape.group,
        "K": shape.K,
        "V": shape.V,
        "STAGES": STAGES,
        "INITIAL": initial,
        "SEGMENT": SEGMENT,
    }
    promised = [parameter for parameter in types if parameter in _ELEMENTS or parameter == "gates"]
    return kernel.variant(types, constants, promised, num_warps=shape.V // 16, num_stages=1)


def walk(
    launch: Launches,
    memory: Mapping[str, Any],
    k: Walkable,
    v: Walkable,
    initial_state: Tensor | None,
    saved: Tensor,
    starts: bool = True,
) -> None:
    """states and new of every chunk, over segments from the states that were saved; without `starts`, compiled only."""
    shape, absent = launch.shape, memory["gates"]
    launch(
        ("walk_hopper", strides(k, v), initial_state is not None),
        shape.segments * shape.heads * starts,
        k.start, v.start, memory["gates"], memory["T"], memory["segment_places"], memory["begins"], memory["firsts"],
        absent if initial_state is None else initial_state, saved, memory["states"], memory["new"],
    )  # fmt: skip
