"""Saved or fresh rows as a bar chart, where matplotlib is installed."""

from pathlib import Path

from adjoint.bench.run import Result
from adjoint.core.errors import Unsupported


def plot(result: Result, name: str, path: Path) -> None:
    """Draws the speed of every contender that has one, in groups of workload and direction."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found]
    except ImportError as error:
        raise Unsupported("bench: --plot needs matplotlib; pip install matplotlib") from error

    groups = list(dict.fromkeys((row.workload, row.direction) for row in result.rows))
    contenders = list(dict.fromkeys(row.contender for row in result.rows))
    figure = Figure(figsize=(10, 0.8 + 0.6 * len(groups)), layout="constrained")
    axes = figure.add_subplot()
    height = 0.8 / len(contenders)
    for index, contender in enumerate(contenders):
        bars = [
            (groups.index((row.workload, row.direction)) + index * height, row.gigabytes_per_second)
            for row in result.rows
            if row.contender == contender and row.gigabytes_per_second is not None
        ]
        axes.barh([position for position, _ in bars], [speed for _, speed in bars], height, label=contender)
    axes.axvline(result.ceiling, linestyle="--", color="gray", label="copy")
    axes.set_yticks([index + 0.4 - height / 2 for index in range(len(groups))], [" ".join(group) for group in groups])
    axes.invert_yaxis()
    axes.set_xlabel(f"GB/s on {name}")
    axes.legend()
    figure.savefig(path)
