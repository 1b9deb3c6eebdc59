"""Launches the walk back on Hopper."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.core.kernels import TRITON_TYPES, Variant, registered
from adjoint.ops.gated_delta import rule_walk_back_hopper_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule_hopper import strides
from adjoint.ops.gated_delta.rule_launch import Launches
from adjoint.ops.gated_delta.rule_shape import Shape, Walkable

V_BLOCK = 64

STAGES, FETCH = 3, 0
"""Chunks in shared memory, and where in a step the copies of one begin. Tuned on an H200."""

_ELEMENTS = frozenset(("q", "k", "do", "W", "local", "Y", "dstates"))


def variant(shape: Shape, key: tuple[Any, ...]) -> Variant:
    """The kernel for strides and options; strides are constants, so that an address is a sum with a constant."""
    (q_stride, q_head, k_stride, k_head, do_stride, do_head), final, initial, *tuned = key
    stages, fetch = tuned or (STAGES, FETCH)
    kernel = registered()["rule_walk_back_hopper"]
    names = [name for name in kernel.parameters if not name.isupper() or name in ("W", "Y")]
    types = {}
    for name in names:
        integer = name in ("begins", "firsts")
        kind = shape.element if name in _ELEMENTS else torch.int32 if integer else torch.float32
        types[name] = "fp32" if name == "scale" else f"*{TRITON_TYPES[kind]}"
    constants = {
        "HEADS": shape.heads,
        "Q_STRIDE": q_stride,
        "K_STRIDE": k_stride,
        "DO_STRIDE": do_stride,
        "Q_HEAD": q_head,
        "K_HEAD": k_head,
        "DO_HEAD": do_head,
        "GROUP": shape.group,
        "K": shape.K,
        "V": shape.V,
        "STAGES": stages,
        "FETCH": fetch,
        "FINAL": final,
        "INITIAL": initial,
    }
    promised = [name for name in names if name in _ELEMENTS or name == "gates"]
    return kernel.variant(types, constants, promised, num_warps=4, num_stages=1)


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
        ("walk_back_hopper", strides(shape, q, k, do), dfinal_state is not None, dinitial_state is not None),
        shape.sequences * shape.heads * (shape.V // V_BLOCK),
        q.start, k.start, do.start, memory["gates"], memory["W"], memory["local"], memory["begins"], memory["firsts"],
        absent if dfinal_state is None else dfinal_state, absent if dinitial_state is None else dinitial_state,
        memory["Y"], memory["dstates"], scale,
    )  # fmt: skip
