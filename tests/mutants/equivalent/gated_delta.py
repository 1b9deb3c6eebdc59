"""Mutants of the gated delta rule that compute the same, and why."""

EQUIVALENT = {
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
            ("_load_half", "k_column < k_column.shape[0] -> k_column <= k_column.shape[0]"),
            ("_scan_columns", "k_column < HALF -> k_column <= HALF"),
            ("_consumer", "k_column < K -> k_column <= K (1)"),
            ("_consumer", "k_column < K -> k_column <= K (2)"),
        )
    },
    **{
        (function, change): "more shared memory than is used, which the budget of a build limits"
        for function, change in (
            ("rule_chunk_inverse_hopper", "[2, CHUNK, CHUNK] -> [3, CHUNK, CHUNK]"),
            ("rule_chunk_inverse_hopper", "[2, HALF, HALF] -> [3, HALF, HALF] (1)"),
            ("rule_chunk_inverse_hopper", "[2, HALF, HALF] -> [3, HALF, HALF] (2)"),
            ("rule_chunk_inverse_hopper", "3 * PARTS -> 4 * PARTS"),
            ("rule_whole_scan_hopper", "[2, CHUNK, CHUNK] -> [3, CHUNK, CHUNK]"),
            ("rule_whole_scan_hopper", "[2, CHUNK, V_BLOCK] -> [3, CHUNK, V_BLOCK]"),
            ("rule_whole_scan_hopper", "[2, 1] -> [3, 1]"),
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
        )
    },
    ("_producer", "AHEAD - 1 -> AHEAD - 2"): "it waits for more copies than it needs",
    ("_producer", "chunks > 0 -> chunks >= 0"): "of a sequence without tokens, nobody waits for the barrier",
    **{
        (function, change): "what is read for a sequence without tokens is not used"
        for function, change in (
            ("rule_forward_scan_hopper", "count > 0 -> count >= 0 (1)"),
            ("rule_forward_scan_hopper", "count > 0 -> count >= 0 (2)"),
            ("rule_whole_scan_hopper", "count > 0 -> count >= 0"),
            ("rule_states_ahead_hopper", "chunks > 0 -> chunks >= 0"),
            ("rule_state_scan_hopper", "count > 0 -> count >= 0"),
        )
    },
    ("state_chunks.copy", "column < V -> column <= V"): "a column past the last of V is multiplied, and not stored",
    ("state_chunks.copy", "count -= CHUNK -> count += CHUNK"): "a state within a sequence follows whole chunks",
    ("state_chunks.copy", "chunks > 0 -> chunks >= 0"): "without chunks nobody waits for one",
    ("state_chunks.advance", "K > HALF -> K >= HALF (2)"): "of keys of 64, a rest that is not read",
    ("_scan_columns", "K > HALF -> K >= HALF (1)"): "of keys of 64, a second half of M and B that is not stored",
    ("rule_transitions_hopper", "K + V + WIDTH - 1 -> K + V + WIDTH - 2"): "K and V are multiples of 64",
    (
        "rule_states_ahead_hopper",
        "last_state - first_chunk -> last_state + first_chunk",
    ): "no stretch begins with a state after the last, and none is stored",
    ("rule_reverse_scan_hopper", "length > UNSPLIT -> length >= UNSPLIT"): (
        "a sequence of one segment, which is scanned whole, is then scanned twice, to one result"
    ),
    ("_consumer", "part > 0 -> part >= 0"): "the first slice is added to zeros, or to nothing",
    ("_consumer", "SLICES + 1 -> SLICES + 2"): "a wait for nothing, and for nothing still",
    ("_consumer", "SLICES + 1 -> SLICES - 1"): "a wait for the first slices, which are waited for with the rest later",
    ("_unnormalized", "0.0 -> 1.0"): "rows past a chunk's last token are not stored",
    **{
        (function, change): "plus or minus 0, which is there for the registers it saves"
        for function, change in (
            ("_state_consumer", "final_state + (chunk + 1 - chunks) -> final_state - (chunk + 1 - chunks)"),
            ("_state_consumer", "final_state + gl.minimum(stage, 0) -> final_state - gl.minimum(stage, 0)"),
            ("_consumer", "target + gl.minimum(stage, 0) -> target - gl.minimum(stage, 0)"),
            ("rule_gradients_hopper", "index >> 30 -> index >> 31"),
            (
                "rule_gradients_hopper",
                "gl.arange(0, CHUNK, gl.SliceLayout(1, SQUARE)) + zero -> "
                "gl.arange(0, CHUNK, gl.SliceLayout(1, SQUARE)) - zero",
            ),
        )
    },
}  # fmt: skip
