"""The kernel variants of the gated delta rule's forward, as they are compiled for a GPU."""

from collections.abc import Iterator

import torch

from adjoint.core.kernels import Variant
from adjoint.core.problem import Problem

_LAYERS = (
    (torch.bfloat16, 32, 128, 128),
    (torch.bfloat16, 8, 128, 128),
    (torch.bfloat16, 32, 256, 256),
    (torch.float16, 32, 128, 64),
    (torch.float32, 8, 128, 128),
    (torch.float32, 32, 256, 256),
)
"""Element type, value heads, K and V; the first also without alignment and normalised. Few heads are split."""


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Every kernel for the first layer, and those that depend on types and sizes for the others."""
    from adjoint.ops.gated_delta.rule.shape import Shape, tuning
    from adjoint.ops.gated_delta.rule.triton.forward import keys
    from adjoint.ops.gated_delta.rule.triton.launch import variant

    listed: set[Variant] = set()
    for dtype, heads, K, V in _LAYERS:
        first = (dtype, heads, K, V) == _LAYERS[0]
        sizes = (1, 32768, 4, heads // 2, heads, K, V, 1)
        dtypes = (dtype, torch.float32, torch.float32, torch.int64)
        problem = Problem("gated_delta_rule", torch.device("cuda", 0), dtypes, "", sizes, (1.0, first, True, True))
        shape = Shape.of(problem)
        every = keys(problem)
        if first:
            every += [("walk", True, False, False, False, True), ("scores", 1), ("scores", 2)]
            every += [("gates", True, True, True), ("gates", False, True, False)]
        for key in every:
            described = variant(key, shape, tuning(shape, target in ("sm_90", "sm_100")))
            if described in listed or not (first or key[-1] is not False):
                continue
            listed.add(described)
            yield f"{' '.join(map(str, key))} {dtype} {heads} {K} {V}", described
    if target == "sm_90":
        yield from _for_hopper()


def _for_hopper() -> Iterator[tuple[str, Variant]]:
    """The kernels in Gluon: inverses, and the walk over whole sequences, segments, and for what segments make of any
    state."""
    from adjoint.ops.gated_delta.rule.hopper.launch import natural
    from adjoint.ops.gated_delta.rule.shape import Shape, tuning
    from adjoint.ops.gated_delta.rule.triton.launch import variant

    for dtype, K, V in ((torch.bfloat16, 128, 128), (torch.float16, 64, 192)):
        shape = Shape(dtype, torch.float32, torch.float32, None, 1, 32768, 1, 16, 32, K, V)
        whole = [(False, given, given, aligned) for given in (False, True) for aligned in (False, True)]
        walks = [("forward_hopper", natural(shape), *options) for options in (*whole, (True, True, True, True))]
        for key in (*walks, ("transition_hopper", natural(shape))):
            yield f"{' '.join(map(str, key))} {dtype} {K} {V}", variant(key, shape, tuning(shape))
        for key_heads in (16, 32):
            own = shape._replace(key_heads=key_heads)
            yield f"prepare_hopper {dtype} {K} {key_heads}", variant(("prepare_hopper", True), own, tuning(own))
