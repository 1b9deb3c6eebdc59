"""What several families build on: sorting by id, sums in a fixed order, rows and their tiles, the report of a fault."""
