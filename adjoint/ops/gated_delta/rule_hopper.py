"""Launches the walk that writes outputs itself, on Hopper."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from adjoint.core.kernels import TRITON_TYPES, Variant, registered
from adjoint.ops.gated_delta import rule_hopper_kernels as _kernels  # noqa: F401  (registers them)
from adjoint.ops.gated_delta.packing import CHUNK, SEGMENT
from adjoint.ops.gated_delta.rule_launch import Launches, is_aligned
from adjoint.ops.gated_delta.rule_shape import Shape, Walkable

HALVES = 2
"""Parts of v' in its product with the scores: one alone would cost o a third of its error with nearly equal keys."""

V_BLOCK = 64

NEVER = 2**30
"""More chunks than a sequence has."""

_ELEMENTS = frozenset(("q", "k", "v", "T", "P", "out"))


def variant(shape: Shape, key: tuple[Any, ...]) -> Variant:
    """The kernel for strides and options; strides are constants, so that an address is a sum with a constant."""
    (q_stride, q_head, k_stride, k_head, v_stride, v_head), segmented, initial, final, transition, aligned = key
    kernel = registered()["rule_forward_hopper"]
    names = [name for name in kernel.parameters if not name.isupper() or name in ("T", "P")]
    types = {}
    for name in names:
        integer = name in ("spans", "begins", "firsts")
        types[name] = (
            {"scale": "fp32", "save_every": "i32"}[name]
            if name in ("scale", "save_every")
            else f"*{TRITON_TYPES[shape.element if name in _ELEMENTS else torch.int32 if integer else torch.float32]}"
        )
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
        "SEGMENTED": segmented,
        "INITIAL": initial,
        "FINAL": final,
        "SEGMENT": SEGMENT,
        "HALVES": HALVES,
        "TRANSITION": transition,
    }
    promised = [name for name in names if (name in _ELEMENTS and (aligned or name != "out")) or name == "gates"]
    return kernel.variant(types, constants, promised, num_warps=4, num_stages=1)


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
    options = (segmented, initial_state is not None, final_state is not None, False, is_aligned(out))
    launch(
        ("hopper", strides(q, k, v), *options),
        (shape.segments if segmented else shape.sequences) * shape.heads * (shape.V // V_BLOCK),
        q.start, k.start, v.start, memory["gates"], memory["T"], memory["P"],
        memory["segment_places"] if segmented else memory["begins"], memory["begins"], memory["firsts"],
        absent if initial_state is None else initial_state, absent if saved is None else saved,
        absent if final_state is None else final_state, out, scale,
        NEVER if saved is None or segmented else SEGMENT // CHUNK,
    )  # fmt: skip


def transitions(launch: Launches, memory: Mapping[str, Any], k: Walkable, v: Walkable) -> None:
    """What every segment makes of a state, M S + B: Mᵀ and Bᵀ into memory["transitions"], [segments, H, K + V, K]."""
    shape, absent = launch.shape, memory["gates"]
    launch(
        ("hopper", strides(k, k, v), True, False, False, True, True),
        shape.segments * shape.heads * ((shape.K + shape.V) // V_BLOCK),
        k.start, k.start, v.start, memory["gates"], memory["T"], memory["T"], memory["segment_places"],
        memory["begins"], memory["firsts"], absent, absent, memory["transitions"], k.start, 1.0, NEVER,
    )  # fmt: skip
