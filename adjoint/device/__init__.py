"""Triton functions that several ops are made of: sorting by id, sums in a fixed order, the report of a fault."""
