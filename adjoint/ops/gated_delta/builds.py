"""The kernel variants of the family, as they are compiled for a GPU."""

from collections.abc import Iterator

from adjoint.core.kernels import Variant
from adjoint.ops.gated_delta.stages import w_u_builds
from adjoint.ops.gated_delta.step import builds as step_builds


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    yield from step_builds.builds(target)
    yield from w_u_builds.builds(target)
