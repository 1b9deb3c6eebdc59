"""The table of verdicts: a line for each op, check, dtype and plan, with the worst that was measured."""

import io

import pytest
from rich.console import Console

from adjoint.verify import Row
from adjoint.verify.report import tables


def result(measured: str, passed: bool = True, **changes: str) -> Row:
    values = {"op": "swiglu[gate_up]", "check": "accuracy", "dtype": "bfloat16", "plan": "eager", "guarantee": "stated"}
    return Row(**(values | changes), measured=measured, passed=passed)


def show(*rows: Row) -> str:
    stream = io.StringIO()
    Console(file=stream, width=160).print(tables.verdicts(rows, "Checks on [cpu]"))
    return stream.getvalue()


def test_a_line_shows_the_worst_of_its_rows() -> None:
    table = show(
        result("y: 0.1 ulp (limit 0.51)"),
        result("dup: 0.5 ulp (limit 0.51)"),
        result("x = inf", check="special values"),
        result("x = 0", check="special values"),
        result("12 bit comparisons", check="repeats"),
        result("y: 0.3 ulp (limit 0.51)"),
    )
    assert "dup: 0.5 ulp (limit 0.51)" in table and "0.1 ulp" not in table and "0.3 ulp" not in table
    assert "2 cases" in table and "12 bit comparisons" in table and "swiglu[gate_up]" in table
    assert "Checks on [cpu]" in table and "FAILED" not in table and table.count("passed") == 3


def test_a_line_counts_its_failures() -> None:
    table = show(result("y: 0.5 ulp (limit 0.51)"), result("y: inf ulp (limit 0.51)", False))
    assert "1 of 2 FAILED" in table and "inf ulp" in table and "passed" not in table
    table = show(result("y: 0.5 ulp (limit 0.51)"), result("raised", False))
    assert "1 of 2 FAILED" in table and "raised" in table and "0.5 ulp" not in table


@pytest.mark.parametrize(
    ("measured", "share"),
    [
        ("y: 0.255 ulp (limit 0.51)", 0.5),
        ("dy: 2e-3 relative (limit 1e-3)", 2.0),
        ("y_0: 0.5 of the bound (limit 1)", 0.5),
        ("y: nan of the bound (limit 1)", float("inf")),
        ("y: inf ulp (limit 0.51)", float("inf")),
        ("12 bit comparisons", None),
        ("gate = inf, up = 2.0", None),
    ],
)
def test_share_of_the_limit(measured: str, share: float | None) -> None:
    assert tables.share_of_limit(measured) == (share if share is None else pytest.approx(share))
