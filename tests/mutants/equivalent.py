"""Mutants that compute the same, and why. See `tests.mutants.trees`."""

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
    # norm
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
    # conv
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
    ("group_count_digits", "value < groups -> value <= groups"): (
        "the key of an id that is in no group is the number of groups: that id itself"
    ),
    ("group_sum_counts", "tl.full([size], -1, tl.int32) -> tl.full([size], -2, tl.int32)"): (
        "anything below 0 says that a group is empty"
    ),
    ("group_sum_counts", "tl.minimum(first + share, rows) -> tl.maximum(first + share, rows)"): (
        "a program goes on into the rows of others, with the sums that they find"
    ),
    ("group_sum_counts", "bin < bins -> bin <= bins (1)"): "the bin past the last is summed and not stored",
    ("group_sum_counts", "tl.num_programs(1) -> tl.num_programs(2)"): "the same memory is filled more than once",
    ("load_neighbours", "other=-1 -> other=-2 (1)"): "any number that is no key",
    ("load_neighbours", "other=-1 -> other=-2 (2)"): "what is in no group is not the last of one, whatever follows",
    ("load_neighbours", "other=-1 -> other=1 (2)"): "what is in no group is not the last of one, whatever follows",
    # moe: layout, dispatch and combine
    ("load_expert", "other=-1 -> other=-2"): "any number that is no expert",
    (
        "moe_place_entries",
        "bin < experts -> bin <= experts",
    ): "the offset after the last expert's is written next, as it is",
    ("moe_scatter", "other=-1 -> other=-2"): "any number that is no row",
    ("moe_scatter", "row < last -> row <= last"): "the first row of no expert is written, and then zeroed",
    ("moe_sum", "other=-1 -> other=-2"): "any number that is no row",
    ("moe_sum", "tl.program_id(1) -> tl.program_id(2) (2)"): (
        "every program of a row then records the fault, and the minimum of equal words is the same word"
    ),
    ("moe_dots", "other=-1 -> other=-2"): "any number that is no row",
    ("sum_neighbours", "tl.static_range(8) -> tl.static_range(9)"): "a row of one value has no neighbours to add",
    ("sum_neighbours", "values.shape[1] > 1 -> values.shape[1] >= 1"): (
        "256 columns have all eight levels; the experts' kernels, which add fewer, have the function as it is"
    ),
    # indexing
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
    ("take_write_sums", "other=-1 -> other=-2 (2)"): "fewer entries than none are none",
    # loss
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
    ("loss_scale", "1.0 -> 1.5"): "every upstream gradient is 0, and so is what it is divided by any number",
    ("loss_round", "start + BLOCK <= elements -> start + BLOCK < elements"): "a full block is also right under a mask",
    # moe: the router and its losses
    **{
        (function, change): "the mask of a whole slice is true of all of it"
        for function, change in (
            ("load_slices", "s * LANES + LANES <= EXPERTS -> s * LANES + LANES < EXPERTS"),
            ("logit_keys", "s * LANES + LANES > EXPERTS -> s * LANES + LANES >= EXPERTS"),
        )
    },
    **{
        (function, "value > best -> value >= best"): "the larger of two equal numbers is either"
        for function in ("row_maximum", "largest_chosen")
    },
    (
        "warp_sum",
        "tl.arange(0, LANES)[None, :] + tl.zeros(values.shape, tl.int32) -> "
        "tl.arange(0, LANES)[None, :] - tl.zeros(values.shape, tl.int32)",
    ): "plus or minus 0, which is there for its shape",
    ("warp_sum", "16 // 2 ** step -> 17 // 2 ** step"): "the same sum in another order, which has the same bound",
    **{
        (function, f"{bits} >> 31 -> {bits} >> 32 ({place})"): "a shift by all bits leaves the sign, as one by 31"
        for function, bits in (("order_of", "bits"), ("score_of", "order"))
        for place in (1, 2)
    },
    (
        "order_of",
        "tl.where(magnitude > infinity, -32768, (magnitude ^ sign) - sign) -> "
        "tl.where(magnitude > infinity, 32768, (magnitude ^ sign) - sign)",
    ): "the upper half of a key of 32 bits: they are equal modulo 2^16",
    ("sigmoid_64", "x < 0 -> x <= 0"): "at 0 both are 1",
    ("score_keys", "0.0 -> 1.0"): "past the last expert the key is another",
    ("exchange_at_distance", "first.dtype == tl.int64 -> first.dtype != tl.int64"): (
        "both ways order a pair; which is cheaper depends on the width"
    ),
    ("exchange_at_distance", "first > second -> first >= second"): "no two keys are equal",
    (
        "exchange_at_distance",
        "(i - DISTANCE % RUN) % (2 * DISTANCE) < DISTANCE -> (i - DISTANCE % RUN) % (2 * DISTANCE) <= DISTANCE",
    ): "a network with further exchanges, which sorts as well",
    ("exchange_at_distance", "i - DISTANCE % RUN -> i + DISTANCE % RUN"): (
        "DISTANCE % RUN is 0 or DISTANCE: the same modulo 2 * DISTANCE"
    ),
    **{
        (
            "row_best",
            "tl.where(high == best_high[:, None], (key & 65535).to(tl.int32), -1) -> "
            f"tl.where(high == best_high[:, None], (key & 65535).to(tl.int32), {other})",
        ): "any number below the rank of an expert, of which there are 1024 at most"
        for other in (1, -2)
    },
    ("take_best", "K - i + 1 > SLICES -> K - i + 1 >= SLICES"): "the smaller of two equal numbers is either",
    ("take_best", "K - i > SLICES -> K - i >= SLICES"): "the smaller of two equal numbers is either",
    **{
        ("take_best", change): "a list holds one more than is kept of it, or there are as many as slices"
        for change in (
            "K - i + 1 -> K - i + 2 (1)",
            "K - i + 1 -> K - i + 2 (2)",
            "K - i -> K + i (1)",
            "K - i -> K + i (2)",
        )
    },
    **{
        (kernel, "SCORE == SOFTMAX and (not RENORMALIZE) -> SCORE == SOFTMAX or not RENORMALIZE"): (
            "the sum over all experts is read in that mode alone"
        )
        for kernel in ("moe_route_forward", "moe_route_grouped")
    },
    ("take_best", "K <= _UNROLLED -> K < _UNROLLED"): "unrolled or not, the same is taken",
    ("chosen_gradient", "x < 0 -> x <= 0"): "at 0 both are 1",
    ("chosen_gradient", "expert < EXPERTS -> expert <= EXPERTS"): "the forward gives no such expert",
    ("chosen_gradient", "0.0 -> 1.0 (3)"): "past the last slot nothing is stored",
    ("chosen_gradient", "0.0 -> 1.0 (1)"): "past the last slot the upstream gradient is 0, and nothing is stored",
    ("chosen_gradient", "0.0 -> 1.0 (2)"): "past the last slot the weight is 0, and nothing is stored",
    ("moe_z_finish", "1.0 -> 1.5"): "without tokens the sum is 0, whatever it is divided by",
    ("moe_balance_finish", "1.0 -> 1.5"): "without tokens the sums are 0, whatever they are divided by",
    ("moe_balance_backward", "1.0 -> 1.5"): "without tokens no gradient is written but 0",
    ("moe_z_backward", "1.0 -> 1.5"): "without tokens no gradient is written but 0",
    ("moe_balance_backward", "0.0 -> 1.0 (1)"): "past the last expert the probability is 0",
    ("moe_balance_backward", "0.0 -> 1.0 (2)"): "past the last expert nothing is stored",
    ("load_chosen", "0.0 -> 1.0"): "past the last slot nothing is summed, nor stored",
    **{
        ("largest_chosen", change): "what exponents are shifted by need not be the largest, but near it"
        for change in ("values[g] > 0 -> values[g] >= 0", "0.0 -> 1.0")
    },
    ("weights_of", "value > 0 -> value >= 0"): "at 0 both are 0",
    (
        "moe_route_grouped",
        "tl.program_id(0).to(tl.int64) + tl.zeros([1], tl.int64) -> "
        "tl.program_id(0).to(tl.int64) - tl.zeros([1], tl.int64)",
    ): "plus or minus 0, which is there for its shape",
    ("moe_route_grouped", "group < GROUPS -> group <= GROUPS (2)"): (
        "a group past the last has the key of NaN, which is below those of all groups"
    ),
    ("moe_route_grouped", "0.0 -> 1.0 (2)"): "where there is no expert the key is another",
    ("softmax_parts", "0.0 -> 1.0"): "where the maximum is infinite, any finite shift",
    **{
        (kernel, "rows - tl.program_id(0) * ROWS * RUN -> rows + tl.program_id(0) * ROWS * RUN"): (
            "tokens past the last do not count"
        )
        for kernel in ("moe_balance_runs", "moe_z_runs")
    },
    ("moe_balance_runs", "tl.minimum(first + LANES, K) -> tl.maximum(first + LANES, K)"): (
        "a slot that is not in this block chooses no expert"
    ),
    **{
        ("moe_balance_runs", change): "any number that is no expert"
        for change in (
            "tl.where(valid, expert, -1) -> tl.where(valid, expert, -2)",
            "other=-1 -> other=-2",
            "tl.where(slot == i, valid_expert, -1) -> tl.where(slot == i, valid_expert, -2)",
        )
    },
    ("moe_balance_runs", "tokens += counted.to(tl.int32) -> tokens -= counted.to(tl.int32)"): (
        "loss and gradient are divided by the number of tokens twice, and its sign cancels"
    ),
    ("moe_add_runs", "0.0 -> 1.0"): "past the last column nothing is stored",
    **{
        (kernel, f"{pointer} + {index} -> {pointer} - {index}"): "plus or minus 0, which is there for its shape"
        for kernel, pointer, index in (
            ("moe_balance_finish", "saved + EXPERTS", "one"),
            ("moe_balance_finish", "loss", "one"),
            ("moe_balance_finish", "counts + EXPERTS", "tl.zeros([1], tl.int64)"),
            ("moe_z_finish", "loss", "one"),
            ("moe_z_finish", "saved", "one"),
            ("moe_z_finish", "counts", "one"),
            ("moe_z_finish", "sums", "one"),
            ("moe_balance_backward", "saved + EXPERTS", "one"),
            ("moe_balance_backward", "dloss", "one"),
            ("moe_z_backward", "saved", "one"),
            ("moe_z_backward", "dloss", "one"),
        )
    },
    ("moe_balance_finish", "expert < EXPERTS -> expert <= EXPERTS (3)"): (
        "the place past the last expert is written again, with the number of tokens"
    ),
    ("moe_balance_finish", "expert < EXPERTS -> expert <= EXPERTS (2)"): "past the last expert the share is 0",
    ("moe_balance_finish", "0.0 -> 1.0"): "past the last expert the fraction is 0",
    ("moe_balance_backward", "expert < EXPERTS -> expert <= EXPERTS (1)"): (
        "past the last expert the probability is 0"
    ),
    ("moe_balance_backward", "expert < EXPERTS -> expert <= EXPERTS (2)"): "past the last expert nothing is stored",
    # moe: experts
    ("moe_experts_product", "column < N -> column <= N (2)"): (
        "the column past the last has a place of its own in the rows, and no sum reads it"
    ),
    ("moe_experts_sum_slots", "inner < WIDTH -> inner <= WIDTH"): (
        "several chunks have as many columns as a program; where there is one, it has all columns"
    ),
    ("moe_experts_sum_slots", "tl.program_id(1) -> tl.program_id(2)"): "one program has all columns of a chunk",
    ("moe_experts_tiles", "tl.where(begin < end, low, -1) -> tl.where(begin < end, low, -2)"): (
        "anything below 0 says that a slot has no rows"
    ),
    ("moe_experts_up", "h.dtype.element_ty.primitive_bitwidth == 16 -> h.dtype.element_ty.primitive_bitwidth != 16"): (
        "finer, or coarser, than rounding to 16 or to 32 bits shows: how the argument of an exponential is rounded"
    ),
    ("moe_experts_up", "h.dtype.element_ty.primitive_bitwidth == 16 -> h.dtype.element_ty.primitive_bitwidth == 17"): (
        "finer, or coarser, than rounding to 16 or to 32 bits shows: how the argument of an exponential is rounded"
    ),
    ("gate_adjoint", "gu.dtype.element_ty.primitive_bitwidth == 16 -> gu.dtype.element_ty.primitive_bitwidth != 16"): (
        "finer, or coarser, than rounding to 16 or to 32 bits shows: how the argument of an exponential is rounded"
    ),
    ("gate_adjoint", "gu.dtype.element_ty.primitive_bitwidth == 16 -> gu.dtype.element_ty.primitive_bitwidth == 17"): (
        "finer, or coarser, than rounding to 16 or to 32 bits shows: how the argument of an exponential is rounded"
    ),
    # gated_delta_rule
    **{
        ("rule_reverse_scan", f"tl.full({shape}, 1, tl.int1) -> tl.full({shape}, 2, tl.int1)"): (
            "true, as any number but 0"
        )
        for shape in ("[1, K_BLOCK]", "[V_BLOCK, 1]", "[CHUNK]")
    },
    ("rule_compose_transitions", "count <= SEGMENT -> count < SEGMENT"): (
        "a sequence of exactly one segment has none after its first: the loop over those has no steps"
    ),
    **{
        ("rule_state_scan", change): "of a segment that no gradient passes through, M is found too, and nobody reads it"
        for change in (
            "length - index * SEGMENT > REVERSE_SEGMENT -> length - index * SEGMENT >= REVERSE_SEGMENT",
            "length <= UNSPLIT -> length < UNSPLIT",
        )
    },
    **{
        (kernel, change): "what is past the last key or value meets zeros, and is not stored"
        for kernel, change in (
            ("rule_state_scan", "v_column < V -> v_column <= V"),
            ("rule_state_scan", "v_row < K -> v_row <= K"),
            ("rule_state_scan", "0.0 -> 1.0 (1)"),
            ("rule_state_scan", "0.0 -> 1.0 (3)"),
            ("rule_reverse_scan", "k_column < K -> k_column <= K (1)"),
        )
    },
    **{
        (kernel, "tl.full([1, CHUNK], 1, tl.int1) -> tl.full([1, CHUNK], 2, tl.int1)"): "true, as any number but 0"
        for kernel in ("rule_state_scan", "rule_output")
    },
    ("fits", "tl.full(index.shape, 1, tl.int1) -> tl.full(index.shape, 2, tl.int1)"): "true, as any number but 0",
    (
        "rule_chunk_inverse",
        "tl.static_range(1, 4) -> tl.static_range(1, 5)",
    ): "nothing lies between blocks of 16 in one of 16",
    ("rule_output", "K_STEP == K_BLOCK -> K_STEP != K_BLOCK (1)"): "one product, or a loop of steps, to one sum",
    (
        "rule_reverse_scan",
        "dsegment_states + ((after - 1) * heads + head) * (V * K) + zero -> "
        "dsegment_states + ((after - 1) * heads + head) * (V * K) - zero",
    ): "plus or minus 0",
    ("rule_reverse_scan", "program += zero -> program -= zero"): "plus or minus 0",
    ("rule_reverse_scan", "V % V_BLOCK -> V // V_BLOCK"): "masks for what is there always",
    **{
        (tile, change): "masks for what is there always, and where they are missing what is read meets zeros"
        for tile, change in (
            ("_tile", "ROWS % ROW_BLOCK -> ROWS // ROW_BLOCK"),
            ("_tile", "COLUMNS % COLUMN_BLOCK -> COLUMNS // COLUMN_BLOCK"),
        )
    },
    ("rule_reverse_scan", "0.0 -> 1.0 (4)"): "after the last chunk nothing decays",
    **{
        ("_store_gradient", change): "plus or minus 0, which is there for the registers it saves"
        for change in (
            "tl.arange(0, 64) + zero -> tl.arange(0, 64) - zero",
            "first_key + zero -> first_key - zero",
        )
    },
    ("rule_state_scan", "TRANSITION and V == 0 -> TRANSITION or V == 0 (2)"): (
        "V is 0 in transitions alone, and one with values has no use for the place of a saved state"
    ),
    ("rule_reverse_scan", "count <= UNSPLIT -> count < UNSPLIT"): (
        "a sequence that is scanned whole is then scanned twice, to one result"
    ),
    ("rule_compose_reverse_transitions", "k_column < K -> k_column <= K (2)"): (
        "a row past the last gives a column past the last, which meets zeros of M and is not stored"
    ),
    **{
        (kernel, f"0.0 -> 1.0 ({load})"): "columns past the last meet zeros of M, and are not stored"
        for kernel in ("rule_compose_transitions", "rule_compose_reverse_transitions")
        for load in (1, 3)
    },
    ("rule_chunk_indices", "sequences + 1 -> sequences + 2"): "a block of bounds past the last has none inside",
    **{
        ("_write_index", change): "whichever chunk writes it, it is one number"
        for change in (
            "tl.store(sequence_begins + rows, rows * time, is_last) -> tl.store(sequence_begins + rows, rows * time)",
            "tl.store(first_chunks + rows, chunks, is_last) -> tl.store(first_chunks + rows, chunks)",
            "tl.store(first_segments + rows, rows * each, is_last) -> tl.store(first_segments + rows, rows * each)",
            "tl.store(index + INDEX_SEQUENCE, row, begins_segment) -> tl.store(index + INDEX_SEQUENCE, row)",
            "tl.store(index + INDEX_NUMBER, segment, begins_segment) -> tl.store(index + INDEX_NUMBER, segment)",
        )
    },
    ("_write_index", "row * each + segment -> row * each - segment (2)"): "the first segment of a row has number 0",
    **{(function, "1.0 -> 1.5"): "0 times any negative number is −0" for function in ("rule_gates", "through_rate")},
    **{
        (kernel, f"{index} < CHUNK -> {index} <= CHUNK"): "a chunk has no row CHUNK: true of every row, as before"
        for kernel, index in (
            ("rule_local_gradients", "j"),
            ("rule_reverse_scan", "row"),
            ("rule_gates", "row"),
        )
    },
    **{
        (kernel, f"{size} + {block} - 1 -> {size} + {block} - 2"): "padded sizes and blocks are multiples of 16"
        for kernel, size, block in (
            ("rule_state_scan", "LINES", "V_BLOCK"),
            ("rule_output", "V", "V_BLOCK"),
            ("rule_reverse_scan", "V", "V_BLOCK"),
            ("rule_gradients", "K", "K_BLOCK"),
        )
    },
    **{
        (kernel, change): "what is read of a chunk that is not there is not used"
        for kernel, change in (
            ("rule_state_scan", "count > 0 -> count >= 0"),
            ("rule_reverse_scan", "count > 0 -> count >= 0"),
            ("rule_reverse_scan", "0.0 -> 1.0 (2)"),
            ("rule_reverse_scan", "0.0 -> 1.0 (3)"),
        )
    },
    **{
        (kernel, change): "what is above the diagonal, or on it, is left out afterwards"
        for kernel, change in (
            ("_chunk_matrix", "i > j -> i >= j"),
            ("_chunk_matrix", "0.0 -> 1.0 (1)"),
            ("rule_scores", "0.0 -> 1.0 (1)"),
            ("rule_output", "0.0 -> 1.0 (1)"),
            ("rule_matrices", "i > j -> i >= j"),
            ("rule_matrices", "0.0 -> 1.0"),
        )
    },
    ("rule_chunk_inverse", "block_row > block_column -> block_row >= block_column"): "equal ones were taken before",
    ("rule_state_scan", "next_decay + 0.0 -> next_decay - 0.0"): "plus or minus 0, which is there for the pipeline",
    ("rule_local_gradients", "K > K_BLOCK -> K >= K_BLOCK"): "keys that are there are read once more",
    ("rule_gradients", "program % 2 == 0 -> program % 2 != 0"): "dk by the first of two programs and dq by the second",
    ("rule_sequence_bounds", "sequences + 1 -> sequences + 2"): "a block of bounds past the last has none inside",
    ("rule_span_indices", "low + high + 1 -> low + high + 2"): (
        "the search halves as before; once it has ended it reads one place further, which the workspace has, and a "
        "slot past the last span is unused whatever lies there"
    ),
    **{
        ("rule_clear", change): "a program with nothing to clear ends early or clears nothing"
        for change in (
            "first >= begin -> first > begin",
            "tl.minimum(first + CLEARED_ROWS, tokens) <= end -> tl.minimum(first + CLEARED_ROWS, tokens) < end",
        )
    },
    ("rule_clear", "tl.minimum(first + CLEARED_ROWS, tokens) -> tl.maximum(first + CLEARED_ROWS, tokens)"): (
        "a program with nothing to clear ends early or clears nothing"
    ),
    (
        "products",
        "left.dtype.element_ty == tl.float32 -> left.dtype.element_ty != tl.float32",
    ): "a loop, rolled or not",
    # gated_delta.recompute_w_u
    ("gated_delta_bounds", "bounds + one -> bounds - one"): "plus or minus 0, which is there for its shape",
    ("gated_delta_bounds", "bounds + count + 1 + one -> bounds + count + 1 - one"): (
        "plus or minus 0, which is there for its shape"
    ),
    **{
        ("chunk_of_slot", change): "plus or minus 0, which is there for its 64 bits"
        for change in (
            "slot + time * 0 -> slot - time * 0",
            "slot % row_chunks * CHUNK + time * 0 -> slot % row_chunks * CHUNK - time * 0",
        )
    },
    **{
        (function, change): "what lies past the last never fits, and the search has steps enough for two more"
        for function, change in (
            ("chunk_of_slot", "stretches - 1 -> stretches + 1 (1)"),
            ("chunk_of_slot", "low + high + 1 -> low + high + 2"),
            ("rule_clear_saved", "sequences - 1 -> sequences + 1"),
            ("rule_clear_saved", "low + high + 1 -> low + high + 2"),
        )
    },
    **{
        (kernel, "tokens <= 0 -> tokens < 0"): "of no tokens, nothing is inside, and nothing stored"
        for kernel in ("gated_delta_w_u", "gated_delta_w_u_backward", "gated_delta_w_u_backward_keys")
    },
    (
        "rule_clear_saved",
        "tl.load(sequence_begins + middle) < (place + 1) * SEGMENT -> "
        "tl.load(sequence_begins + middle) <= (place + 1) * SEGMENT",
    ): "a sequence that begins where the tokens of a place end does not have it, nor does the one that ends there",
    ("rule_clear_saved", "segment > 0 -> segment >= 0"): (
        "0 only before a first sequence that does not begin with the tokens, which is reported, and saves nothing"
    ),
    # gated_delta.gate
    ("sigmoid_of", "t >= 0 -> t > 0"): "both branches agree at 0, where e^{−|t|} = 1",
    **{
        ("softplus_of", change): "the eighth term: a tenth of the last bit, where it is largest"
        for change in ("1.0 -> 1.5 (2)", "15.0 -> 22.5")
    },
    # gated_delta_step
    ("gated_delta_step_tiles", "(block == 0) & (head == 0) -> (block == 0) | (head == 0)"): (
        "more programs of a row then record the fault, and the minimum of equal words is the same word"
    ),
    **{
        ("gated_delta_step_backward_tiles", f"0.0 -> 1.0 ({load})"): (
            "columns past the last, and keys past theirs, meet zeros of what they are multiplied by"
        )
        for load in (2, 4, 9, 13)
    },
    **{
        (
            "gated_delta_step_backward_tokens",
            f"0.0 -> 1.0 ({load})",
        ): "keys past the last meet zeros, and are not stored"
        for load in (1, 2)
    },
    ("gated_delta_step_tiles", "row + one -> row - one"): "plus or minus 0, which is there for its shape",
    ("gated_delta_step_tiles", "place + one -> place - one"): "plus or minus 0, which is there for its shape",
    (
        "gated_delta_step_tiles",
        "(row * time + t) * heads + head + one -> (row * time + t) * heads + head - one",
    ): "plus or minus 0, which is there for its shape",
    ("gated_delta_step_tiles", "g_t.to(tl.int64) + one -> g_t.to(tl.int64) - one"): (
        "plus or minus 0, which is there for its shape"
    ),
    ("gated_delta_step_tiles", "0.0 -> 1.0 (1)"): "outside the tile keys and queries are 0, and a skipped row gives 0",
    ("gated_delta_step_tiles", "0.0 -> 1.0 (4)"): "a column outside the tile is not written",
    ("gated_delta_step_tiles", "[1] -> [2]"): "the same fault recorded twice is the same fault",
    ("gated_delta_step_backward_tokens", "dg + at + one -> dg + at - one"): "the only element of its range is 0",
    ("gated_delta_step_backward_tokens", "dbeta + at + one -> dbeta + at - one"): "the only element of its range is 0",
    **{
        ("gated_delta_step_backward_tiles", f"0.0 -> 1.0 ({place})"): (
            "outside the tile keys, values and the state are 0, and so is all that an upstream gradient meets there"
        )
        for place in (1, 12)
    },
    **{
        ("gated_delta_step_backward_tiles", f"0.0 -> 1.0 ({place})"): (
            "of a skipped row, whose keys, values and upstream gradients are 0 whatever its gates"
        )
        for place in (5, 6, 10, 11)
    },
    # gated_delta_rule in Gluon
    **{
        (function, change): "true of every column, as before"
        for function, change in (
            ("Rows.inside", "self.column < self.column.shape[0] -> self.column <= self.column.shape[0]"),
            ("rule_chunk_inverse_hopper", "column < K -> column <= K"),
            ("_state_consumer", "k_column < K -> k_column <= K"),
            ("_state_consumer", "v_row < V -> v_row <= V"),
            ("_consumer", "k_column < K -> k_column <= K"),
            ("_fetch", "T_rows.column < CHUNK -> T_rows.column <= CHUNK"),
        )
    },
    **{
        (function, change): "more shared memory than is used, which the budget of a build limits"
        for function, change in (
            ("rule_chunk_inverse_hopper", "[2, CHUNK, CHUNK] -> [3, CHUNK, CHUNK]"),
            ("rule_chunk_inverse_hopper", "[2, HALF, HALF] -> [3, HALF, HALF] (1)"),
            ("rule_chunk_inverse_hopper", "[2, HALF, HALF] -> [3, HALF, HALF] (2)"),
            ("rule_chunk_inverse_hopper", "3 * PARTS -> 4 * PARTS"),
            ("rule_transitions_hopper", "STAGES: gl.constexpr = 2 -> STAGES: gl.constexpr = 3"),
            ("rule_whole_scan_hopper", "[2, CHUNK, CHUNK] -> [3, CHUNK, CHUNK]"),
            ("rule_whole_scan_hopper", "[2, CHUNK, V_BLOCK] -> [3, CHUNK, V_BLOCK]"),
            ("rule_whole_scan_hopper", "[2, 1] -> [3, 1]"),
            ("rule_local_gradients_hopper", "[4, CHUNK, CHUNK] -> [5, CHUNK, CHUNK]"),
            ("rule_local_gradients_hopper", "2 * BLOCKS -> 3 * BLOCKS"),
            ("rule_local_gradients_hopper", "2 * BLOCKS -> 2 + BLOCKS"),
            ("rule_local_gradients_hopper", "[2, CHUNK] -> [3, CHUNK] (1)"),
            ("rule_local_gradients_hopper", "[2, CHUNK] -> [3, CHUNK] (2)"),
            ("rule_gradients_hopper", "[1, CHUNK, K] -> [2, CHUNK, K] (1)"),
            ("rule_gradients_hopper", "[1, CHUNK, K] -> [2, CHUNK, K] (2)"),
            ("rule_gradients_hopper", "[2, CHUNK, V] -> [3, CHUNK, V]"),
            ("rule_gradients_hopper", "[2, V, CHUNK] -> [3, V, CHUNK]"),
            ("rule_gradients_hopper", "[1, V, CHUNK] -> [2, V, CHUNK]"),
            ("rule_gradients_hopper", "[1, CHUNK, V] -> [2, CHUNK, V]"),
            ("rule_gradients_hopper", "[1, V, K] -> [2, V, K] (1)"),
            ("rule_gradients_hopper", "[1, V, K] -> [2, V, K] (2)"),
            ("rule_gradients_hopper", "[1, CHUNK, CHUNK] -> [2, CHUNK, CHUNK] (1)"),
            ("rule_gradients_hopper", "[1, CHUNK, CHUNK] -> [2, CHUNK, CHUNK] (2)"),
            ("rule_gradients_hopper", "[2, CHUNK] -> [3, CHUNK]"),
            ("rule_gradients_hopper", "device.Gates.allocate(2) -> device.Gates.allocate(3)"),
        )
    },
    ("_columns", "i[None, :] > j[:, None] -> i[None, :] >= j[:, None]"): (
        "the diagonal of A is a row's own factor, which no step of the elimination reads"
    ),
    ("_columns", "0.0 -> 1.0"): "what is above the diagonal of A, or on it, no step of the elimination reads",
    **{
        ("rule_chunk_inverse_hopper", change): "a step's own row too, whose factor is on the diagonal of A, and 0"
        for change in ("row > step -> row >= step", "row + 16 > step -> row + 16 >= step", "row + 16 -> row + 17 (2)")
    },
    (
        "rule_chunk_inverse_hopper",
        "1 if GROUP % 2 == 0 else 2 -> 2 if GROUP % 2 == 0 else 2",
    ): "two heads of one key head then copy and multiply its keys twice, to the same product",
    **{
        (function, change): "a wait for what was waited for before, or for fewer than are under way, and says so"
        for function, change in (
            ("rule_chunk_inverse_hopper", "which < keyed -> which <= keyed (2)"),
            ("rule_chunk_inverse_hopper", "which < keyed -> which <= keyed (4)"),
            ("rule_local_gradients_hopper", "member > 0 -> member >= 0"),
            (
                "rule_local_gradients_hopper",
                "warpgroup_mma_wait(2, deps=[scores]) -> warpgroup_mma_wait(3, deps=[scores])",
            ),
            ("_consumer", "warpgroup_mma_wait(2, deps=[dS]) -> warpgroup_mma_wait(3, deps=[dS])"),
        )
    },
    ("_producer", "AHEAD - 1 -> AHEAD - 2"): "it waits for more copies than it needs",
    ("_producer", "chunks > 0 -> chunks >= 0"): "of a sequence without tokens, nobody waits for the barrier",
    **{
        (function, change): "what is read for a sequence without tokens is not used"
        for function, change in (
            ("rule_forward_scan_hopper", "count > 0 -> count >= 0 (1)"),
            ("rule_forward_scan_hopper", "count > 0 -> count >= 0 (2)"),
            ("rule_whole_scan_hopper", "count > 0 -> count >= 0 (1)"),
            ("rule_whole_scan_hopper", "count > 0 -> count >= 0 (2)"),
            ("rule_transitions_hopper", "count > 0 -> count >= 0"),
            ("rule_transitions_hopper", "0.0 -> 1.0 (2)"),
            ("rule_state_scan_hopper", "count > 0 -> count >= 0"),
        )
    },
    **{
        ("rule_transitions_hopper", change): "the count of a segment is never more than what its sequence has left"
        for change in (
            "gl.load(sequence_begins + sequence + 1) - begin - index * SEGMENT -> "
            "gl.load(sequence_begins + sequence + 1) - begin + index * SEGMENT",
            "gl.load(sequence_begins + sequence + 1) - begin -> gl.load(sequence_begins + sequence + 1) + begin",
        )
    },
    ("rule_transitions_hopper", "chunk + 1 -> chunk - 1 (3)"): "the other of two stages",
    **{
        ("_fetch", change): "of rows past a chunk's last token T is 0, and their gates meet zeros"
        for change in (
            "T_rows.row * 0 -> T_rows.row + 0",
            "lane * 0 -> lane + 0 (1)",
            "lane * 0 -> lane + 0 (2)",
        )
    },
    ("_unnormalized", "0.0 -> 1.0"): "rows past a chunk's last token are not stored",
    **{
        (function, change): "plus or minus 0, which is there for the registers it saves"
        for function, change in (
            ("_state_consumer", "final_state + (chunk + 1 - chunks) -> final_state - (chunk + 1 - chunks)"),
            ("_state_consumer", "final_state + gl.minimum(stage, 0) -> final_state - gl.minimum(stage, 0)"),
            ("_consumer", "state += gl.minimum(stage, 0) -> state -= gl.minimum(stage, 0)"),
            ("rule_gradients_hopper", "index >> 30 -> index >> 31"),
            (
                "rule_gradients_hopper",
                "gl.arange(0, CHUNK, gl.SliceLayout(1, SQUARE)) + zero -> "
                "gl.arange(0, CHUNK, gl.SliceLayout(1, SQUARE)) - zero",
            ),
        )
    },
    # moe: experts in Gluon
    ("experts.hopper.device.silu_product", "g >= 0 -> g > 0"): "both branches agree at 0, where h = 1",
    ("experts.hopper.device.Stages.allocate", "not LEFT_BY_TERM -> LEFT_BY_TERM"): "64 rows by 64 terms, either way",
    **{
        ("experts.hopper.device.store_rows", change): "plus or minus 0, which is there for the registers it saves"
        for change in ("row += gl.minimum(rows - 1, 0) -> row -= gl.minimum(rows - 1, 0)", "rows - 1 -> rows + 1")
    },
    ("experts.hopper.hidden_gradients._producer", "copied += 1 -> copied += 2 (2)"): (
        "dy's copies come first, so that LAG is reached with either"
    ),
    ("experts.hopper.device.token_lines", "column < DEPTH -> column <= DEPTH"): "true of every column, as before",
    (
        "experts.hopper.device.token_lines",
        "inside[:, None] & (column < DEPTH)[None, :] -> inside[:, None] | (column < DEPTH)[None, :]",
    ): "in the place of a row past the last, the first token's is copied and multiplied, and not stored",
    (
        "moe_experts_down_adjoint_hopper",
        "[2, HALF, PART] -> [3, HALF, PART]",
    ): "more shared memory than is used, which the budget of a build limits",
    **{
        (f"experts.hopper.{function}", change): "a half without rows is copied too, and passed by"
        for function, change in (
            ("hidden_gradients._producer", "begin + HALF < end -> begin + HALF <= end"),
            ("hidden_gradients._producer", "begin + HALF -> begin - HALF (2)"),
            ("product._producer", "begin + HALF < end -> begin + HALF <= end"),
            ("product._producer", "begin + HALF -> begin - HALF (1)"),
        )
    },
    **{
        (f"experts.hopper.{function}._consumer", change): "a half without rows is multiplied too, and not stored"
        for function in ("up", "product")
        for change in (
            "begin + HALF_NUMBER * HALF < end -> begin + HALF_NUMBER * HALF <= end",
            "begin + HALF_NUMBER * HALF -> begin - HALF_NUMBER * HALF (1)",
        )
    },
    ("experts.hopper.outer._producer", "first + DEPTH <= end -> first + DEPTH < end"): (
        "threads copy the last rows even where these are a whole stage"
    ),
    **{
        (function, change): "of a multiple of 64, the same number of tiles"
        for function, change in (
            ("moe_experts_down_adjoint_hopper", "INNER + COLUMNS - 1 -> INNER + COLUMNS - 2"),
            ("moe_experts_up_hopper", "INNER + GATE - 1 -> INNER + GATE - 2"),
            ("moe_experts_product_hopper", "WIDTH + COLUMNS - 1 -> WIDTH + COLUMNS - 2"),
            ("experts.hopper.outer._producer", "M + ROWS - 1 -> M + ROWS - 2"),
            ("experts.hopper.outer._producer", "N + COLUMNS - 1 -> N + COLUMNS - 2"),
            ("experts.hopper.outer._consumer", "M + ROWS - 1 -> M + ROWS - 2"),
            ("experts.hopper.outer._consumer", "N + COLUMNS - 1 -> N + COLUMNS - 2"),
        )
    },
    **{
        (function, change): "more tiles of columns, of which those past the last are multiplied and not stored"
        for function, change in (
            ("moe_experts_up_hopper", "INNER + GATE - 1 -> INNER + GATE + 1"),
            ("moe_experts_up_hopper", "(INNER + GATE - 1) // GATE -> (INNER + GATE - 1) % GATE"),
            ("moe_experts_product_hopper", "WIDTH + COLUMNS - 1 -> WIDTH + COLUMNS + 1"),
            ("moe_experts_product_hopper", "(WIDTH + COLUMNS - 1) // COLUMNS -> (WIDTH + COLUMNS - 1) % COLUMNS"),
        )
    },
    **{
        ("experts.hopper.hidden_gradients._consumer", change): "the next tile is looked up beside other columns"
        for change in ("part == PARTS - 1 -> part != PARTS - 1", "PARTS - 1 -> PARTS - 2 (2)")
    },
    **{
        ("experts.hopper.hidden_gradients._consumer", change): "the last columns never leave the registers"
        for change in (
            "2 * PARTS - 1 -> 2 * PARTS + 1", "2 * PARTS -> 3 * PARTS", "part * 2 -> part + 2",
            "part * 2 + side -> part * 2 - side",
        )
    },
}  # fmt: skip
