"""Helpers for the cases of ops that look up by index."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from adjoint.contract import mistakes
from adjoint.contract.batching import PIECE, Answers
from adjoint.contract.cases import BadCall
from adjoint.contract.inputs import Inputs, differentiable, each
from adjoint.core.errors import Unsupported
from adjoint.core.plan import Plan, plan
from adjoint.core.preference import Preference

BUILT_UNALIGNED = (torch.float64, torch.bfloat16)
"""The dtypes whose kernels are built for unaligned memory as well."""


def normal_values(generator: torch.Generator, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    """Normal values, the same on every device."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)


def on_device(device: torch.device, generator: torch.Generator) -> torch.Generator:
    """A generator on a device, seeded by another generator."""
    return torch.Generator(device).manual_seed(int(torch.randint(2**31, (), generator=generator)))


def columns(arguments: Inputs, outputs: tuple[Tensor, ...]) -> Iterator[tuple[Inputs, tuple[Tensor, ...]]]:
    """Pieces of whole columns. Every column is a problem of its own, and all columns share the indices."""
    width = outputs[0].shape[-1]
    largest = max(tensor.numel() for tensor in (*arguments, *outputs) if tensor is not None)
    step = max(1, PIECE * width // max(1, largest))
    for begin in range(0, width, step):

        def part(tensor: Tensor, begin: int = begin) -> Tensor:
            return tensor[..., begin : begin + step] if tensor.is_floating_point() else tensor

        yield each(part, arguments), tuple(map(part, outputs))


def narrow_dtype(dtype: torch.dtype) -> torch.dtype:
    """A type that is too narrow for sums of values of a dtype."""
    return {torch.float64: torch.float32, torch.float16: torch.float16}.get(dtype, torch.bfloat16)


def zeros(upstream: tuple[Tensor, ...], inputs: Inputs) -> Answers:
    return mistakes.zeros(upstream, differentiable(inputs))


def adjoint_of(function: Any, *arguments: Any, **options: Any) -> Plan:
    """The plan of a call's backward."""
    backward = plan(function, *arguments, **options).adjoint
    assert backward is not None
    return backward


def bad_options(op: str, differentiate: Callable[..., Any]) -> tuple[BadCall, ...]:
    """Calls with options that a lookup refuses. `differentiate(device, **options)` runs a call and its backward."""
    nothing = Preference(max_workspace_bytes=0)
    return (
        BadCall("unknown out_of_range", lambda d: differentiate(d, out_of_range="clamp"),
                "out_of_range", "'raise'", "'zero'", "'clamp'"),
        BadCall("a preference of another type", lambda d: differentiate(d, preference="eager"),
                "preference=", "adjoint.Preference", "str"),
        BadCall("no workspace allowed", lambda d: differentiate(d, preference=nothing),
                op, "triton", "eager", "the preference allows 0", error=Unsupported),
    )  # fmt: skip
