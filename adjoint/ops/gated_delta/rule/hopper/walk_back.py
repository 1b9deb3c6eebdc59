"""Launches the walk back on Hopper, and the kernel before it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.core.kernels import TRITON_TYPES, Variant, registered
from adjoint.ops.gated_delta.rule.hopper import turn_kernels as _turn_kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule.hopper import walk_back_kernels as _kernels  # noqa: F401
from adjoint.ops.gated_delta.rule.hopper.launch import strides
from adjoint.ops.gated_delta.rule.shape import Shape, Walkable
from adjoint.ops.gated_delta.rule.triton.launch import Launches

V_BLOCK = 64

STAGES = 3
"""Chunks in shared memory."""

_ELEMENTS = frozenset(("q", "k", "do", "T", "W", "local", "Y", "dstates"))


def variant(shape: Shape, key: tuple[Any, ...]) -> Variant:
    """The kernel for strides and options; strides are constants, so that an address is a sum with a constant."""
    name, (q_stride, q_head, k_stride, k_head, do_stride, do_head), *options = key
    kernel = registered()[f"rule_{name}"]
    types = {}
    for parameter in kernel.parameters:
        if parameter in _ELEMENTS:
            types[parameter] = f"*{TRITON_TYPES[shape.element]}"
        elif parameter in ("begins", "firsts", "places"):
            types[parameter] = f"*{TRITON_TYPES[torch.int32]}"
        elif not parameter.isupper():
            types[parameter] = "fp32" if parameter == "scale" else "*fp32"
    final, initial = options or (False, False)
    constants = {
        "HEADS": shape.heads,
        "KEY_HEADS": shape.key_heads,
        "Q_STRIDE": q_stride,
        "K_STRIDE": k_stride,
        "DO_STRIDE": do_stride,
        "Q_HEAD": q_head,
        "K_HEAD": k_head,
        "DO_HEAD": do_head,
        "GROUP": shape.group,
        "K": shape.K,
        "V": shape.V,
        "STAGES": STAGES,
        "FINAL": final,
        "INITIAL": initial,
    }
    wanted = {parameter: constants[parameter] for parameter in kernel.parameters if parameter not in types}
    promised = [parameter for parameter in types if parameter in _ELEMENTS or parameter == "gates"]
    return kernel.variant(types, wanted, promised, num_warps=4, num_stages=1)


def turn(launch: Launches, memory: Mapping[str, Any], q: Walkable, k: Walkable, do: Walkable, scale: float) -> None:
    """W and local of every chunk and value head."""
    shape = launch.shape
    launch(
        ("turn_hopper", strides(q, k, do)), shape.chunks * shape.key_heads, q.start, k.start, do.start,
        memory["gates"], memory["places"], memory["T"], memory["W"], memory["local"], scale,
    )  # fmt: skip


def walk_back(
    launch: Launches,
    memory: Mapping[str, Any],
    q: Walkable,
    k: Walkable,
    do: Walkable,
    scale: float,
    dfinal_state: Tensor | None,
    dinitial_state: Tensor | None,
) -> None:
    """Y and dstates of every chunk, and the gradient of the initial states where it is wanted."""
    shape, absent = launch.shape, memory["gates"]
    launch(
        ("walk_back_hopper", strides(q, k, do), dfinal_state is not None, dinitial_state is not None),
        shape.sequences * shape.heads * (shape.V // V_BLOCK),
        q.start, k.start, do.start, memory["gates"], memory["W"], memory["local"], memory["begins"], memory["firsts"],
        absent if dfinal_state is None else dfinal_state, absent if dinitial_state is None else dinitial_state,
        memory["Y"], memory["dstates"], scale,
    )  # fmt: skip
