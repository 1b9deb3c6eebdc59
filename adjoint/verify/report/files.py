"""Where reports are written: data and a page beside it, under one name."""

from pathlib import Path

from adjoint.core.errors import ArgumentError


def paths(path: Path) -> tuple[Path, Path]:
    """The paths of the data and of the page, from either of them or from their common beginning."""
    stem = path.with_suffix("") if path.suffix in (".json", ".html") else path
    return Path(f"{stem}.json"), Path(f"{stem}.html")


def require_writable(option: str, path: Path) -> None:
    """Raises if one of the files cannot be written, so that this is known before the work. Existing files stay.

    Args:
        option: the option in which users pass the path, such as "verify: --certificate".
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
