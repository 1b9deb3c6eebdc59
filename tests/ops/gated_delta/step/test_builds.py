"""What is built of `gated_delta_step`: under both schedules, in the types it computes in."""

import pytest

from adjoint.core import kernels
from adjoint.ops import builds

pytestmark = pytest.mark.skipif(bool(kernels.triton_missing()), reason="kernels are written in Triton")


@pytest.mark.parametrize(("target", "columns"), [("sm_90", {16, 32}), ("sm_80", {16})])
def test_the_tuned_schedule_is_built_where_it_is_used(target: str, columns: set[int]) -> None:
    """Heads of 128 have tiles as wide as the schedule says, where rows are aligned and there is one token."""
    widths = set()
    for _, variant in builds(target):
        constants = dict(variant.constants)
        if variant.kernel != "gated_delta_step_tiles" or constants["V"] != 128:
            continue
        if constants["ONE_TOKEN"] and constants["ADJACENT"]:
            widths.add(constants["COLUMNS"])
    assert widths == columns


def test_scale_has_the_type_of_the_arithmetic() -> None:
    types = {
        (dict(variant.constants)["DOUBLE"], dict(variant.types)["scale"])
        for _, variant in builds("sm_90")
        if variant.kernel in ("gated_delta_step_tiles", "gated_delta_step_backward_tiles")
    }
    assert types == {(True, "fp64"), (False, "fp32")}
