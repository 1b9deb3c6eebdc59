"""The kernel variants of the family, as they are compiled for a GPU."""

from collections.abc import Iterator

from adjoint.core.kernels import Variant
from adjoint.ops.moe import route_builds


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    yield from route_builds.builds(target)
