"""Pictures of saved results beside peers, as SVG: of speed, and of errors.

They show, for every op that was timed beside another library, the first such workload in every timed direction, with
every contender whose result was right. Nothing else is selected.
"""

import re
from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from adjoint.bench.measurement.run import COMPILED, DETERMINISTIC, EAGER, OK, OURS
from adjoint.bench.peers import PEERS
from adjoint.bench.report.chart import colours
from adjoint.core.errors import ArgumentError

WIDTH, LABEL, BAR, GAP, HEAD = 760, 250, 13, 11, 62
"""In pixels: the widths of the picture and of its labels, the height of a bar, and the space between groups and above
them."""

LONGEST = 4.0
"""The longest bar, as a multiple of ours. Longer bars end there, and say how long they are."""

Row = dict[str, Any]


def rows_beside_peers(content: dict[str, Any]) -> list[list[Row]]:
    """The rows that are drawn: one list for each workload and direction."""
    libraries = {peer.label for peer in PEERS.values()}
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in content["rows"]:
        if row["status"] == OK and row["contender"] != DETERMINISTIC:
            groups.setdefault((row["workload"], row["direction"]), []).append(row)
    beside = {key: rows for key, rows in groups.items() if libraries & {row["contender"] for row in rows}}
    first: dict[str, str] = {}
    for workload, _ in beside:
        first.setdefault(op_of(workload), workload)
    return [rows for (workload, _), rows in beside.items() if workload in first.values()]


def op_of(workload: str) -> str:
    """An op with its mode, which may contain blanks: `rotary[in place]` for "rotary[in place] 32768×(16 + 2)×256"."""
    beginning = re.match(r"[^\s\[]+(\[[^]]*\])?", workload)
    return beginning[0] if beginning else workload


def speed(content: dict[str, Any]) -> str:
    """Draws times over ours. A bar shorter than ours is faster."""

    def bar(row: Row) -> tuple[float, str]:
        ratio = float(row["ratio"])
        return min(ratio, LONGEST) / LONGEST, f"{ratio:.2f}× · {row['microseconds']:,.0f} µs"

    return _picture(content, "Time over ours: shorter is faster, bars end at 4", bar, 1 / LONGEST)


def errors(content: dict[str, Any]) -> str:
    """Draws norm-relative errors against float64."""
    largest = max(float(row["error"]) for rows in rows_beside_peers(content) for row in rows)

    def bar(row: Row) -> tuple[float, str]:
        return float(row["error"]) / largest, f"{1000 * float(row['error']):.2f}e-3"

    return _picture(content, "Error against float64, ‖result − exact‖ / ‖exact‖: shorter is closer", bar, None)


PICTURES: dict[str, Callable[[dict[str, Any]], str]] = {"speed": speed, "errors": errors}


def draw(kind: str, contents: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture of a GPU's saved results."""
    if path.suffix != ".svg":
        raise ArgumentError(f"bench: --plot of saved results draws .svg files, got {path}")
    if not contents:
        raise ArgumentError("bench: there are no saved results of a GPU to draw; run `adjoint bench --save` on one")
    try:
        path.write_text(PICTURES[kind](contents[0]), encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"bench: --plot cannot write {path}: {error}") from error


def _picture(content: dict[str, Any], title: str, bar: Callable[[Row], tuple[float, str]], unit: float | None) -> str:
    groups = rows_beside_peers(content)
    named = sorted({row["contender"] for rows in groups for row in rows}, key=_order)
    shade = colours(named)
    room = WIDTH - LABEL - 125
    parts: list[str] = []
    y = HEAD
    for rows in groups:
        height = BAR * len(rows)
        workload, direction = rows[0]["workload"], rows[0]["direction"]
        op = op_of(workload)
        rest = workload.removeprefix(op).strip()
        parts.append(_text(12, y + 10, f"{op}, {direction}", "font-weight='600'"))
        parts.append(_text(12, y + 24, rest if len(rest) < 42 else f"{rest[:40]}…", _SMALL))
        for number, row in enumerate(sorted(rows, key=lambda row: _order(row["contender"]))):
            share, words = bar(row)
            top = y + number * BAR
            length = max(1.0, share * room)
            colour = shade[row["contender"]]
            parts.append(f"<rect x='{LABEL}' y='{top}' width='{length:.1f}' height='{BAR - 2}' fill='{colour}'/>")
            parts.append(_text(LABEL + length + 5, top + 9.5, words, "font-size='10.5'"))
        y += max(height, 2 * BAR + 2) + GAP
    line = ""
    if unit is not None:
        x = LABEL + unit * room
        line = f"<line x1='{x:.1f}' y1='{HEAD - 4}' x2='{x:.1f}' y2='{y - GAP}' stroke='#222' stroke-dasharray='3 3'/>"
    dates = sorted({content["runs"][row["run"]]["date"] for rows in groups for row in rows})
    foot = f"{content['device']}, bfloat16, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; every result checked."
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y + 22}' width='{WIDTH}' height='{y + 22}' "
        "font-family='system-ui, sans-serif' font-size='12' role='img'>"
        f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='#fff'/>\n"
        f"{_text(12, 22, title, _TITLE)}\n"
        f"{_legend(named, shade)}\n" + "\n".join(parts) + f"\n{line}\n{_text(12, y + 10, foot, _SMALL)}</svg>\n"
    )


_TITLE, _SMALL = "font-size='14' font-weight='600'", "fill='#666' font-size='10.5'"


def _legend(named: Iterable[str], shade: dict[str, str]) -> str:
    parts, x = [], 12.0
    for name in named:
        parts.append(f"<rect x='{x:.0f}' y='34' width='10' height='10' fill='{shade[name]}'/>")
        parts.append(_text(x + 14, 43, name))
        x += 26 + 6.7 * len(name)
    return "".join(parts)


def _text(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' {style}>{escape(words)}</text>"


def _order(contender: str) -> tuple[bool, bool, str]:
    """Ours first, then libraries, then torch."""
    return contender != OURS, contender in (EAGER, COMPILED), contender
