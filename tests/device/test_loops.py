"""Loops of kernels that Triton compiles wrongly, without a word.

Triton finds what a loop carries by compiling its body once, with every name as it is before the loop. A name that is
another's before the loop, and is given the same one's value in it, looks as if it stayed what it is:

    before = stage
    for _ in range(count):
        use(before)
        before = stage          # not carried: `before` has its first value for ever
        stage = stage + 1

No interpreter, nor the model of Gluon, has that mistake.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import adjoint

PACKAGE = Path(adjoint.__file__).parent
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if "jit\ndef " in path.read_text(encoding="utf-8")]


def _copies(statements: list[ast.stmt]) -> dict[str, str]:
    """Names that statements leave as another name's value."""
    copies: dict[str, str] = {}
    for statement in statements:
        for name in _assigned([statement]):
            copies.pop(name, None)
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
            copies |= {target.id: statement.value.id for target in statement.targets if isinstance(target, ast.Name)}
    return copies


def _assigned(statements: list[ast.stmt]) -> set[str]:
    nodes = (node for statement in statements for node in ast.walk(statement))
    return {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def frozen_names(source: str) -> Iterator[str]:
    """Names that a loop gives another name's value, which they had before it too, while the other changes."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for place, loop in enumerate(function.body):
            if isinstance(loop, ast.For | ast.While):
                before, within, changed = _copies(function.body[:place]), _copies(loop.body), _assigned(loop.body)
                for name, other in within.items():
                    if before.get(name) == other and other in changed:
                        yield f"{function.name}: {name} = {other}"


def test_a_frozen_name_is_noticed() -> None:
    source = "def f(count, stage):\n    before = stage\n    for _ in range(count):\n        use(before)\n"
    assert list(frozen_names(source + "        before = stage\n        stage = stage + 1\n")) == ["f: before = stage"]
    assert not list(frozen_names(source + "        before = stage\n"))
    assert not list(frozen_names(source + "        before = stage + 0\n        stage = stage + 1\n"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_loop_of_a_kernel_has_one(path: Path) -> None:
    assert not list(frozen_names(path.read_text(encoding="utf-8")))
