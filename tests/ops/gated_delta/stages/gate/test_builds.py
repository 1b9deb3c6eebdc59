"""What is built of `gate`."""

import pytest
import torch
from torch import Tensor

from adjoint.core import kernels
from adjoint.core.launch import variants
from adjoint.core.plan import bind
from adjoint.ops.gated_delta.stages import gate

pytestmark = pytest.mark.skipif(bool(kernels.triton_missing()), reason="kernels are written in Triton")


def test_builds_of_parameters_in_other_types_have_other_names() -> None:
    """The same types, of other parameters, are another kernel, and must not be taken for one that was built."""

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    half, single = torch.bfloat16, torch.float32
    names = [
        {
            name
            for name, variant in variants(
                bind(gate, empty(half, 4, 32), empty(half, 4, 32), empty(A_log, 32), empty(dt_bias, 32)), "sm_90"
            )
            if variant.kernel == "gated_delta_gate"
        }
        for A_log, dt_bias in ((half, single), (single, half))
    ]
    assert len(names[0]) == len(names[1]) == 1 and names[0] != names[1]
