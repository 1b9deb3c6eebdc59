"""The value errors of the family, as the status word knows them."""

from adjoint.core.errors import register_fault

ID_OUT_OF_RANGE = register_fault(
    "embedding: ids must be at least 0 and less than the number of rows of weight, "
    'got {value} at position {position} (counted in order); out_of_range="zero" makes such rows zero instead'
)
BAG_ID_OUT_OF_RANGE = register_fault(
    "embedding_bag: ids must be at least 0 and less than the number of rows of weight, "
    "got {value} at position {position} (counted in order)"
)
OFFSETS_OUT_OF_ORDER = register_fault(
    "embedding_bag: offsets must begin with 0, never descend, and not exceed the number of ids, "
    "got {value} at position {position} of the offsets"
)
