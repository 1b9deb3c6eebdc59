"""What `gate` is tested and verified on."""

from collections.abc import Iterator

import torch
from torch import Tensor

from adjoint.contract.cases import Answers, BadCall, Case, Inputs, Make, Rebatch, Special, Subject, Workload
from adjoint.core.plan import Call, bind
from adjoint.core.problem import wide_dtype
from adjoint.ops.gated_delta import reference
from adjoint.ops.gated_delta.stages.gate import gate
from adjoint.ops.gated_delta.values import gradients, zeros


def gates(shape: tuple[int, ...]) -> Make:
    def make(dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Inputs:
        def normal(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float64)

        a, b = (normal(*shape) * 3).to(dtype), normal(*shape).to(dtype)
        return tuple(x.to(device) for x in (a, b, normal(shape[-1]).to(wide_dtype(dtype)), normal(shape[-1]).to(dtype)))

    return make


def _fewer_tokens(inputs: Inputs, upstream: tuple[Tensor, ...]) -> Iterator[Rebatch]:
    """Some tokens alone, whose g and β keep their bits. Two of the gradients are sums over all tokens."""
    a, b, *parameters = inputs
    for begin in range(a.shape[0]):
        here = slice(begin, begin + 1)

        def pairs(whole: Answers, alone: Answers, here: slice = here) -> Iterator[tuple[Tensor, Tensor]]:
            return ((part, every[here]) for every, part in zip(whole[0], alone[0], strict=True))

        yield Rebatch(f"row {begin}", (a[here], b[here], *parameters), tuple(x[here] for x in upstream), pairs)


GATE = Subject(
    name="gate",
    function=gate,
    inputs=("a", "b", "A_log", "dt_bias"),
    reference=reference.gate,
    reference_backward=gradients(reference.gate),
    cases=(Case("tokens", gates((2, 3, 4))),),
    mistakes={"zero output": zeros},
    dtypes=(torch.float64, torch.bfloat16),
    batched=("a", "b"),
    rebatched=_fewer_tokens,
    specials=(
        Special(
            "a gate that resets the state, and is not used",
            inputs=(torch.inf, 0.0, 0.0, 0.0),
            upstream=-0.0,
            outputs=(-torch.inf, 0.5),
            gradients=(0.0, -0.0, 0.0, 0.0),
        ),
    ),
)

SUBJECTS = (GATE,)
BAD_CALLS: tuple[BadCall, ...] = ()
WORKLOADS: tuple[Workload, ...] = ()


def built_calls() -> Iterator[Call]:
    """Calls with the projections of a layer in both types, and with parameters in float32 and in another type."""
    for element in (torch.bfloat16, torch.float32):
        a, b = (torch.empty(64, 32, dtype=element, device="meta") for _ in range(2))
        parameters = (torch.empty(32, dtype=dtype, device="meta") for dtype in (torch.float32, element))
        yield bind(gate, a, b, *parameters)
