"""The chart of `adjoint bench --plot`."""

import colorsys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.bench.measurement.run import COMPILED, DETERMINISTIC, EAGER, OURS, Result
from adjoint.bench.peers import PEERS
from adjoint.core.errors import Unsupported

_OWN = {OURS: "#0072b2", EAGER: "#555555", COMPILED: "#a0a0a0", DETERMINISTIC: "#d0d0d0"}
"""Ours is blue and torch is grey. Peers have the other hues."""


def colours(contenders: Sequence[str]) -> dict[str, str]:
    """A different colour for each contender. A peer has the same colour in every chart."""
    peers = sorted({peer.label for peer in PEERS.values()})
    others = [contender for contender in contenders if contender not in _OWN and contender not in peers]
    hues = [*peers, *dict.fromkeys(others)]
    chosen = dict(_OWN)
    for index, label in enumerate(hues):
        # Neighbours in the list are far apart on the colour wheel, every second one is darker, and none is our blue.
        place = (0.74 + 0.72 * (index * 0.381966 % 1.0)) % 1.0
        red, green, blue = colorsys.hls_to_rgb(place, (0.55, 0.38)[index % 2], 0.7)
        chosen[label] = f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"
    return {contender: chosen[contender] for contender in contenders}


def require_drawing(path: Path) -> Any:
    """matplotlib's `Figure`; raises `Unsupported` if nothing can be drawn into the file. It is called before a run."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase  # type: ignore[import-not-found]
        from matplotlib.figure import Figure  # type: ignore[import-not-found]
    except ImportError as error:
        raise Unsupported("bench: --plot needs matplotlib; pip install matplotlib") from error
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise Unsupported(f"bench: --plot draws {', '.join(sorted(known))} files, got {path}")
    if not path.absolute().parent.is_dir():
        raise Unsupported(f"bench: --plot cannot write {path}: there is no folder {path.absolute().parent}")
    return Figure


def plot(result: Result, name: str, path: Path) -> None:
    """Draws a bar for the speed of every contender that has a time, grouped by workload and direction."""
    figure_of = require_drawing(path)
    timed = [row for row in result.rows if row.gigabytes_per_second is not None]
    groups = list(dict.fromkeys((row.workload, row.direction) for row in timed))
    contenders = list(dict.fromkeys(row.contender for row in timed))
    tall = max(0.2 * len(contenders) + 0.8, (0.1 * len(contenders) + 0.2) * len(groups) + 0.8)
    figure = figure_of(figsize=(10, tall), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / max(1, len(contenders))
    for index, (contender, colour) in enumerate(colours(contenders).items()):
        bars = [
            (groups.index((row.workload, row.direction)) + index * height, row.gigabytes_per_second)
            for row in timed
            if row.contender == contender
        ]
        positions, speeds = zip(*bars, strict=True)
        axes.barh(positions, speeds, height, label=contender, color=colour)
    axes.axvline(result.ceiling, linestyle="--", color="black", label="copy")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(groups))], [" ".join(group) for group in groups])
    axes.invert_yaxis()
    axes.set_xlabel(f"GB/s on {name}")
    figure.legend(loc="outside right upper")
    figure.savefig(path)
