"""The kernel variants of the gated delta rule's backward, as they are compiled for a GPU."""

from collections.abc import Iterator
from typing import Any

import torch

from adjoint.core.kernels import Variant
from adjoint.core.problem import Problem

_LAYERS = (
    (torch.bfloat16, 32, 128, 128),
    (torch.bfloat16, 32, 256, 256),
    (torch.float16, 32, 128, 64),
    (torch.float32, 32, 256, 256),
    (torch.bfloat16, 8, 128, 128),
    (torch.float16, 4, 64, 64),
    (torch.float32, 8, 128, 128),
    (torch.bfloat16, 32, 128, 128),
)
"""Element type, value heads, K and V; every second with normalised q and k. Few heads are split, and have walks of
their own."""

_UNALIGNED = (0, 4, 7)
"""Layers that are listed without alignment, too."""

_HOPPER = (
    (torch.bfloat16, 16, 128, 128, False),
    (torch.bfloat16, 16, 128, 128, True),
    (torch.bfloat16, 8, 64, 128, True),
    (torch.float16, 32, 128, 64, True),
    (torch.float16, 16, 64, 64, False),
)
"""Element type, key heads of 32 value heads, K, V, and whether q and k are normalised."""

_EVERYTHING = 63


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel that is the backward's own, and the walks over segments as it cuts them."""
    from adjoint.ops.gated_delta.rule.shape import Shape
    from adjoint.ops.gated_delta.rule.triton import launch as rule_launch
    from adjoint.ops.gated_delta.rule.triton.backward import keys
    from adjoint.ops.gated_delta.rule.triton.backward_launch import KERNELS, forward_tuning, tuning, variant

    listed: set[Variant] = set()
    again = ("walk", "transition_alone")
    walks = ("walk_back", "segment_back", "transition_back", "transition_alone", "compose_back")
    for number, (dtype, heads, K, V) in enumerate(_LAYERS):
        sizes = (1, 32768, 4, heads // 2, heads, K, V, 1, 1, 1)
        dtypes = (dtype, torch.float32, torch.float32, torch.int64)
        options = (1.0, number % 2 == 1, _EVERYTHING)
        problem = Problem("gated_delta_rule_backward", torch.device("cuda", 0), dtypes, "", sizes, options)
        shape = Shape.of(problem)
        wanted = walks if shape.may_split else (*KERNELS, "walk")
        for key in keys(problem):
            if key[0] not in wanted or not (number in _UNALIGNED or key[-1] is not False):
                continue
            if key[0] in again:
                described = rule_launch.variant(key, shape, forward_tuning(shape))
            else:
                tuned = tuning(shape, target in ("sm_90", "sm_100"))
                described = variant(key, shape, forward_tuning(shape).parts, tuned)
            if described not in listed:
                listed.add(described)
                yield f"backward {' '.join(map(str, key))} {dtype} {heads} {K} {V}", described
    if target == "sm_90":
        yield from _for_hopper()


def _for_hopper() -> Iterator[tuple[str, Variant]]:
    """The kernels in Gluon: what comes before the walk back, both walks, and all gradients."""
    from adjoint.ops.gated_delta.rule.hopper.launch import natural
    from adjoint.ops.gated_delta.rule.shape import Shape
    from adjoint.ops.gated_delta.rule.triton import launch as rule_launch
    from adjoint.ops.gated_delta.rule.triton.backward_launch import forward_tuning, tuning, variant

    listed: set[Variant] = set()
    for dtype, key_heads, K, V, normalize in _HOPPER:
        shape = Shape(dtype, torch.float32, torch.float32, None, 1, 32768, 1, key_heads, 32, K, V)
        strides = natural(shape)
        inverses = rule_launch.variant(("prepare_hopper", False), shape, forward_tuning(shape))
        if inverses not in listed:
            listed.add(inverses)
            yield f"backward prepare_hopper {dtype} {K} {key_heads}", inverses
        walks: list[tuple[Any, ...]] = [("walk_back_hopper", strides, given, given) for given in (False, True)]
        walks += [("walk_hopper", strides[2:], given) for given in (False, True)]
        for key in (("turn_hopper", strides), *walks, ("gradients_hopper", natural(shape, 2), normalize)):
            described = variant(key, shape, forward_tuning(shape).parts, tuning(shape))
            if described not in listed:
                listed.add(described)
                yield f"backward {' '.join(map(str, key))} {dtype} {K} {V}", described
