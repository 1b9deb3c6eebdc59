"""The kernel variants of the gated delta rule's forward, as they are compiled for a GPU."""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import Variant
from adjoint.core.problem import Problem

_LAYERS = ((torch.bfloat16, 128, 128), (torch.bfloat16, 256, 256), (torch.float16, 128, 64), (torch.float32, 256, 256))
"""Element type, K and V; the first also without alignment, normalised, and over segments."""


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel for the first layer, and those that depend on types and sizes for the others."""
    from adjoint.ops.gated_delta.rule_forward import keys
    from adjoint.ops.gated_delta.rule_launch import variant
    from adjoint.ops.gated_delta.rule_shape import Shape, tuning

    listed: set[Variant] = set()
    for dtype, K, V in _LAYERS:
        first = (dtype, K, V) == _LAYERS[0]
        sizes = (1, 32768, 4, 16, 32, K, V, 1)
        dtypes = (dtype, torch.float32, torch.float32, torch.int64)
        problem = Problem("gated_delta_rule", torch.device("cuda", 0), dtypes, "", sizes, (1.0, first, True, True))
        shape = Shape.of(problem)
        every = keys(problem)
        if first:
            every += [("walk", True, False, False, False, True), ("scores", 1), ("scores", 2)]
        for key in every:
            described = variant(key, shape, tuning(shape))
            if described in listed or not (first or key[-1] is not False):
                continue
            listed.add(described)
            yield f"{' '.join(map(str, key))} {dtype} {K} {V}", described
