"""Mutants of norms that compute the same, and why."""

EQUIVALENT = {
    ("silu_and_slope", "128.0 -> 192.0 (1)"): "any bound past the asymptote serves",
    ("silu_and_slope", "128.0 -> 192.0 (2)"): "any bound past the asymptote serves",
    ("*", "column + tl.zeros([1, ROWS, 1], tl.int32) -> column - tl.zeros([1, ROWS, 1], tl.int32)"): (
        "plus or minus 0, which is there for its shape"
    ),
    ("l2_norm_forward", "PIECES * PIECE -> PIECES + PIECE"): "columns that all are inside may be masked, too",
    ("l2_norm_backward", "PIECES * PIECE -> PIECES + PIECE"): "columns that all are inside may be masked, too",
    ("group_sums", "ROWS == 1 -> ROWS != 1"): "two ways to write the same additions",
    ("group_sums", "ROWS == 1 -> ROWS == 2"): "two ways to write the same additions",
    ("sums_of_rows", "PIECES == 1 -> PIECES != 1"): "two ways to write the same additions",
    ("sums_of_rows", "PIECES == 1 -> PIECES == 2"): "two ways to write the same additions",
    ("rms_norm_backward", "0.0 -> 1.0"): "a row past the end is all zeros: any finite factor serves",
}  # fmt: skip
