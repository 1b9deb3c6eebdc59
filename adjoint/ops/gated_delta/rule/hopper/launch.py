"""Launches the walk that writes outputs itself, on Hopper."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.core.kernels import TRITON_TYPES, Variant, registered
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.rule.hopper import forward_kernels as _forward  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.rule.hopper import transition_kernels as _transition  # noqa: F401
from adjoint.ops.gated_delta.rule.shape import Shape, Walkable
from adjoint.ops.gated_delta.rule.triton.launch import Launches, is_aligned

V_BLOCK = 64

STAGES = 3
"""Chunks in shared memory."""

NEVER = 2**30
"""More chunks than a sequence has."""

_ELEMENTS = frozenset(("q", "k", "v", "T", "P", "out"))
_INTEGERS = frozenset(("spans", "begins", "firsts"))
_SCALARS = {"scale": "fp32", "save_every": "i32"}


def variant(shape: Shape, key: tuple[Any, ...]) -> Variant:
    """The kernel for strides and options; strides are constants, so that an address is a sum with a constant."""
    name, (q_stride, q_head, k_stride, k_head, v_stride, v_head), *options = key
    segmented, initial, final, aligned = options or (True, False, False, True)
    kernel = registered()[f"rule_{name}"]
    types = {}
    for parameter in kernel.parameters:
        if parameter in _ELEMENTS:
            types[parameter] = f"*{TRITON_TYPES[shape.element]}"
        elif not parameter.isupper():
            pointer = f"*{TRITON_TYPES[torch.int32 if parameter in _INTEGERS else torch.float32]}"
            types[parameter] = _SCALARS.get(parameter, pointer)
    constants = {
        "HEADS": shape.heads,
        "Q_STRIDE": q_stride,
        "K_STRIDE": k_stride,
        "V_STRIDE": v_stride,
        "Q_HEAD": q_head,
        "K_HEAD": k_head,
        "V_HEAD": v_head,
        "GROUP": shape.group,
        "K": shape.K,
        "V": shape.V,
        "STAGES": STAGES,
        "SEGMENTED": segmented,
        "INITIAL": initial,
        "FINAL": final,
        "SEGMENT": SEGMENT,
    }
    wanted = {parameter: constants[parameter] for parameter in kernel.parameters if parameter not in types}
    promised = [
        parameter
        for parameter in types
        if (parameter in _ELEMENTS and (aligned or parameter != "out")) or parameter == "gates"
    ]
    return kernel.variant(types, wanted, promised, num_warps=4, num_stages=1)


def natural(shape: Shape, of_values: int = 1) -> tuple[int, ...]:
    """The strides of tokens and heads in contiguous q, k and so many tensors like v."""
    keys, values = (shape.key_heads * shape.K, shape.K), (shape.heads * shape.V, shape.V)
    return (*keys, *keys, *(values * of_values))


def strides(*tokens: Walkable) -> tuple[int, ...]:
    """Those of q, k and of tensors like v."""
    return tuple(stride for x in tokens for stride in (x.token_stride, x.head_stride))


def forward(
    launch: Launches,
    memory: Mapping[str, Any],
    q: Walkable,
    k: Walkable,
    v: Walkable,
    scale: float,
    initial_state: Tensor | None,
    saved: Tensor | None,
    final_state: Tensor | None,
    out: Tensor,
    segmented: bool = False,
) -> None:
    """o of all sequences, and the states that are wanted; over segments, from the states in `saved`."""
    shape, absent = launch.shape, memory["gates"]
    if final_state is not None and shape.ids is not None:  # for sequences without tokens, which no program walks
        final_state.zero_() if initial_state is None else final_state.copy_(initial_state)
    options = (segmented, initial_state is not None, final_state is not None, is_aligned(out))
    launch(
        ("forward_hopper", strides(q, k, v), *options),
        (shape.segments if segmented else shape.sequences) * shape.heads * (shape.V // V_BLOCK),
        q.start, k.start, v.start, memory["gates"], memory["T"], memory["P"],
        memory["segment_places"] if segmented else memory["begins"], memory["begins"], memory["firsts"],
        absent if initial_state is None else initial_state, absent if saved is None else saved,
        absent if final_state is None else final_state, out, scale,
        NEVER if saved is None or segmented else SEGMENT // CHUNK,
    )  # fmt: skip


def transitions(launch: Launches, memory: Mapping[str, Any], k: Walkable, v: Walkable) -> None:
    """What every segment makes of a state, M S + B: Mᵀ and Bᵀ into memory["transitions"], [segments, H, K + V, K]."""
    shape = launch.shape
    launch(
        ("transition_hopper", strides(k, k, v)), shape.segments * shape.heads * ((shape.K + shape.V) // V_BLOCK),
        k.start, v.start, memory["gates"], memory["T"], memory["segment_places"], memory["begins"], memory["firsts"],
        memory["transitions"],
    )  # fmt: skip
