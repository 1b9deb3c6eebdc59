"""The kernel variants of the family, as they are compiled for a GPU."""

from collections.abc import Iterator

from adjoint.core.kernels import Variant
from adjoint.ops.moe import dispatch_builds, experts_builds


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    yield from dispatch_builds.builds(target)
    yield from experts_builds.builds(target)
