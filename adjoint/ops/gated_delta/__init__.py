"""The gated delta rule, whole and by stage, with its gradients."""

from adjoint.ops.gated_delta.rule import gated_delta_rule
from adjoint.ops.gated_delta.stages import (
    carry,
    cumulative_decay,
    gate,
    gram,
    normalize,
    output,
    recompute_w_u,
    solve,
)
from adjoint.ops.gated_delta.step import gated_delta_step

__all__ = [
    "carry",
    "cumulative_decay",
    "gate",
    "gated_delta_rule",
    "gated_delta_step",
    "gram",
    "normalize",
    "output",
    "recompute_w_u",
    "solve",
]


def __dir__() -> list[str]:
    return __all__
