"""Where reports are written: data and a page beside it, under one name."""

from pathlib import Path

from adjoint.core.errors import ArgumentError


def paths(path: Path) -> tuple[Path, Path]:
    """The files of data and of the page, from either of them or from what both begin with."""
    stem = path.with_suffix("") if path.suffix in (".json", ".html") else path
    return Path(f"{stem}.json"), Path(f"{stem}.html")


def require_writable(option: str, path: Path) -> None:
    """Raises where one of the files cannot be written: before the work, not after it. What is there stays as it is.

    Args:
        option: what users name the path by, such as "verify: --certificate".
    """
    if not path.parent.is_dir():
        raise ArgumentError(f"{option} {path} cannot be written: there is no folder {path.parent}")
    for file in paths(path):
        is_new = not file.exists()
        try:
            file.open("a").close()
        except OSError as error:
            raise ArgumentError(f"{option} {file} cannot be written: {error.strerror}") from error
        if is_new:
            file.unlink()
