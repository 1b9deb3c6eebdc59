"""Mutants of losses that compute the same, and why."""

EQUIVALENT = {
    ("loss_total", "loss + tl.arange(0, 1) -> loss - tl.arange(0, 1)"): "plus or minus 0, which is there for its shape",
    ("cap", "x < 0 -> x <= 0"): "of a logit of 0, whose zero has a sign that no sum, difference or exponential keeps",
    ("add_columns", "0.0 -> 1.0 (2)"): "of columns that all are −∞: e^(−∞) is 0 after any finite number",
    ("loss_rows", "whole * STRIDE < classes -> whole * STRIDE <= classes (1)"): "no columns, which add nothing",
    (
        "loss_rows",
        "whole * STRIDE < classes -> whole * STRIDE <= classes (2)",
    ): "no columns, of which nothing is written",
    ("loss_rows", "0.0 -> 1.0 (4)"): "of a row that is all −∞: L = −∞ and the loss is NaN after any finite number",
    ("loss_rows", "0.0 -> 1.0 (5)"): "the sum of logits, which nobody reads without smoothing",
    ("loss_gradient", "start + BLOCK <= classes -> start + BLOCK < classes"): "a full block is also right under a mask",
    (
        "loss_gradient",
        "store_slopes(gradient, logits, bias, start, classes, softcap, size, target, of_p, of_label, of_all, HAS_BIAS, "
        "SOFTCAP, True, BLOCK, 1) -> store_slopes(gradient, logits, bias, start, classes, softcap, size, target, of_p, "
        "of_label, of_all, HAS_BIAS, SOFTCAP, True, BLOCK, 2)",
    ): "the second block of columns is past the last: nothing of it is read or written",
    ("loss_tile_rows", "other=-1 -> other=1"): "of a row past the last, nothing is written",
    ("loss_tile_rows", "other=-1 -> other=-2"): "of a row past the last, nothing is written",
    ("loss_tile_rows", "0.0 -> 1.0 (3)"): "of columns that all are −∞: e^(−∞) is 0 after any finite number",
    (
        "loss_tile_rows",
        "row < rows -> row <= rows (5)",
    ): "a row past the last has no label, so nothing of it is written",
    ("loss_combine", "0.0 -> 1.0 (1)"): "of a row past the last, nothing is written",
    ("loss_combine", "0.0 -> 1.0 (2)"): "of segments that all are −∞: e^(−∞) is 0 after any finite number",
    ("loss_combine", "1.0 -> 1.5"): "of a row past the last, nothing is written",
    ("loss_combine", "0.0 -> 1.0 (3)"): "of a row past the last, nothing is written",
    ("loss_combine", "other=-1 -> other=1"): "of a row past the last, nothing is written",
    ("loss_combine", "other=-1 -> other=-2"): "of a row past the last, nothing is written",
    ("loss_combine", "0.0 -> 1.0 (4)"): "of a row that is all −∞: L = −∞ and the loss is NaN after any finite number",
    ("loss_combine", "inside & counted -> inside | counted"): "what is read of a row without a label is not used",
    ("loss_combine", "0.0 -> 1.0 (5)"): "of a row without a label, or past the last, it is not used",
    ("loss_weight_product", "whole < rows -> whole <= rows"): "a step of zeros more, which changes no number",
    ("loss_column_sums", "0.0 -> 1.0"): "of a column past the last, nothing is written",
    **{
        ("loss_scale", change): "past the last token nothing counts, and a scale of gradients that all are 0 is any"
        for change in ("0.0 -> 1.0 (1)", "0.0 -> 1.0 (2)", "other=-1 -> other=-2", "other=-1 -> other=1")
    },
    ("loss_scale", "1.0 -> 1.5"): "every upstream gradient is 0, and so is what it is divided by any number",
    ("loss_round", "start + BLOCK <= elements -> start + BLOCK < elements"): "a full block is also right under a mask",
}  # fmt: skip
