"""Errors that were recorded on an op's cases, in a reviewed JSON file beside them: a regression is noticed there.

    where it ran → subject → plan → dtype → case → output → figure

Where it ran is the name of a GPU, "cpu", or "interpreter" for kernels in Triton's. A figure is `MARGIN` times the
norm-relative error that was measured, so an error that doubles is past it. A promise is for users and every input; a
figure is for one case, and promises nothing. `adjoint verify OP --record FILE` writes them.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

MARGIN = 1.5
"""Figures over the errors that were measured: what other libraries and drivers change is less."""

SMALLEST = MARGIN * 2.0**-24
"""The smallest figure: an error below the unit roundoff of float32 says which library multiplied, and no more."""

FEWEST = 256
"""Numbers of a result that has a figure: the error of fewer is luck."""

Figures = dict[str, Any]
"""Figures below their keys, in the order of `of`."""


@cache
def load(path: Path) -> Figures:
    """The figures of a file; none where there is no such file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def of(figures: Figures, *keys: str) -> Mapping[str, float]:
    """The figures of a case by output: empty where nothing was recorded."""
    for key in keys:
        figures = figures.get(key, {})
    return figures


def put(figures: Figures, keys: tuple[str, ...], errors: Mapping[str, float]) -> None:
    """Replaces the figures of a case by those of new errors."""
    *outer, last = keys
    for key in outer:
        figures = figures.setdefault(key, {})
    figures[last] = {name: float(f"{max(MARGIN * error, SMALLEST):.2g}") for name, error in errors.items()}


def save(figures: Figures, path: Path) -> None:
    """Writes figures to a file, a case on a line."""

    def lines(value: Any, depth: int) -> str:
        if depth == 5 or not value:
            return json.dumps(value, ensure_ascii=False)
        indent = "  " * (depth + 1)
        items = [f"{indent}{json.dumps(key, ensure_ascii=False)}: {lines(value[key], depth + 1)}" for key in value]
        return "{\n" + ",\n".join(items) + "\n" + "  " * depth + "}"

    path.write_text(lines(figures, 0) + "\n", encoding="utf-8")
