"""The loss curve: in the terminal as lines of characters, and as a PNG that is written without a package."""

import itertools
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

Points = Sequence[tuple[int, float]]

_BLOCKS = " ▁▂▃▄▅▆▇█"

_DIGITS = {
    "0": "755557", "1": "262227", "2": "717447", "3": "717117", "4": "557111", "5": "747117", "6": "744757",
    "7": "711222", "8": "757557", "9": "757117", ".": "000002", " ": "000000",
}  # fmt: skip
"""The pixels of each character: one digit for each row of three pixels."""


def smooth(points: Points, width: int) -> list[float]:
    """The means over `width` equal parts of a curve, or its own points if there are fewer."""
    values = [value for _, value in points]
    width = min(width, len(values))
    edges = [index * len(values) // width for index in range(width + 1)] if width else []
    return [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


def in_terminal(points: Points, width: int = 60, height: int = 8) -> str:
    """The curve as lines of block characters, with its highest and lowest loss beside it.

    >>> print(in_terminal([(1, 2.0), (2, 1.0), (3, 0.0)], 3, 2))
      2.00 █▁
      0.00 ██▁
           step 1 to 3
    """
    values = smooth(points, width)
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    eighths = [1 + round((value - low) * scale) for value in values]
    lines = []
    for row in reversed(range(height)):
        label = f"{high:6.2f}" if row == height - 1 else f"{low:6.2f}" if row == 0 else " " * 6
        blocks = "".join(_BLOCKS[max(0, min(8, level - 8 * row))] for level in eighths)
        lines.append(f"{label} {blocks}".rstrip())
    return "\n".join([*lines, f"{'':6} step {points[0][0]} to {points[-1][0]}"])


class _Picture:
    """Grey pixels, 0 for black."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self.rows = [bytearray(b"\xff" * width) for _ in range(height)]

    def dot(self, x: int, y: int, shade: int) -> None:
        if 0 <= x < self.width and 0 <= y < self.height:
            self.rows[y][x] = min(self.rows[y][x], shade)

    def line(self, x0: float, y0: float, x1: float, y1: float, shade: int, thick: int = 1) -> None:
        count = max(1, round(max(abs(x1 - x0), abs(y1 - y0))))
        for index in range(count + 1):
            x, y = x0 + (x1 - x0) * index / count, y0 + (y1 - y0) * index / count
            for dx in range(thick):
                for dy in range(thick):
                    self.dot(round(x) + dx, round(y) + dy, shade)

    def text(self, x: int, y: int, text: str, size: int = 2) -> None:
        for place, character in enumerate(text):
            for row, bits in enumerate(_DIGITS.get(character, _DIGITS[" "])):
                for column in range(3):
                    if int(bits) >> (2 - column) & 1:
                        for dx in range(size):
                            for dy in range(size):
                                self.dot(x + (4 * place + column) * size + dx, y + row * size + dy, 60)

    def png(self) -> bytes:
        def chunk(kind: bytes, data: bytes) -> bytes:
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 0, 0, 0, 0)
        data = zlib.compress(b"".join(b"\0" + bytes(row) for row in self.rows), 9)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def write_png(path: Path, points: Points, width: int = 900, height: int = 480) -> None:
    """Draws every step's loss in grey, and its mean over a hundredth of the run in black.

    Steps are written below the curve, and losses to its left.
    """
    picture = _Picture(width, height)
    left, right, top, bottom = 80, width - 20, 20, height - 40
    losses = [value for _, value in points]
    low, high = (min(losses), max(losses)) if losses else (0.0, 1.0)
    high = high if high > low else low + 1
    first, last = (points[0][0], points[-1][0]) if points else (0, 1)

    def place(step: float, loss: float) -> tuple[float, float]:
        x = left + (step - first) / max(1, last - first) * (right - left)
        return x, bottom - (loss - low) / (high - low) * (bottom - top)

    for part in range(6):
        loss, step = low + (high - low) * part / 5, first + (last - first) * part / 5
        (_, y), (x, _) = place(first, loss), place(step, low)
        picture.line(left, y, right, y, 225)
        picture.line(x, top, x, bottom, 225)
        picture.text(8, round(y) - 6, f"{loss:6.2f}")
        picture.text(round(x) - 4 * len(str(round(step))), bottom + 14, str(round(step)))
    means = smooth(points, 100)
    thin = [place(step, loss) for step, loss in points]
    thick = [place(first + (last - first) * (i + 0.5) / len(means), mean) for i, mean in enumerate(means)]
    for curve, shade, width_ in ((thin, 190, 1), (thick, 0, 2)):
        for (x0, y0), (x1, y1) in itertools.pairwise(curve):
            picture.line(x0, y0, x1, y1, shade, width_)
    path.write_bytes(picture.png())
