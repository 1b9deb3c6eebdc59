"""The kernel variants of the rule, as they are compiled for a GPU."""

from collections.abc import Iterator

from adjoint.core.kernels import NVIDIA, Variant
from adjoint.ops.gated_delta.rule import backward_builds as rule_backward_builds
from adjoint.ops.gated_delta.rule import builds as rule_builds


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    if target in NVIDIA:
        yield from rule_builds.builds(target)
        yield from rule_backward_builds.builds(target)
