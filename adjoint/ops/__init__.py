"""The operations, one folder per family.

Every family has the same rooms: the contract (one module per op), `reference`, `eager`, `kernels`,
`plans` and `cases`. A family listed here is verified, benchmarked and documented with the others.
"""

FAMILIES = ("activation", "embedding", "indexing", "moe", "gated_delta")
"""The families, by folder name."""
