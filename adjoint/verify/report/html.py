"""Pages of HTML that need nothing else: no script, no font, no network."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_STYLE = """
:root { color-scheme: light dark; --edge: #8884; --good: #0a7a3c; --bad: #c0182b; }
@media (prefers-color-scheme: dark) { :root { --good: #4cc38a; --bad: #ff6b6b; } }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; }
.table { overflow-x: auto; margin: .5rem 0 1rem; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--edge); }
th { font-weight: 600; } td { max-width: 26rem; min-width: 3rem; overflow-wrap: break-word; }
td:first-child { font-weight: 500; white-space: nowrap; max-width: none; }
@media (max-width: 40rem) { td:first-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; } }
.long td:first-child { white-space: normal; overflow-wrap: anywhere; font-weight: 400; }
details { border-top: 1px solid var(--edge); padding: .6rem 0; } summary { cursor: pointer; font-weight: 600; }
.verdict { font-size: 1.15rem; font-weight: 600; }
.passed { color: var(--good); } .failed, .unfinished { color: var(--bad); }
footer { margin-top: 2rem; font-size: .875rem; opacity: .75; }
"""


def page(title: str, body: str) -> str:
    """A whole page."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>{body}"
        "<footer>Made by adjoint, whose plans state what they promise and whose checks measure it here.</footer>"
        "</body></html>\n"
    )


def table(head_of: Sequence[str], rows: Iterable[Sequence[Any]], *, head: bool = True) -> str:
    """A table that scrolls by itself if the page is narrow. The words of a verdict have a colour."""
    titles = f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in head_of)}</tr>" if head else ""
    lines = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    long = " long" if len(head_of) == 1 else ""
    return f'<div class="table{long}"><table>{titles}\n{lines}</table></div>'


def _cell(value: Any) -> str:
    text = str(value)
    kind = ' class="failed"' if "FAILED" in text else ' class="passed"' if text.endswith("passed") else ""
    return f"<td{kind}>{escape(text)}</td>"


def details(title: str, body: str) -> str:
    """A section that a reader can open."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
