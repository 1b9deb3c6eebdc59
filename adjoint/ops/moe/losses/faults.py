"""The value errors of the router's losses."""

from adjoint.core.errors import register_fault

INDEX_OUT_OF_RANGE = register_fault(
    "moe.load_balancing_loss: indices[{position}] (of all indices, row by row) is {value}, which is no expert: experts "
    "are numbered from 0 to the last axis of logits"
)
