"""The value error of the expert layer, as the status word knows it."""

from adjoint.core.errors import register_fault

INDEX_OUT_OF_RANGE = register_fault(
    "moe.experts: indices must be at least 0 and less than the number of experts, "
    "got {value} at position {position} (token·k + slot)"
)
