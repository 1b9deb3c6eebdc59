"""The value errors of the family, as the status word knows them."""

from adjoint.core.errors import register_fault

INDEX_OUT_OF_RANGE = register_fault(
    "take_along_axis: indices must be at least minus the length of the axis and less than it, "
    'got {value} at position {position} (counted in order); out_of_range="zero" gives zeros there instead'
)
REPEATED_INDEX = register_fault(
    "take_along_axis: distinct=True promises that no index repeats within a line, but {value} at position {position} "
    "(counted in order) was there before; leave distinct out, and gradients of repeated indices are added"
)
