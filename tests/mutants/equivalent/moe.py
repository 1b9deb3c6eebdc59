"""Mutants of the mixture of experts that compute the same, and why."""

EQUIVALENT = {
    # layout, dispatch and combine
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
    # the router and its losses
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
    # experts
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
    # experts in Gluon
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
    **{
        (function, change): "more shared memory than is used, which the budget of a build limits"
        for function, change in (
            ("moe_experts_down_adjoint_hopper", "[2, HALF, PART] -> [3, HALF, PART]"),
            ("experts.hopper.device.allocate_rest", "[2, HALF, HALF] -> [3, HALF, HALF]"),
        )
    },
    **{
        ("experts.hopper.device.result_room", change): "two parts change places, for who writes and who copies them"
        for change in ("PART == 2 -> PART == 3", "PART == 2 -> PART != 2")
    },
    ("experts.hopper.device.multiply", "steps > 0 -> steps >= 0 (1)"): "products that lend no stage have steps",
    ("experts.hopper.product._store", "rows >= HALF -> rows > HALF"): "threads store the rows that TMA would copy",
    ("experts.hopper.product._store", "columns - part * HALF -> columns + part * HALF"): (
        "columns are a multiple of 64, so that a part that is stored has all of its own"
    ),
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
        ("experts.hopper.up._consumer", change): "a half without rows is multiplied too, and not stored"
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
            ("moe_experts_product_hopper", "COLUMNS - 1 -> COLUMNS - 2"),
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
            ("moe_experts_product_hopper", "COLUMNS - 1 -> COLUMNS + 1"),
            ("moe_experts_product_hopper", "N - first_column -> N + first_column"),
            (
                "moe_experts_product_hopper",
                "gl.minimum(WIDTH, N - first_column) -> gl.maximum(WIDTH, N - first_column)",
            ),
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
