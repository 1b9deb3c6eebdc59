"""The kernel variants of the family, as they are compiled for a GPU."""

from collections.abc import Iterator

from adjoint.core.kernels import NVIDIA, Variant
from adjoint.ops.gated_delta import rule_backward_builds, rule_builds, step_builds, w_u_builds


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    if target in NVIDIA:
        yield from rule_builds.builds(target)
        yield from rule_backward_builds.builds(target)
    yield from step_builds.builds(target)
    yield from w_u_builds.builds(target)
