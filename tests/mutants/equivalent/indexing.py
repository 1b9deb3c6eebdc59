"""Mutants of indexing that compute the same, and why."""

EQUIVALENT = {
    ("take_backward_few", "line + element -> line - element"): "what it is taken for is its shape",
    ("take_backward_lines", "rank // _TILE -> rank % _TILE"): (
        "a line has at most 32 tiles of 32, and where there is more than one, an index has 32 entries"
    ),
    ("take_backward_lines", "rank // _TILE + 1 -> rank // _TILE + 2"): "past its last tile an index finds others",
    ("take_backward_lines", "other=-1 -> other=-2 (1)"): "any number below 0",
    ("take_backward_lines", "other=-1 -> other=1 (1)"): (
        "a key of element 0, whose tiles begin with the line, and none of them looks past its end"
    ),
    **{
        ("take_backward_lines", change): "what is not loaded is not near, and does not count"
        for change in ("other=-1 -> other=-2 (2)", "other=-1 -> other=1 (2)")
    },
    ("take_keys", "tl.where(valid, line * length + chosen, -1) -> tl.where(valid, line * length + chosen, -2)"): (
        "any number that is no element"
    ),
    (
        "take_sum_partials",
        "(1 << bits) - 1 -> (1 << bits) - 2",
    ): "a sum is left one place after a tile too; nobody reads it",
    ("load_group", "place < count -> place <= count"): "the place past the end is there, and is in no group",
    **{
        ("take_sum_tiles", change): "an element with one tile leaves its sum too, which nobody reads"
        for change in ("end - start > _TILE -> end - start >= _TILE", "end - start -> end + start")
    },
    ("take_write_sums", "tl.static_range(5) -> tl.static_range(6)"): "no element has entries for a sixth level",
    **{
        ("take_write_sums", change): "an element past the last is not written"
        for change in ("other=-1 -> other=-2", "other=-1 -> other=1")
    },
    **{
        ("has_entries", change): "what is not loaded does not count"
        for change in ("other=-1 -> other=-2", "other=-1 -> other=1")
    },
    ("has_entries", "start < count -> start <= count"): "the key past the last is above every element",
}  # fmt: skip
