"""The names of ops as users write them: `silu`, `moe.route`, `gated_delta.gram`, from the public surface."""

import difflib
from collections.abc import Iterable, Sequence
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adjoint.contract.cases import Subject


@cache
def public_functions() -> dict[str, Any]:
    """The public function of every op, by its path below `adjoint`, in the order of the package."""
    import adjoint
    from adjoint.core.plan import published

    paths: dict[Any, str] = {}
    for prefix, module in (("", adjoint), ("moe.", adjoint.moe), ("gated_delta.", adjoint.gated_delta)):
        paths |= {function: f"{prefix}{name}" for name, function in _functions(module) if function not in paths}
    return {paths[function]: function for function in published().values() if function in paths}


def _functions(module: ModuleType) -> list[tuple[str, Any]]:
    lazy = ("audit", "integrations", "models")  # names in `adjoint` that are no ops and are slow to import
    return [(name, getattr(module, name)) for name in module.__all__ if name not in lazy]


def path_of(subject: "Subject") -> str:
    """The path of a subject's op, with the mode: "gated_delta.recompute_w_u[narrow T]"."""
    op, bracket, mode = subject.name.partition("[")
    paths = {function: path for path, function in public_functions().items()}
    return f"{paths.get(subject.function, op)}{bracket}{mode}"


def nearest(name: str, known: Iterable[str]) -> str:
    """A question with the known name that is most similar to a name; empty if none is similar."""
    paths = list(known)
    last = {path.rpartition(".")[2]: path for path in paths} | {path: path for path in paths}
    close = difflib.get_close_matches(name.rpartition(".")[2], last, 1) or difflib.get_close_matches(name, last, 1)
    return f"; did you mean {last[close[0]]}?" if close else ""


def unknown_op(
    command: str, unknown: Sequence[str], known: Sequence[str], what: str = "ops", families: Sequence[str] = ()
) -> str:
    """The sentence that refuses unknown names of ops, with the nearest known name or, if none is near, all names."""
    names, plural = ", ".join(map(repr, unknown)), "s" * (len(unknown) > 1)
    hints = "".join(nearest(name, (*families, *known)) for name in unknown)
    return f"{command}: unknown op{plural} {names}" + (hints or f"; {what} are {', '.join(known)}")
