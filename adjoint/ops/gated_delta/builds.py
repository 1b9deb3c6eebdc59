"""The kernel variants of the family, as they are compiled for a GPU: none yet."""

from collections.abc import Iterator

from adjoint.core.kernels import Variant


def builds(target: str) -> Iterator[tuple[str, Variant]]:
    """Kernel variants, named."""
    yield from ()
