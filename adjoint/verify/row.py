"""One verdict."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """What one check found for one op, dtype and plan.

    Attributes:
        guarantee: the promise that was checked, in words.
        measured: what was found: an error beside its limit, or a count of comparisons.
        detail: what went wrong, when something did.
    """

    op: str
    check: str
    dtype: str
    plan: str
    guarantee: str
    measured: str
    passed: bool
    detail: str = ""
