"""`make test` is an ordinary process and one with the interpreter, which runs tests marked `kernels` alone.

A test that is skipped wherever Triton does not interpret its kernels, and that has not this mark, runs in neither.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

IN_THE_INTERPRETER = "skipif(not kernels.interpreting()"
FILES = sorted(Path(__file__).parent.rglob("test_*.py"))


def in_neither_half(source: str) -> Iterator[str]:
    """The tests of a file that neither process runs."""
    tree = ast.parse(source)
    named = {
        target.id: ast.unparse(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
            marks = [ast.unparse(mark) for mark in function.decorator_list]
            marks = [named.get("pytestmark", ""), *(named.get(mark, mark) for mark in marks)]
            if any(IN_THE_INTERPRETER in mark for mark in marks) and not any("mark.kernels" in mark for mark in marks):
                yield function.name


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(Path(__file__).parent)))
def test_every_test_runs_in_one_of_the_two(file: Path) -> None:
    assert list(in_neither_half(file.read_text(encoding="utf-8"))) == []


def test_one_that_runs_in_neither_is_found() -> None:
    skipped = "mark = pytest.mark.skipif(not kernels.interpreting(), reason='')\n"
    body = "def test_x(): ...\n"
    assert list(in_neither_half(f"{skipped}@mark\n{body}")) == ["test_x"]
    assert list(in_neither_half(f"{skipped.replace('mark =', 'pytestmark =')}{body}")) == ["test_x"]
    assert list(in_neither_half(f"{skipped}@pytest.mark.kernels\n@mark\n{body}")) == []
    assert list(in_neither_half(f"{skipped}{body}")) == []
