"""Grouping positions by key on the device: a stable sort whose memory is the plan's own workspace.

This module has the facts that plans need before Triton is imported. `kernels.py` has the kernels and their launches.
"""

MAX_COUNT = 2**30
"""Positions of a sort."""

MAX_GROUPS = 2**31 - 2
"""Groups of a sort."""

DIGIT = 9
"""Bits of a digit."""

LISTED_PASSES = 3
"""The least passes of a sort whose groups are listed: keys of up to 27 bits."""


def passes(groups: int) -> int:
    """Digits of the largest key, which is `groups` itself: the key of positions that are in no group."""
    return max(1, -(-groups.bit_length() // DIGIT))
