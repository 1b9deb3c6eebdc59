"""Mutants of embeddings that compute the same, and why."""

EQUIVALENT = {
    # embedding: gather and sums over groups
    ("embedding_gather", "tl.program_id(1) -> tl.program_id(2) (2)"): (
        "every program of a row then records the fault, and the minimum of equal words is the same word"
    ),
    ("load_term", "other=-1 -> other=1"): "outside, the term is 0 whoever has won",
    ("load_term", "other=-1 -> other=-2"): "outside, the term is 0 whoever has won",
    ("find_tile", "begin < end -> begin <= end"): "a tile that begins at its group's end has no places either way",
    ("find_tile", "start < window -> start <= window"): (
        "the first tile of a group that begins a window is summed a second time, into a slot that nobody reads"
    ),
    ("find_tile", "end - start > width -> end - start >= width"): (
        "a group of exactly one tile is summed into a slot that nobody reads"
    ),
    ("find_tile", "end - start -> end + start"): "groups of one tile are summed into slots that nobody reads",
    **{
        ("find_tile", change): "tiles are summed into slots that nobody reads: each slot has one writer"
        for change in (
            "in_group & (end - start > width) -> in_group | (end - start > width)",
            "in_group & (end - start > width) & (begin < end) -> in_group & (end - start > width) | (begin < end)",
            "in_group & (end - start > width) & (begin < end) & tl.where(first, start >= window, start < window) -> "
            "in_group & (end - start > width) & (begin < end) | tl.where(first, start >= window, start < window)",
        )
    },
    ("embedding_sum_tiles", "begin < end -> begin <= end"): "a slot that no tile has gets zeros, and nobody reads it",
    ("embedding_sum_tiles", "first + step + tl.zeros([1], tl.int32) -> first + step - tl.zeros([1], tl.int32)"): (
        "plus or minus 0, which is there for its shape"
    ),
    ("embedding_sum_tiles", "place < end -> place <= end (1)"): (
        "the position after the tile's last is read and not used; there is room for one past the end"
    ),
    ("embedding_sum_partials", "begin < end -> begin <= end"): (
        "a slot that no tile has gets zeros, and nobody reads it"
    ),
    ("embedding_write_groups", "tl.max(present.to(tl.int32)) > 0 -> tl.max(present.to(tl.int32)) >= 0"): (
        "where no group begins, all that follows is masked"
    ),
    ("embedding_write_groups", "place < count -> place <= count (1)"): (
        "the place past the end is there, and is in no group"
    ),
    ("embedding_write_groups", "place < count -> place <= count (2)"): (
        "the place past the end is in no group, whatever lies before it"
    ),
    ("embedding_write_groups", "place < count -> place <= count (3)"): (
        "the position past the end is there, and is not used"
    ),
    ("embedding_write_groups", "other=-1 -> other=-2"): "any number that no segment has",
    ("embedding_write_groups", "length - 1 -> length - 2"): (
        "differs for 32^k + 1 tokens alone: one tile is then added after 32 others, at this level or at the next"
    ),
    ("embedding_write_groups", "first + step < short -> first + step <= short (1)"): (
        "the position after the group's last is read and not used; there is room for one past the end"
    ),
    # bags
    ("embedding_bag_forward", "tl.program_id(1) -> tl.program_id(2) (2)"): (
        "every program of a bag then reports, and counts, the same"
    ),
    ("embedding_bag_forward", "tl.program_id(1) -> tl.program_id(2) (3)"): (
        "every program of a bag then records the fault, and the minimum of equal words is the same word"
    ),
    ("embedding_bag_entries", "middle < high -> middle <= high"): (
        "once the search has ended, the offset at `high` lies past the entry, so nothing moves"
    ),
    ("embedding_bag_entries", "bags - 1 -> bags + 1"): "the bag of an entry that is in none is never used",
    ("embedding_bag_entries", "other=1 -> other=2"): "the factor of an entry that counts for nothing is never used",
    # grouping
    ("group_make_keys", "value < groups -> value <= groups"): (
        "the key of an id that is in no group is the number of groups: that id itself"
    ),
    ("group_make_keys", "tl.num_programs(0) * BLOCK -> tl.num_programs(0) + BLOCK"): (
        "some memory is cleared more than once: a program has more than one block of it only where there are others"
    ),
    ("group_move", "tl.full([BLOCK], 1, tl.int32) -> tl.full([BLOCK], 2, tl.int32) (1)"): (
        "anything but 0 says that a group occurs"
    ),
    ("group_sum_counts", "tl.minimum(first + share, rows) -> tl.maximum(first + share, rows)"): (
        "a program goes on into the rows of others, with the sums that they find"
    ),
    ("group_sum_counts", "bin < bins -> bin <= bins (1)"): "the bin past the last is summed and not stored",
    ("load_neighbours", "other=-1 -> other=-2 (1)"): "any number that is no key",
    ("load_neighbours", "other=-1 -> other=-2 (2)"): "what is in no group is not the last of one, whatever follows",
    ("load_neighbours", "other=-1 -> other=1 (2)"): "what is in no group is not the last of one, whatever follows",
    ("embedding_write_zeros", "other=1 -> other=2"): "neither says that a row does not occur",
    ("embedding_write_groups", "first + step -> first - step (1)"): "positions behind a group are loaded, and not used",
}  # fmt: skip
