"""The operations, one folder per op, in a folder for each family.

The files of an op are the contract (`__init__`), `reference`, `eager`, `kernels`, `plans` and `cases`. A folder in
`OPS` has the first and the last of them, and of the others those that the ops of its family do not share. An op listed
here is verified, benchmarked and documented with the others.
"""

from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adjoint.core.kernels import Variant

OPS = (
    "activation.silu",
    "activation.swiglu",
    "activation.sigmoid_gate",
    "norm.rms_norm",
    "norm.gated_rms_norm",
    "norm.l2_norm",
    "conv.causal_conv1d",
    "conv.causal_conv1d_step",
    "rotary.rotary",
    "embedding.embedding",
    "embedding.bag",
    "indexing.take_along_axis",
    "moe.route",
    "moe.losses",
    "moe.dispatch",
    "moe.combine",
    "moe.experts",
    "loss.cross_entropy",
    "loss.linear_cross_entropy",
    "gated_delta.rule",
    "gated_delta.step",
    "gated_delta.stages.gate",
    "gated_delta.stages.normalize",
    "gated_delta.stages.chunks",
    "gated_delta.stages.w_u",
)
"""The folders of the ops."""

FAMILIES = tuple(dict.fromkeys(op.partition(".")[0] for op in OPS))
"""The folders of the families."""


def cases(family: str | None = None) -> list[ModuleType]:
    """The `cases` modules of all ops, or of the ops of a family."""
    return [import_module(f"adjoint.ops.{op}.cases") for op in OPS if family in (None, op.partition(".")[0])]


def builds(target: str) -> Iterator[tuple[str, "Variant"]]:
    """Every kernel variant that is built ahead of time for a target, each once and under its own name."""
    names: dict[str, Variant] = {}
    for module in cases():
        listed = module.builds(target) if hasattr(module, "builds") else _of_calls(module, target)
        for name, variant in listed:
            if name not in names:
                names[name] = variant
                yield name, variant


def _of_calls(module: ModuleType, target: str) -> Iterator[tuple[str, "Variant"]]:
    from adjoint.core.launch import variants

    for call in module.built_calls():
        call, *restriction = call if isinstance(call, tuple) else (call,)
        yield from variants(call, target, *restriction)
