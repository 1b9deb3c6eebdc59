"""Mutants of convolutions that compute the same, and why."""

EQUIVALENT = {
    ("differentiate_block", "row < BEFORE -> row <= BEFORE"): "a token of the block itself is always its own",
    ("conv_backward", "token + 1 -> token - 1"): "matters to bounds out of order alone, which end in an error here",
    ("conv_backward", "token % ROWS == 0 -> token % ROWS != 0 (2)"): "any tokens may be computed as the rest is",
    ("conv_backward", "token % ROWS -> token // ROWS (2)"): "any tokens may be computed as the rest is",
    (
        "conv_backward",
        "tl.where(token % ROWS == 0, (stop - token) // ROWS, 0) -> "
        "tl.where(token % ROWS == 0, 0, (stop - token) // ROWS)",
    ): "any tokens may be computed as the rest is",
    ("conv_backward", "place >= 0 -> place > 0 (1)"): "any tokens may be computed as the rest is",
    ("conv_step", "tl.where(wrong, -1, index) -> tl.where(wrong, -2, index)"): "any place below 0 is skipped",
    ("conv_step", "other=-1 -> other=1"): "of a row past the last, nothing is read or written",
    ("conv_step_words", "tl.where(wrong, -1, index) -> tl.where(wrong, -2, index)"): "any place below 0 is skipped",
    ("conv_step_words", "other=-1 -> other=1"): "of a row past the last, nothing is read or written",
    (
        "conv_step_words",
        "tl.where(row < batch, place, -1) -> tl.where(row < batch, place, -2)",
    ): "any place below 0 is skipped",
    ("conv_step_words", "BEFORE > 0 -> BEFORE >= 0 (1)"): "of states without columns, nothing is loaded",
    ("*", "COUNT < 2 ** LEVELS -> COUNT <= 2 ** LEVELS"): "where every place has a word, they are in order as they are",
    ("together", "2 ** LEVELS -> 3 ** LEVELS (3)"): "where every place has a word, they are in order as they are",
    ("apart", "2 ** LEVELS -> 3 ** LEVELS (2)"): "where every place has a word, they are in order as they are",
    ("apart", "COUNT - 1 -> COUNT + 1"): "what stands past the last word of a pair is not used",
    ("side_by_side", "2 ** LEVELS - len(columns) -> 2 ** LEVELS + len(columns)"): "columns past the last are not used",
    ("side_by_side", "2 ** LEVELS -> 3 ** LEVELS (1)"): "columns past the last are not used",
    ("pool_place", "tl.maximum(place, -1) -> tl.maximum(place, -2)"): "any place below 0 is skipped",
    (
        "pool_place",
        "tl.where(place < states, tl.maximum(place, -1), -1) -> tl.where(place < states, tl.maximum(place, -1), -2)",
    ): "any place below 0 is skipped",
    (
        "conv_places",
        "low + high + 1 -> low + high + 2",
    ): "another middle, of a bound that is there, and the levels suffice",
    ("conv_backward_states", "row < length -> row <= length (3)"): "dz of a token past the end is not used",
    (
        "*",
        "token - sequence_begin >= BEFORE -> token - sequence_begin > BEFORE",
    ): "a block without an edge may be computed as one that has some",
    (
        "*",
        "token + ROWS <= sequence_end -> token + ROWS < sequence_end",
    ): "a block without an edge may be computed as one that has some",
    ("conv_forward", "WIDTH - 1 -> WIDTH + 1"): "a block without an edge may be computed as one that has some",
    ("in_part", "tl.full(column.shape, 1, tl.int1) -> tl.full(column.shape, 2, tl.int1)"): "true, as any number but 0",
    (
        "conv_places",
        "at + PLACE_SEQUENCE * rows -> at - PLACE_SEQUENCE * rows",
    ): "the sequences are the first row of places: plus or minus 0",
    (
        "conv_places",
        "tl.where(sequences > 0, low, -1) -> tl.where(sequences > 0, low, -2)",
    ): "any sequence below 0 is none",
    (
        "conv_forward",
        "tl.cdiv(tokens, ROWS) - stretch * BLOCKS -> tl.cdiv(tokens, ROWS) + stretch * BLOCKS",
    ): "blocks past the last token, of which nothing is written",
    (
        "conv_forward",
        "tl.minimum(BLOCKS, tl.cdiv(tokens, ROWS) - stretch * BLOCKS) -> "
        "tl.maximum(BLOCKS, tl.cdiv(tokens, ROWS) - stretch * BLOCKS)",
    ): "the blocks of other programs once more, with the same numbers, and blocks past the last token",
    (
        "conv_backward",
        "tl.maximum(tl.minimum(sequence_end, last), token + 1) -> "
        "tl.minimum(tl.minimum(sequence_end, last), token + 1)",
    ): "one token after the other, which adds in the same order",
    ("conv_backward", "stop - token -> stop + token (3)"): "tokens past the last of this part, which add nothing",
    (
        "side_by_side",
        "number + 2 ** (LEVELS - 1 - level) -> number - 2 ** (LEVELS - 1 - level)",
    ): "of twice as many columns the same one, counted from the end",
}  # fmt: skip
