"""The kernel variants of the gated delta rule's backward, as they are compiled for a GPU."""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import Variant
from adjoint.core.problem import Problem

_LAYERS = ((torch.bfloat16, 128, 128), (torch.bfloat16, 256, 256), (torch.float16, 128, 64), (torch.float32, 256, 256))
"""Element type, K and V; the first also without alignment, and each with normalised q and k or without."""

_EVERYTHING = 63

_SPILLING = ("turn", "matrices")
"""Not without spills in float32 yet: right, and slow. Left out here, where a spill is an error."""


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel that is the backward's own, and the walk over segments as it cuts it."""
    from adjoint.ops.gated_delta import rule_launch
    from adjoint.ops.gated_delta.rule_backward import keys
    from adjoint.ops.gated_delta.rule_backward_launch import KERNELS, forward_tuning, tuning, variant
    from adjoint.ops.gated_delta.rule_shape import Shape

    listed: set[Variant] = set()
    for number, (dtype, K, V) in enumerate(_LAYERS):
        sizes = (1, 32768, 4, 16, 32, K, V, 1, 1, 1)
        dtypes = (dtype, torch.float32, torch.float32, torch.int64)
        options = (1.0, number % 2 == 1, _EVERYTHING)
        problem = Problem("gated_delta_rule_backward", torch.device("cuda", 0), dtypes, "", sizes, options)
        shape = Shape.of(problem)
        for key in keys(problem):
            if key[0] not in (*KERNELS, "walk") or not (number == 0 or key[-1] is not False):
                continue
            if dtype == torch.float32 and key[0] in _SPILLING:
                continue
            if key[0] == "walk":
                described = rule_launch.variant(key, shape, forward_tuning(shape))
            else:
                described = variant(key, shape, forward_tuning(shape).parts, tuning(shape))
            if described not in listed:
                listed.add(described)
                yield f"backward {' '.join(map(str, key))} {dtype} {K} {V}", described
    if target == "sm_90":
        yield from _for_hopper()


def _for_hopper() -> Iterator[tuple[str, Variant]]:
    """The walk back in Gluon, and what comes before it."""
    from adjoint.ops.gated_delta.rule_hopper import natural
    from adjoint.ops.gated_delta.rule_shape import Shape
    from adjoint.ops.gated_delta.rule_walk_back_hopper import variant

    for dtype, K, V in ((torch.bfloat16, 128, 128), (torch.float16, 64, 192), (torch.float16, 128, 64)):
        shape = Shape(dtype, torch.float32, torch.float32, None, 1, 32768, 1, 16, 32, K, V)
        for name, *options in (("turn_hopper",), ("walk_back_hopper", False, False), ("walk_back_hopper", True, True)):
            key = (name, natural(shape), *options)
            yield f"backward {' '.join(map(str, key))} {dtype} {K} {V}", variant(shape, key, 1)
