"""The value errors of the family, as the status word knows them."""

from adjoint.core.errors import register_fault

SEQUENCES_OUT_OF_ORDER = register_fault(
    "gated_delta: cu_seqlens must begin with 0, never descend, and end with the number of tokens, "
    "got {value} at position {position} of cu_seqlens"
)
POSITIVE_GATE = register_fault(
    "gated_delta: g is the logarithm of a decay and must be at most 0, got a positive number at position "
    "{position} (counted in order); a decay factor goes in as its logarithm"
)
STATE_INDEX_OUT_OF_RANGE = register_fault(
    "gated_delta_step: state_indices must be at least 0 and less than the number of states, or -1 for a row that is "
    "skipped, got {value} at position {position}"
)
STATE_INDEX_REPEATED = register_fault(
    "gated_delta_step: state_indices must not repeat, because two rows would write one state, got {value} again at "
    "position {position}"
)
