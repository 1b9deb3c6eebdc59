"""What the plans of the embeddings share: the order of their sums, and what their kernels can count."""

from adjoint.core.problem import Problem
from adjoint.device import grouping

TILE_BITS = 5
TILE = 1 << TILE_BITS
"""The number of tokens in a tile, and of tiles in a tile of the next level. It is part of every sum's bits."""

SEQUENTIAL = 2**30
"""The tile of the plans without tiles: longer than any group."""


def tile_in_words(tile: int) -> int | str:
    """The tile in a SKU."""
    return "none" if tile == SEQUENTIAL else tile


def order_in_words(tile: int) -> str:
    if tile == SEQUENTIAL:
        return "every row's tokens are added in their order"
    return f"a row's tokens are added in their order within tiles of {tile}, tiles in a fixed tree of their number"


def refuse_to_group(problem: Problem) -> str:
    """Why kernels cannot group ids by row; empty when they can."""
    count, rows = problem.sizes[:2]
    if count > grouping.MAX_COUNT:
        return f"groups up to {grouping.MAX_COUNT} ids, these are {count}"
    if rows > grouping.MAX_GROUPS:
        return f"groups by at most {grouping.MAX_GROUPS} rows, these are {rows}"
    return ""
