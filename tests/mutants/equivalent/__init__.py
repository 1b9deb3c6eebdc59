"""Mutants that compute the same, and why, by family. See `tests.mutants.trees`."""

from tests.mutants.equivalent import activation, conv, embedding, gated_delta, indexing, loss, moe, norm

_FAMILIES = (activation, conv, embedding, gated_delta, indexing, loss, moe, norm)
EQUIVALENT = {change: reason for family in _FAMILIES for change, reason in family.EQUIVALENT.items()}
assert len(EQUIVALENT) == sum(len(family.EQUIVALENT) for family in _FAMILIES), "one mutant is listed in two files"
