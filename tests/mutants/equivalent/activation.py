"""Mutants of activations that compute the same, and why."""

EQUIVALENT = {
    ("silu_parts", "x >= 0 -> x > 0"): "both branches agree at 0, where h = 1",
    ("sigmoid_parts", "x >= 0 -> x > 0"): "both branches agree at 0, where h = 1",
    ("forward_value", "x >= 0 -> x > 0"): "both branches agree at 0, where h = 1",
    ("*", "columns - start >= BLOCK -> columns - start > BLOCK"): "a full tile is also right under a mask",
    ("*", "2048.0 -> 3072.0"): "any bound past the asymptote serves",
    ("half_exponential", "0.5 -> 0.75 (3)"): "another integer n, taken out just as exactly",
    ("half_exponential", "exponent * 1.4426950408889634 + 0.5 -> exponent * 1.4426950408889634 - 0.5"): (
        "another integer n, taken out just as exactly"
    ),
    (
        "half_exponential",
        "tl.floor(exponent * 1.4426950408889634 + 0.5) -> tl.ceil(exponent * 1.4426950408889634 + 0.5)",
    ): "another integer n, taken out just as exactly",
}  # fmt: skip
