"""Figures that tests hold results to, read from the pages that state them."""

import re
from functools import cache
from pathlib import Path

PAGES = Path(__file__).parent.parent / "docs"

_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
_POWER = re.compile(r"(?:(\d+(?:\.\d+)?)·)?10([⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+)")


@cache
def stated(page: str, words: str) -> float:
    """The first power of ten, with its factor, behind some words of a page, which has them once.

    >>> stated("models", "| logits, float32 |")
    1e-05
    """
    _, found, rest = (PAGES / f"{page}.md").read_text().partition(words)
    assert found and words not in rest, f"{page}.md must have {words!r} once"
    figure = _POWER.search(rest)
    assert figure is not None, f"{page}.md states nothing behind {words!r}"
    factor, power = figure.groups()
    return float(f"{factor or 1}e{power.translate(_DIGITS)}")
