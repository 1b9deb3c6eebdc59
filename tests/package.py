"""The operators of the package, for tests that look at every one."""

from adjoint.core.op.operator import Operator, operators


def package_operators() -> dict[str, Operator]:
    """Those of the package, by name: tests declare operators of their own, and other tests of the process see them."""
    return {x.name: x for x in operators() if x.candidates.__module__.startswith("adjoint.ops.")}
