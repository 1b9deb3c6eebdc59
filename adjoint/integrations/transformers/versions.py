"""Which versions of transformers the integration knows."""

from adjoint.core.errors import Unsupported


def require(oldest: tuple[int, int], newest: tuple[int, int] | None = None) -> None:
    """Raises Unsupported, with the version, if transformers is older than the oldest or newer than the newest one."""
    import transformers

    release = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if release < oldest or (newest is not None and release > newest):
        span = f"{_dotted(oldest)} or newer" if newest is None else f"{_dotted(oldest)} to {_dotted(newest)}"
        raise Unsupported(
            f"adjoint.integrations.transformers: needs transformers {span}, this is {transformers.__version__}"
        )


def _dotted(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
