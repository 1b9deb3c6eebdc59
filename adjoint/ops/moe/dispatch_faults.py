"""The value errors of dispatch and combine, as the status word knows them."""

from adjoint.core.errors import register_fault

EXPERT_OUT_OF_RANGE = register_fault(
    "moe.dispatch: indices must be at least 0 and less than num_experts, "
    "got {value} at position {position} (token·k + slot)"
)
ROW_OUT_OF_RANGE = register_fault(
    "moe.combine: layout.inverse must name rows, each at least 0 and less than the number of rows, "
    "got {value} at position {position} (token·k + slot); give the layout that moe.dispatch returned"
)
