"""The output of commands: text as wide as the terminal, data as JSON, and refusals."""

import codecs
import json
import math
import os
import sys
from typing import Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text

_WIDE = 160  # the width if nothing states one: long lines in a log are better than wrapped ones


def make_console(*, stderr: bool = False) -> Console:
    return Console(stderr=stderr, width=None if has_width(stderr=stderr) else _WIDE)


def has_width(*, stderr: bool = False) -> bool:
    """Whether a terminal or the variable COLUMNS states the width of lines."""
    return (sys.stderr if stderr else sys.stdout).isatty() or "COLUMNS" in os.environ


def print_json(data: Any) -> None:
    has_all = codecs.lookup(sys.stdout.encoding or "ascii").name.startswith("utf")  # every character
    print(json.dumps(_in_json(data), indent=2, ensure_ascii=not has_all))


def _in_json(value: Any) -> Any:
    """A value as JSON types. Numbers that JSON does not have, such as infinity, become texts."""
    if isinstance(value, dict):
        return {name: _in_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_in_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def refuse(message: object) -> NoReturn:
    make_console(stderr=True).print(Text(str(message), style="red"), soft_wrap=True)
    raise typer.Exit(2)
