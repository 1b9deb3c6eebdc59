"""What `normalize` is tested and verified on."""

from collections.abc import Iterator

import torch

from adjoint.contract.cases import BadCall, Case, Inputs, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.stages.normalize import normalize
from adjoint.ops.gated_delta.values import gradients, zeros


def vectors(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
    x = torch.randn((4, 3, 6), generator=generator, dtype=torch.float64)
    x[0] *= 1e-3  # so that the 1e-6 matters
    return (x.to(dtype).to(device),)


NORMALIZE = Subject(
    name="normalize",
    function=normalize,
    inputs=("x",),
    reference=lambda x: (reference.normalized(x),),
    reference_backward=gradients(lambda x: (reference.normalized(x),), 1),
    cases=(Case("vectors", vectors),),
    mistakes={"zero output": zeros},
    dtypes=(torch.float64, torch.bfloat16),
)

SUBJECTS = (NORMALIZE,)
BAD_CALLS: tuple[BadCall, ...] = ()
WORKLOADS: tuple[Workload, ...] = ()


def built_calls() -> Iterator[Call]:
    """Calls with heads of a layer in both types, and with vectors that do not fill a tile."""
    for dtype, size in ((torch.bfloat16, 128), (torch.float32, 128), (torch.float32, 1000)):
        yield bind(normalize, torch.empty(64, size, dtype=dtype, device="meta"))
